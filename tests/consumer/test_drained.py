"""R6: how the end of a closed partition is found, as an application sees it."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from feedapi_client import FetchOptions, NoProgressError
from feedapi_client.runtime import trouble
from feedapi_client.testing import Publisher, Request, faults
from feedapi_client.testing.publisher import Response
from tests.consumer.helpers import SHORT, LocalFeed, numbers, wait_until
from tests.consumer.script import Step, do, play
from tests.positions import stand

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]
FIVE = do.numbers(0, *range(5))


def at(cursor: str, answer: Response) -> Any:
    """A fault: what is asked with this cursor gets that answer."""

    def replace(response: Response, request: Request, publisher: Publisher) -> Response:
        return answer if request.cursor == cursor else response

    return replace


def lag(publisher: Publisher, visible: int) -> None:
    """Let the replica that answers fetches know only the first events of partition 0."""
    end = publisher.end_cursor(0)
    older = Response(200, body=b'{"cursor":"%s"}\n' % end.encode())
    publisher.fail(at(end, older), times=None, on="fetch", partition=0)
    numbers(publisher, 0, range(visible, visible + 5))
    publisher.split(0)


def lagging(**settings: Any) -> tuple[LocalFeed, str]:
    """A feed whose replica lags behind the fifth event, and the cursor there."""
    feed = LocalFeed(dialect="v2-draft", page_size=5, **settings)
    end = feed.numbers(0, *range(5))
    lag(feed, 5)
    return feed, end


@pytest.mark.parametrize("status", [200, 204, 206, 299])
async def test_r06_empty_pages_without_a_line_end_a_closed_partition_and_its_children_are_read(
    status: int,
) -> None:
    feed = LocalFeed()
    end = feed.numbers(0, *range(5))
    feed.fail(at(end, Response(status)), times=None, partition=0)
    first, _ = feed.split(0)
    feed.numbers(first, *range(5, 10))
    assert await feed.read() == [*range(10)]
    assert (await feed.store.statuses())[0] == "drained"
    asked = [r for r in feed.requests if r.partition == 0 and r.cursor == end]
    assert len(asked) >= 3


EMPTY = faults.Empty()
STEPS: dict[str, list[Step]] = {
    "one empty page without a line is not the end": [
        *(FIVE, do.close(0), do.fail(EMPTY, times=1), do.reads(*range(5))),
    ],
    "with lastCursor the end is where that is, whatever empty pages say": [
        *(do.begin_with(dialect="v2-draft"), FIVE, do.close(0), do.fail(EMPTY, times=3)),
        *(do.reads(*range(5)), do.at_end_cursor()),
    ],
    # A replica that lags lists it as open later.
    "what was closed at a start at the end is read on from its end": [
        *(FIVE, do.split(0), do.reads(start="last"), do.at_end_cursor()),
        *(do.remove(0), do.add(0), do.numbers(0, 5), do.open(), do.delivers("new", 5)),
    ],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
async def test_r06_r07_an_end(steps: list[Step]) -> None:
    await play(*steps)


async def test_r06_a_replica_that_lags_behind_last_cursor_is_asked_until_it_has_the_rest() -> None:
    feed, end = lagging()
    async with feed.open() as reader:
        await reader.commit()
        await reader.nothing_until(lambda: reader.state() == "retrying")
        status = reader.consumer.status()[0]
        assert repr(feed.end_cursor(0)) in str(status.error)
        assert repr(end) in str(status.error)
        assert (await feed.store.statuses())[0] == "open"
        feed.heal()
        assert await reader.commit() == [*range(5, 10)]
        await reader.nothing_until(lambda: reader.state() == "drained")
    assert (await feed.store.positions())[0].cursor == feed.end_cursor(0)


async def test_r06_a_lag_that_lasts_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trouble, "LAG_REPORTED_SECONDS", 0.0)
    feed, end = lagging()
    async with feed.open() as reader:
        await reader.commit()
        before = feed.counters["fetch"]
        await reader.nothing_until(lambda: feed.counters["fetch"] >= before + 5)
        assert len(reader.reports(repr(end))) == 1


async def test_r06_a_replica_that_never_reaches_last_cursor_is_an_error_with_both_cursors() -> None:
    feed, end = lagging()
    with pytest.raises(NoProgressError) as caught:
        await feed.read(retry=SHORT)
    for text in (repr(end), repr(feed.end_cursor(0)), "feedapi cursors drain 0"):
        assert text in str(caught.value)
    assert (await feed.store.statuses())[0] == "open"


async def test_r06_with_a_selection_last_cursor_is_not_the_end() -> None:
    """A filtered feed ends at cursors of its own, and `lastCursor` is the end of all events."""
    feed = LocalFeed(dialect="v2-draft", filters=["entity"])
    feed.numbers(0, *range(5))
    feed.numbers(0, *range(5, 10), entity="b")
    feed.close(0)
    own_end = feed.another_cursor(0, feed.end_cursor(0))

    def filtered(response: Response, request: Request, publisher: Publisher) -> Response:
        lines = response.body.splitlines(keepends=True)[:-1]
        if request.cursor == own_end:
            lines = []
        response.body = b"".join(lines) + b'{"cursor":"%s"}\n' % own_end.encode()
        return response

    feed.fail(filtered, times=None, on="fetch")
    chosen = FetchOptions(filters={"entity": "b"})
    assert await feed.read(fetch=chosen) == [*range(5, 10)]
    assert stand(await feed.store.positions())[0] == (own_end, "drained")


@pytest.mark.parametrize("closed_again", [True, False])
async def test_r06_an_end_counts_no_more_once_its_partition_is_listed_open_again(
    closed_again: bool,
) -> None:
    """It was seen while the last batch was in flight, and an event came after it."""
    feed = LocalFeed()
    feed.numbers(0, 0, 1)
    feed.close(0)

    async def discovered(times: int) -> None:
        target = feed.counters["discovery"] + times
        await wait_until(lambda: feed.counters["discovery"] >= target)

    async with feed.open() as reader:
        batch = await reader.batch()
        fetches = -1
        while feed.counters["fetch"] != fetches:  # it is not asked any more
            fetches = feed.counters["fetch"]
            await discovered(4)
        feed.remove(0)
        feed.add(0)
        await discovered(2)
        feed.numbers(0, 2)
        if closed_again:
            feed.close(0)
            await discovered(2)
        await batch.commit()
        with anyio.fail_after(60):
            assert await reader.commit() == [2]
        assert reader.reports("delivered late") == []
