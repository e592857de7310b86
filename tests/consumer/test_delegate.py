"""`FeedConsumer.delegate`: the consumer watches the feed, and somebody else reads it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from feedapi_client import (
    FIRST,
    FeedClient,
    FeedConsumer,
    FeedError,
    FeedUnavailableError,
    NoProgressError,
    Reached,
)
from feedapi_client.testing import Quirks, faults
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    SHORT,
    LocalFeed,
    by_entity,
    wait_until,
)
from tests.testing.virtual_time import asgi_client

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


class Elsewhere:
    """Reads a page of a feed at a time, as a worker process would: by a client of its own."""

    def __init__(self, feed: LocalFeed) -> None:
        self.feed = feed
        self.asked: list[tuple[int, str]] = []
        self.payloads: list[Any] = []
        self.reading: set[int] = set()
        self.more = False
        self.fails = 0
        self.gate: anyio.Event | None = None

    async def __call__(self, partition: int, cursor: str) -> Reached:
        assert partition not in self.reading, "read twice at once"
        self.reading.add(partition)
        self.asked.append((partition, cursor))
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.fails:
                self.fails -= 1
                return Reached(cursor)
            v1 = 3 if self.feed.dialect == "v1" else None
            http = asgi_client(self.feed)
            async with FeedClient("http://feed/feed", http=http, v1_partitions=v1) as client:
                page = await client.fetch(partition, cursor)
        except FeedError:
            return Reached(cursor)
        else:
            self.payloads += [event.json() for event in page.events]
            full = len(page.events) >= self.feed.page_size
            return Reached(page.cursor or cursor, more=self.more and full)
        finally:
            self.reading.discard(partition)

    async def to_the_end(self, **options: Any) -> FeedConsumer:
        """Read until the feed ends."""
        async with self.feed.consume(follow=False, **options) as consumer:
            with anyio.fail_after(SAFETY_LIMIT):
                await consumer.delegate(self)
        return consumer

    @asynccontextmanager
    async def following(self, **options: Any) -> AsyncIterator[FeedConsumer]:
        async with self.feed.consume(**options) as consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(consumer.delegate, self)
            yield consumer
            tasks.cancel_scope.cancel()

    def check(self) -> None:
        self.feed.check(self.payloads)

    def polls(self) -> list[Any]:
        """The fetches of the consumer: they ask for one event."""
        return [each for each in self.feed.requests if each.query.get("pagesizehint") == "1"]


@pytest.mark.parametrize("dialect", ["v1", "v2-draft", "v2-token"])
async def test_every_event_is_read_elsewhere_once_and_in_order(dialect: Any) -> None:
    feed = LocalFeed(3, dialect=dialect, page_size=7, checkpoint_every=3)
    feed.fill(0, 100, entities=9)
    elsewhere = Elsewhere(feed)
    await elsewhere.to_the_end(v1_partitions=3)
    elsewhere.check()
    assert {cursor for _, cursor in elsewhere.asked} >= {FIRST}
    assert await feed.store.cursors() == {id: feed.end_cursor(id) for id in range(3)}


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
async def test_splits_are_read_in_order(method: Any) -> None:
    feed = LocalFeed(2)
    elsewhere = Elsewhere(feed)
    feed.fill(0, 60)
    async with elsewhere.following():
        await wait_until(lambda: len(elsewhere.payloads) > 20)
        feed.split(0, into=2, method=method)
        feed.fill(60, 120)
        feed.split(feed.open_partitions()[-1], into=2, method=method)
        feed.fill(120, 180)
        await wait_until(lambda: len(elsewhere.payloads) == 180)
    elsewhere.check()


async def test_r04_child_waits_until_its_parent_is_read_to_its_end() -> None:
    feed = LocalFeed(1)
    feed.fill(0, 30)
    feed.split(0, into=2, method="starts-after")
    feed.fill(30, 60)
    elsewhere = Elsewhere(feed)
    await elsewhere.to_the_end()
    last_of_parent = max(n for n, (id, _) in enumerate(elsewhere.asked) if id == 0)
    assert all(id == 0 for id, _ in elsewhere.asked[: last_of_parent + 1])
    elsewhere.check()
    assert (await feed.store.statuses())[0] == "drained"


async def test_r09_cursor_is_transferred_behind_what_is_being_read() -> None:
    feed = LocalFeed(1)
    feed.fill(0, 5)
    elsewhere = Elsewhere(feed)
    elsewhere.gate = anyio.Event()
    async with elsewhere.following():
        await wait_until(lambda: elsewhere.reading)
        feed.split(0, into=2, method="cursor-from")
        discoveries = feed.counters["discovery"]
        await wait_until(lambda: feed.counters["discovery"] >= discoveries + 3)
        assert (await feed.store.statuses())[0] == "open"
        elsewhere.gate.set()
        feed.fill(5, 20)
        await wait_until(lambda: len(elsewhere.payloads) >= 20)
    elsewhere.check()
    assert (await feed.store.statuses())[0] == "superseded"


@pytest.mark.parametrize("payload", [b"[1]", b"3", b"true", b"null"])
async def test_polls_ask_for_one_event_and_take_any_payload(payload: bytes) -> None:
    feed = LocalFeed(1, page_size=100, checkpoint_every=1)
    feed.numbers(0, *range(50))
    feed.fail(faults.Replace(b'{"data":%b}\n{"cursor":"7"}\n' % payload), times=1, on="fetch")
    read: list[str] = []
    end = feed.end_cursor(0)

    async def elsewhere(partition: int, cursor: str) -> Reached:
        read.append(cursor)
        return Reached(end)

    async with feed.consume(follow=False) as consumer:
        await consumer.delegate(elsewhere)
        assert consumer.status().events == 0
    assert read == [FIRST]
    assert await feed.store.cursors() == {0: end}
    fetches = [each for each in feed.requests if each.kind == "fetch"]
    assert {each.query.get("pagesizehint") for each in fetches} == {"1"}


async def test_more_is_read_without_a_poll() -> None:
    polls = {}
    for more in (False, True):
        feed = LocalFeed(1)
        feed.numbers(0, *range(100))
        elsewhere = Elsewhere(feed)
        elsewhere.more = more
        await elsewhere.to_the_end()
        elsewhere.check()
        polls[more] = len(elsewhere.polls())
    assert polls[True] < 5 < polls[False]


async def test_r15_nothing_is_asked_or_read_twice_while_somebody_reads() -> None:
    feed = LocalFeed(1)
    feed.numbers(0, 1, 2, 3)
    elsewhere = Elsewhere(feed)
    elsewhere.gate = anyio.Event()
    async with elsewhere.following():
        await wait_until(lambda: elsewhere.reading)
        before = feed.counters["fetch"]
        discoveries = feed.counters["discovery"]
        await wait_until(lambda: feed.counters["discovery"] >= discoveries + 3)
        assert feed.counters["fetch"] == before
        elsewhere.gate.set()
        await wait_until(lambda: elsewhere.payloads)
    elsewhere.check()


async def test_r14_what_was_not_read_is_asked_for_again_ever_later() -> None:
    feed = LocalFeed(2)
    feed.numbers(0, 1)
    feed.numbers(1, 2, entity="b")
    elsewhere = Elsewhere(feed)
    elsewhere.fails = 12
    await elsewhere.to_the_end()
    elsewhere.check()


async def test_r14_what_is_never_read_is_an_error_in_the_end() -> None:
    feed = LocalFeed(1)
    feed.numbers(0, 1)
    elsewhere = Elsewhere(feed)
    elsewhere.fails = 10**6
    with pytest.raises(FeedUnavailableError, match="whoever reads it got nothing"):
        await elsewhere.to_the_end(retry=SHORT)
    assert 1 < len(elsewhere.asked) < 1000
    assert await feed.store.cursors() == {0: FIRST}


@pytest.mark.parametrize("status", [400, 404, 409, 410, 503])
async def test_r10_what_fails_elsewhere_is_asked_by_the_consumer(status: int) -> None:
    feed = LocalFeed(1)
    feed.fill(0, 30)
    elsewhere = Elsewhere(feed)
    async with elsewhere.following() as consumer:
        await wait_until(lambda: len(elsewhere.payloads) == 30)
        feed.fail(status, partition=0, times=5)
        feed.fill(30, 60)
        await wait_until(lambda: len(elsewhere.payloads) == 60)
        await wait_until(lambda: consumer.status()[0].caught_up)
        assert consumer.status()[0].fetch_failures >= 5
    elsewhere.check()


async def test_r13_events_without_a_cursor_are_an_error() -> None:
    feed = LocalFeed(1)
    feed.fail(faults.Replace(b'{"data":{"n":1}}\n'), times=None, on="fetch")
    with pytest.raises(NoProgressError):
        await Elsewhere(feed).to_the_end()


@pytest.mark.parametrize("behind", [True, False])
async def test_r06_late_partitions_are_asked_at_once_and_read(behind: bool) -> None:
    feed = LocalFeed(1, quirks=Quirks(last_cursor="never"))
    feed.numbers(0, 1, 2)
    await Elsewhere(feed).to_the_end()
    if behind:
        feed.numbers(0, 3)
        feed.fail(faults.EmptyPage(moving=False), times=None, on="fetch")
    feed.close(0)
    await Elsewhere(feed).to_the_end()
    assert await feed.store.statuses() == {0: "drained"}
    feed.heal()
    later = Elsewhere(feed)
    async with feed.consume(follow=False) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            await consumer.delegate(later, late={0: time.time() - 1.0})
    assert [payload["n"] for payload in later.payloads] == ([3] if behind else [])
    assert await feed.store.cursors() == {0: feed.end_cursor(0)}


async def test_stop_lets_what_is_being_read_be_committed() -> None:
    feed = LocalFeed(1)
    feed.numbers(0, *range(30))
    elsewhere = Elsewhere(feed)
    elsewhere.gate = anyio.Event()
    async with feed.consume() as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.delegate, elsewhere)
        await wait_until(lambda: elsewhere.reading)
        consumer.stop()
        elsewhere.gate.set()
    assert len(elsewhere.asked) == 1
    assert len(elsewhere.payloads) == 10
    again = Elsewhere(feed)
    await again.to_the_end()
    feed.check([*elsewhere.payloads, *again.payloads])


class _BrokenError(Exception):
    pass


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (_BrokenError(), _BrokenError),
        ("7", TypeError),
        (None, TypeError),
        (Reached(""), ValueError),
        (Reached("_last"), ValueError),
        (Reached("\n"), ValueError),
    ],
)
async def test_r18_error_of_read_ends_the_iteration_and_loses_nothing(
    returned: Any, error: type[Exception]
) -> None:
    feed = LocalFeed(2)
    feed.fill(0, 40)

    async def read(partition: int, cursor: str) -> Reached:
        if isinstance(returned, Exception):
            raise returned
        return returned  # type: ignore[no-any-return]

    async with feed.consume() as consumer:
        with pytest.raises(error), anyio.fail_after(SAFETY_LIMIT):
            await consumer.delegate(read)
    assert set((await feed.store.cursors()).values()) == {FIRST}
    elsewhere = Elsewhere(feed)
    await elsewhere.to_the_end()
    elsewhere.check()


async def test_read_has_to_be_asynchronous() -> None:
    feed = LocalFeed(1)

    def read(partition: int, cursor: str) -> Reached:
        return Reached(cursor)

    async with feed.consume() as consumer:
        with pytest.raises(TypeError, match="read must be a function with async"):
            await consumer.delegate(read)  # type: ignore[arg-type]


async def test_empty_pages_that_move_the_cursor_are_committed_and_not_read() -> None:
    feed = LocalFeed(1)
    feed.numbers(0, 1)
    elsewhere = Elsewhere(feed)
    await elsewhere.to_the_end()
    feed.append_internal(0, 50)
    again = Elsewhere(feed)
    await again.to_the_end()
    assert again.asked == []
    assert await feed.store.cursors() == {0: feed.end_cursor(0)}
    assert by_entity(elsewhere.payloads) == by_entity(feed.payloads())


async def test_json_of_nothing_is_kept() -> None:
    """The consumer holds no payload: what is read elsewhere may be larger than its buffer."""
    feed = LocalFeed(1, page_size=1000, checkpoint_every=1)
    feed.extend(0, [{"entity": "a", "n": n, "text": "x" * 1000} for n in range(100)])
    elsewhere = Elsewhere(feed)
    async with elsewhere.following() as consumer:
        await wait_until(lambda: len(elsewhere.payloads) == 100)
        await wait_until(lambda: consumer.status()[0].caught_up)
        assert consumer.status().buffered_bytes < len(json.dumps(feed.payloads()[0]))
    elsewhere.check()
