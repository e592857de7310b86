"""What the consumer's tests share: fast limits, a store that tells what it was asked to do, and reading with a deadline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
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
from feedapi_client.stores.base import check_predecessor
from feedapi_client.testing import Publisher

PATIENCE = 15.0
QUICK: dict[str, Any] = {
    "poll_interval": 0.005,
    "max_poll_interval": 0.02,
    "discovery_interval": 0.03,
    "request_timeout": 10.0,
    "stream_idle_timeout": 10.0,
    "commit_timeout": 5.0,
}
RETRY = RetryPolicy(base_delay=0.002, max_delay=0.01, give_up_after=10.0)


def limits(**changed: Any) -> Limits:
    """Intervals of milliseconds."""
    return Limits(**{**QUICK, **changed})


def consume(
    publisher: Publisher, *, limit: Mapping[str, Any] | None = None, **options: Any
) -> FeedConsumer:
    """A consumer that polls and retries fast."""
    assert publisher.url is not None
    return FeedConsumer(
        publisher.url, **{"limits": limits(**(limit or {})), "retry": RETRY, **options}
    )


class Transaction:
    """What `RecordingStore` takes as one: changes that count once `commit` is called."""

    def __init__(self) -> None:
        self.changes: list[tuple[FeedKey, dict[int, Position]]] = []


class RecordingStore(MemoryCursorStore):
    """Keeps each save, can be slow or broken, and takes part in a transaction."""

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
        transaction: Transaction | None = None,
    ) -> None:
        if self.before_save is not None:
            await self.before_save(positions)
        if transaction is not None:
            transaction.changes.append((feed, dict(positions)))
            return
        await super().save(feed, positions)
        self.saves.append(dict(positions))

    async def commit(self, transaction: Transaction) -> None:
        """Make a transaction's changes count, as the database of a caller would."""
        for feed, positions in transaction.changes:
            await self.save(feed, positions)

    def commit_at_once(self, transaction: Transaction) -> None:
        """`commit` without a chance to be interrupted."""
        for feed, positions in transaction.changes:
            stored = self._feeds.setdefault(feed, {})
            for partition, position in positions.items():
                check_predecessor(
                    feed,
                    partition,
                    position,
                    stored[partition].revision if partition in stored else None,
                )
            stored.update(positions)

    async def positions(self) -> dict[int, Position]:
        """What is stored, of the one feed there is."""
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
    """Fails as a database driver does, not with an error of ours."""

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
    """The field n of each payload."""
    return [event.json()["n"] for event in events]


def fill(publisher: Publisher, count: int, *, entities: int = 5, start: int = 0) -> None:
    """Publish `count` events over some entities, to where each of them lives now."""
    for n in range(start, start + count):
        entity = f"e{n % entities}"
        publisher.publish(entity, {"entity": entity, "n": n})


def numbers(publisher: Publisher, partition: int, values: Iterable[int], entity: str = "a") -> str:
    """Append events with these numbers to one partition."""
    return publisher.extend(partition, [{"entity": entity, "n": n} for n in values])


async def read(consumer: FeedConsumer) -> list[Event]:
    """Every event up to the end of the feed; for consumers that don't follow."""
    with anyio.fail_after(PATIENCE):
        return [event async for event in consumer]


async def read_n(consumer: FeedConsumer) -> list[int]:
    return n_of(await read(consumer))


async def take(iterator: AsyncIterator[Any], count: int = 1) -> list[Any]:
    """The next `count` of an iteration."""
    with anyio.fail_after(PATIENCE):
        return [await anext(iterator) for _ in range(count)]


async def next_batch(iterator: AsyncIterator[Batch], partition: int | None = None) -> Batch:
    """The next batch that holds an event (of the partition); those in between are committed."""
    with anyio.fail_after(PATIENCE):
        while True:
            batch = await anext(iterator)
            if batch.events and partition in (None, batch.partition):
                return batch
            await batch.commit()


async def nothing_comes(iterator: AsyncIterator[Any], seconds: float = 0.15) -> None:
    """Fails when the iteration brings anything within this time. The iteration can't be used any further."""
    with anyio.move_on_after(seconds):
        raise AssertionError(f"{await anext(iterator)!r} came")


async def rediscovered(publisher: Publisher, times: int = 2) -> None:
    """Wait until the consumer has discovered anew; the second discovery began after the first was digested."""
    before = publisher.counters["discovery"]
    await publisher.wait(lambda: publisher.counters["discovery"] >= before + times)


def by_entity(payloads: Iterable[Any]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for payload in payloads:
        found[payload["entity"]].append(payload["n"])
    return dict(found)


def assert_each_entity_in_order_and_once(payloads: Iterable[Any], publisher: Publisher) -> None:
    assert by_entity(payloads) == by_entity(publisher.payloads())
