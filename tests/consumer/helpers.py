"""What the consumer's tests share: short intervals, a store that records its saves, and reading.

Tests wait for a condition, never for a time: their result must not depend on the machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

import anyio

from feedapi_client import (
    Batch,
    Event,
    FeedConsumer,
    FeedKey,
    Limits,
    MemoryCursorStore,
    Position,
    RetryPolicy,
)
from feedapi_client.testing import Publisher, Request, faults
from tests.testing.virtual_time import asgi_client

SAFETY_LIMIT = 60.0
"""Seconds after which a test that waits for a condition fails. No test depends on it."""
QUICK: dict[str, Any] = {
    "poll_interval": 0.005,
    "max_poll_interval": 0.02,
    "discovery_interval": 0.03,
    "settle_time": 0.03,
    "request_timeout": SAFETY_LIMIT,
    "slot_timeout": SAFETY_LIMIT,
    "stream_idle_timeout": SAFETY_LIMIT,
    "commit_timeout": SAFETY_LIMIT,
}
RETRY = RetryPolicy(base_delay=0.002, max_delay=0.01, give_up_after=SAFETY_LIMIT)
SHORT = RetryPolicy(base_delay=0.002, max_delay=0.01, give_up_after=0.1, refused_for=0.1)
"""Gives up soon: for what never passes."""
BROKEN = faults.Replace(b'{"cursor":"_last"}\n')
"""A page that breaks the protocol, in each dialect: an error at once, with "_last" in its text."""


def limits(**changed: Any) -> Limits:
    """Intervals of milliseconds."""
    return Limits(**{**QUICK, **changed})


def consume(
    publisher: Publisher, *, limit: Mapping[str, Any] | None = None, **options: Any
) -> FeedConsumer:
    """A consumer that polls and retries fast. One that is not served is asked without sockets."""
    url = publisher.url
    if url is None:
        url, options = "http://feed/feed", {"http": asgi_client(publisher), **options}
    return FeedConsumer(url, **{"limits": limits(**(limit or {})), "retry": RETRY, **options})


class Gate:
    """Lets what comes to it wait until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = anyio.Event(), anyio.Event()

    async def wait(self) -> None:
        self.reached.set()
        await self.opened.wait()

    async def open_when_all_wait(self) -> None:
        await anyio.wait_all_tasks_blocked()
        self.opened.set()


class Transaction:
    """A transaction of `RecordingStore`: its changes count once `commit` is called."""

    def __init__(self) -> None:
        self.changes: list[tuple[FeedKey, dict[int, Position]]] = []


class RecordingStore(MemoryCursorStore):
    """Records each save, can be slow or broken, and takes part in a transaction."""

    def __init__(self) -> None:
        super().__init__()
        self.saves: list[dict[int, Position]] = []
        self.before_save: Callable[[Mapping[int, Position]], Awaitable[None]] | None = None
        self.loads = 0

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        self.loads += 1
        return await super().load(feed)

    async def save(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        *,
        transaction: Any = None,
    ) -> None:
        if self.before_save is not None:
            await self.before_save(positions)
        if isinstance(transaction, Transaction):
            transaction.changes.append((feed, dict(positions)))
            return
        await super().save(feed, positions, transaction=transaction)
        self.saves.append(dict(positions))

    def hold(self, holds: Callable[[Mapping[int, Position]], bool] = lambda _: True) -> Gate:
        """Let saves wait from now on, those that `holds` is true for. Return what they wait at."""
        gate = Gate()

        async def wait(positions: Mapping[int, Position]) -> None:
            if holds(positions):
                await gate.wait()

        self.before_save = wait
        return gate

    async def commit(self, transaction: Transaction) -> None:
        """Commit a transaction, as the caller's database would."""
        for feed, positions in transaction.changes:
            await self.save(feed, positions)

    async def commit_at_once(self, transaction: Transaction) -> None:
        """`commit` without a point at which it can be cancelled."""
        with anyio.CancelScope(shield=True):
            for feed, positions in transaction.changes:
                await super().save(feed, positions)

    async def positions(self) -> dict[int, Position]:
        """What is stored for the one feed of the test."""
        keys = await self.feeds()
        return await super().load(keys[0]) if keys else {}

    async def cursors(self) -> dict[int, str]:
        return {
            partition: position.cursor for partition, position in (await self.positions()).items()
        }

    async def statuses(self) -> dict[int, str]:
        return {
            partition: position.status for partition, position in (await self.positions()).items()
        }


class BrokenStore(RecordingStore):
    """Fails with an error of a database driver, not with one of ours."""

    broken = True

    async def save(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        *,
        transaction: Transaction | None = None,
    ) -> None:
        if self.broken:
            raise ConnectionError("server closed the connection, password=hunter2")
        await super().save(feed, positions, transaction=transaction)


def n_of(events: Iterable[Event]) -> list[int]:
    """The field `n` of each payload."""
    return [event.json()["n"] for event in events]


def fill(publisher: Publisher, count: int, *, entities: int = 5, start: int = 0) -> None:
    """Publish `count` events, spread over some entities, to the partition of each entity."""
    for n in range(start, start + count):
        entity = f"e{n % entities}"
        publisher.publish(entity, {"entity": entity, "n": n})


def numbers(publisher: Publisher, partition: int, values: Iterable[int], entity: str = "a") -> str:
    """Append events with these numbers to one partition."""
    return publisher.extend(partition, [{"entity": entity, "n": n} for n in values])


async def read(consumer: FeedConsumer) -> list[Event]:
    """Every event up to the end of the feed, of a consumer that doesn't follow."""
    with anyio.fail_after(SAFETY_LIMIT):
        return [event async for event in consumer]


async def read_n(consumer: FeedConsumer) -> list[int]:
    return n_of(await read(consumer))


async def take(iterator: AsyncIterator[Any], count: int = 1) -> list[Any]:
    """The next `count` items of an iteration."""
    with anyio.fail_after(SAFETY_LIMIT):
        return [await anext(iterator) for _ in range(count)]


async def next_batch(iterator: AsyncIterator[Batch], partition: int | None = None) -> Batch:
    """The next batch that holds an event, of the partition if one is given.

    The batches before it are committed.
    """
    with anyio.fail_after(SAFETY_LIMIT):
        while True:
            batch = await anext(iterator)
            if batch.events and partition in (None, batch.partition):
                return batch
            await batch.commit()


async def wait_until(condition: Callable[[], object]) -> None:
    """Wait until `condition()` is true."""
    with anyio.fail_after(SAFETY_LIMIT):
        while not condition():  # noqa: ASYNC110 - any condition, over state of any thread
            await anyio.sleep(0.002)


@asynccontextmanager
async def nothing_comes(iterator: AsyncIterator[Any]) -> AsyncIterator[None]:
    """Iterate during the block, and fail if the iteration brings anything.

    The block waits for the condition under which something would have come. The iteration can be
    used again afterwards.
    """

    async def expect_nothing() -> None:
        raise AssertionError(f"{await anext(iterator)!r} came")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(expect_nothing)
        yield
        tasks.cancel_scope.cancel()


async def rediscovered(publisher: Publisher, times: int = 2) -> None:
    """Wait until the consumer has discovered again.

    By default twice: when the second discovery begins, the first one has had its effect.
    """
    before = publisher.counters["discovery"]
    await wait_until(lambda: publisher.counters["discovery"] >= before + times)


def last_fetch(publisher: Publisher) -> Request:
    """The last fetch so far. Discoveries come at any time, and are not counted."""
    return [request for request in publisher.requests if request.kind == "fetch"][-1]


def by_entity(payloads: Iterable[Any]) -> dict[str, list[int]]:
    """The field `n` of each payload, by entity."""
    found: dict[str, list[int]] = defaultdict(list)
    for payload in payloads:
        found[payload["entity"]].append(payload["n"])
    return dict(found)


def assert_each_entity_in_order_and_once(payloads: Iterable[Any], publisher: Publisher) -> None:
    assert by_entity(payloads) == by_entity(publisher.payloads())


class Reader:
    """An iteration over an open consumer: over events or over batches, whichever is asked first."""

    def __init__(self, consumer: FeedConsumer) -> None:
        self.consumer = consumer

    @cached_property
    def events(self) -> AsyncIterator[Event]:
        return aiter(self.consumer)

    @cached_property
    def batches(self) -> AsyncIterator[Batch]:
        return self.consumer.batches()

    async def take(self, count: int = 1) -> list[int]:
        """The numbers of the next events."""
        return n_of(await take(self.events, count))

    async def batch(self, partition: int | None = None) -> Batch:
        """The next batch that holds an event, of the partition if one is given."""
        return await next_batch(self.batches, partition)

    async def commit(self, partition: int | None = None) -> list[int]:
        """Commit that batch, and return its numbers."""
        batch = await self.batch(partition)
        await batch.commit()
        return n_of(batch.events)

    def state(self, partition: int = 0) -> str:
        return self.consumer.status()[partition].state

    async def until(self, state: str, partition: int = 0) -> None:
        """Wait until the partition is known and in this state. Nothing is iterated meanwhile."""
        statuses = self.consumer.status
        await wait_until(
            lambda: partition in statuses().partitions and self.state(partition) == state
        )

    async def nothing_until(self, condition: Callable[[], object]) -> None:
        """Ask for the next batch, which confirms the last one, until the condition holds.

        Batches without an event are committed.
        """

        async def expect_nothing() -> None:
            raise AssertionError(f"{await self.batch()!r} came")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect_nothing)
            await wait_until(condition)
            tasks.cancel_scope.cancel()

    async def at_end(self) -> None:
        """Ask for the next batch until partition 0 is at its end."""
        await self.nothing_until(lambda: self.consumer.status()[0].caught_up)

    def reports(self, *words: str) -> list[str]:
        """The reports that hold all these words."""
        return [r for r in self.consumer.status().reports if all(word in r for word in words)]


class LocalFeed(Publisher):
    """A publisher in this process, a store, and consumers of both. It needs no socket.

    Pages of 10 events with a checkpoint behind each 5, unless `settings` say otherwise.
    """

    def __init__(self, partitions: Any = 1, *, store: Any = None, **settings: Any) -> None:
        super().__init__(partitions, **{"page_size": 10, "checkpoint_every": 5, **settings})
        self.store: RecordingStore = store or RecordingStore()

    def numbers(self, partition: int, *values: int, entity: str = "a") -> str:
        """Append events with these numbers to one partition. Return the cursor behind them."""
        return numbers(self, partition, values, entity)

    def fill(self, start: int, stop: int, *, entities: int = 5) -> None:
        """Publish the numbers from `start` to `stop`, spread over some entities."""
        fill(self, stop - start, entities=entities, start=start)

    def consume(self, **options: Any) -> FeedConsumer:
        return consume(self, **{"store": self.store, **options})

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[Reader]:
        async with self.consume(**options) as consumer:
            yield Reader(consumer)

    @asynccontextmanager
    async def running(
        self, handle: Callable[[Batch], Awaitable[object]] | None = None, **options: Any
    ) -> AsyncIterator[Reader]:
        """A consumer that runs the handler, or passes over all, during the block."""

        async def passes(_: Batch) -> None: ...

        async with self.open(**options) as reader, anyio.create_task_group() as tasks:
            tasks.start_soon(reader.consumer.run, handle or passes)
            yield reader
            tasks.cancel_scope.cancel()

    async def enter(self, **options: Any) -> None:
        """Enter with a consumer, and leave."""
        async with self.consume(**options):
            pass

    async def read(self, **options: Any) -> list[int]:
        """The numbers that a consumer reads which begins now, up to the end of the feed."""
        return n_of(await self.read_events(**options))

    async def read_events(self, **options: Any) -> list[Event]:
        async with self.consume(follow=False, **options) as consumer:
            return await read(consumer)

    async def run(self, handle: Callable[[Batch], Awaitable[object]], **options: Any) -> None:
        """Run the handler up to the end of the feed."""
        async with self.consume(follow=False, **options) as consumer:
            with anyio.fail_after(SAFETY_LIMIT):
                await consumer.run(handle)

    def asked(self, partition: int) -> set[str | None]:
        """The cursors that a partition was asked from."""
        return {each.cursor for each in self.requests if each.partition == partition}

    def check(self, events: Iterable[Any]) -> None:
        """Check that each entity's events came in order and once: all that are published."""
        payloads = [each.json() if isinstance(each, Event) else each for each in events]
        assert_each_entity_in_order_and_once(payloads, self)
