"""R6: how the end of a closed partition is found, as an application sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import anyio
import pytest

from feedapi_client import (
    Batch,
    FeedConsumer,
    FetchOptions,
    NoProgressError,
    RetryPolicy,
)
from feedapi_client.runtime import failures
from feedapi_client.testing import Publisher, Request, faults
from feedapi_client.testing.publisher import Response
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    RecordingStore,
    consume,
    n_of,
    next_batch,
    nothing_comes,
    numbers,
    read_n,
    wait_until,
)
from tests.positions import stand

pytestmark = pytest.mark.anyio


def lag(publisher: Publisher, visible: int) -> None:
    """Let the replica that answers fetches know only the first events of partition 0."""
    at = publisher.end_cursor(0)

    def older(response: Response, request: Request, publisher: Publisher) -> Response:
        if request.cursor == at:
            return Response(200, body=b'{"cursor":"%s"}\n' % at.encode())
        return response

    publisher.fail(older, times=None, on="fetch", partition=0)
    numbers(publisher, 0, range(visible, visible + 5))
    publisher.split(0)


async def next_or_drained(consumer: FeedConsumer, batches: AsyncIterator[Batch]) -> None:
    """Iterate on until partition 0 is drained. Its children may be read by then."""

    async def iterate() -> None:
        batch = await anext(batches)
        assert batch.partition != 0
        assert consumer.status()[0].state == "drained"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(iterate)
        await wait_until(lambda: consumer.status()[0].state == "drained")
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("status", [200, 204, 206, 299])
async def test_r06_empty_pages_without_a_line_end_a_closed_partition_and_its_children_are_read(
    serve: Callable[..., Publisher], store: RecordingStore, status: int
) -> None:
    publisher = serve(1, dialect="v2-token", page_size=10)
    numbers(publisher, 0, range(5))
    at_end = publisher.end_cursor(0)

    def no_line(response: Response, request: Request, publisher: Publisher) -> Response:
        return Response(status) if request.cursor == at_end else response

    publisher.fail(no_line, times=None, partition=0)
    children = publisher.split(0)
    numbers(publisher, children[0], range(5, 10))
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == list(range(10))
    assert (await store.statuses())[0] == "drained"
    asked = [r for r in publisher.requests if r.partition == 0 and r.cursor == at_end]
    assert len(asked) >= 3


async def test_r06_one_empty_page_without_a_line_is_not_the_end(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(1, dialect="v2-token", page_size=10)
    numbers(publisher, 0, range(5))
    publisher.close(0)
    publisher.fail(faults.Replace(b""), times=1)
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == list(range(5))


async def test_r06_with_last_cursor_an_empty_page_without_a_line_is_the_end_at_once(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(1, dialect="v2-draft", page_size=10)
    numbers(publisher, 0, range(5))
    publisher.close(0)
    publisher.fail(faults.Replace(b""), times=3)
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == list(range(5))
    assert (await store.positions())[0].cursor == publisher.end_cursor(0)


async def test_r06_a_replica_that_lags_behind_last_cursor_is_asked_until_it_has_the_rest(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(1, dialect="v2-draft", page_size=10)
    numbers(publisher, 0, range(5))
    async with consume(publisher, store=store) as consumer:
        batches = consumer.batches()
        batch = await next_batch(batches)
        await batch.commit()
        lag(publisher, 5)
        async with nothing_comes(batches):
            await wait_until(lambda: consumer.status()[0].state == "retrying")
        status = consumer.status()[0]
        assert repr(publisher.end_cursor(0)) in str(status.error)
        assert repr(batch.cursor) in str(status.error)
        assert (await store.statuses())[0] == "open"
        publisher.heal()
        batch = await next_batch(batches)
        assert n_of(batch.events) == list(range(5, 10))
        await batch.commit()
        await next_or_drained(consumer, batches)
    assert (await store.positions())[0].cursor == publisher.end_cursor(0)


async def test_r06_a_lag_that_lasts_is_reported_once(
    serve: Callable[..., Publisher], store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "LAG_REPORTED_SECONDS", 0.0)
    publisher = serve(1, dialect="v2-draft", page_size=5)
    numbers(publisher, 0, range(5))
    end = publisher.end_cursor(0)
    lag(publisher, 5)
    async with consume(publisher, store=store) as consumer:
        batches = consumer.batches()
        await (await next_batch(batches)).commit()
        before = publisher.counters["fetch"]
        async with nothing_comes(batches):
            await wait_until(lambda: publisher.counters["fetch"] >= before + 5)
        lagging = [report for report in consumer.status().reports if repr(end) in report]
    assert len(lagging) == 1


async def test_r06_a_replica_that_never_reaches_last_cursor_is_an_error_that_names_both_cursors(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(1, dialect="v2-draft", page_size=5)
    numbers(publisher, 0, range(5))
    at = publisher.end_cursor(0)
    lag(publisher, 5)
    retry = RetryPolicy(base_delay=0.002, max_delay=0.01, give_up_after=0.1)
    async with consume(publisher, store=store, retry=retry) as consumer:
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(NoProgressError) as caught:
            await read_n(consumer)
    assert repr(at) in str(caught.value)
    assert repr(publisher.end_cursor(0)) in str(caught.value)
    assert "feedapi cursors drain 0" in str(caught.value)
    assert (await store.statuses())[0] == "open"


async def test_r06_with_a_selection_last_cursor_is_not_the_end(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    """A filtered feed ends at cursors of its own, and `lastCursor` is the end of all events."""
    publisher = serve(1, dialect="v2-draft", filters=["entity"], page_size=10)
    numbers(publisher, 0, range(5))
    numbers(publisher, 0, range(5, 10), entity="b")
    publisher.close(0)
    own_end = publisher.another_cursor(0, publisher.end_cursor(0))

    def filtered(response: Response, request: Request, publisher: Publisher) -> Response:
        lines = response.body.splitlines(keepends=True)[:-1]
        if request.cursor == own_end:
            lines = []
        response.body = b"".join(lines) + b'{"cursor":"%s"}\n' % own_end.encode()
        return response

    publisher.fail(filtered, times=None, on="fetch")
    chosen = FetchOptions(filters={"entity": "b"})
    async with consume(publisher, store=store, follow=False, fetch=chosen) as consumer:
        assert await read_n(consumer) == list(range(5, 10))
    assert stand(await store.positions())[0] == (own_end, "drained")


async def not_asked_any_more(publisher: Publisher) -> None:
    """Wait until several discoveries pass without a fetch between them."""
    counters, fetches = publisher.counters, -1
    while counters["fetch"] != fetches:
        fetches, target = counters["fetch"], counters["discovery"] + 4
        await wait_until(lambda target=target: counters["discovery"] >= target)


async def discovered_again(publisher: Publisher) -> None:
    """Wait until a discovery that began later was taken."""
    target = publisher.counters["discovery"] + 2
    await wait_until(lambda: publisher.counters["discovery"] >= target)


@pytest.mark.parametrize("closed_again", [True, False])
async def test_r06_an_end_counts_no_more_once_its_partition_is_listed_open_again(
    serve: Callable[..., Publisher], store: RecordingStore, closed_again: bool
) -> None:
    """It was seen while the last batch was in flight, and an event came after it."""
    publisher = serve(1, dialect="v2-token", page_size=10)
    numbers(publisher, 0, range(2))
    publisher.close(0)
    async with consume(publisher, store=store) as consumer:
        batches = consumer.batches()
        batch = await next_batch(batches)
        await not_asked_any_more(publisher)
        publisher.remove(0)
        publisher.add(0)
        await discovered_again(publisher)
        numbers(publisher, 0, [2])
        if closed_again:
            publisher.close(0)
            await discovered_again(publisher)
        await batch.commit()
        assert n_of((await next_batch(batches)).events) == [2]
        assert not [report for report in consumer.status().reports if "delivered late" in report]


async def test_r07_what_was_closed_at_a_start_at_the_end_is_read_on_from_its_end(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    """A replica that lags lists it as open later."""
    publisher = serve(1, dialect="v2-token", page_size=10)
    numbers(publisher, 0, range(5))
    publisher.split(0)
    async with consume(publisher, store=store, start="last", follow=False) as consumer:
        assert await read_n(consumer) == []
    assert stand(await store.positions())[0] == (publisher.end_cursor(0), "drained")
    publisher.remove(0)
    publisher.add(0)
    numbers(publisher, 0, [5])
    async with consume(publisher, store=store) as consumer:
        assert n_of((await next_batch(consumer.batches())).events) == [5]
