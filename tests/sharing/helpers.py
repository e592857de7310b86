"""Several consumers of one feed in one process: started, stopped, and what they handled.

Tests wait for a condition, never for a time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.abc import TaskGroup

from feedapi_client import Batch, CursorStore, FeedConsumer, PartitionState, Share
from feedapi_client.testing import Publisher
from tests.consumer.helpers import SAFETY_LIMIT, consume

QUICK = Share(lease_seconds=SAFETY_LIMIT, rebalance_seconds=0.05, handover_seconds=SAFETY_LIMIT)


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    with anyio.fail_after(SAFETY_LIMIT):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.005)


class Running:
    """A consumer in a task of its own."""

    def __init__(self, consumer: FeedConsumer) -> None:
        self.consumer = consumer
        self.open = self.over = False
        self.error: Exception | None = None
        self.scope = anyio.CancelScope()

    @property
    def reads(self) -> set[int]:
        """The partitions that it reads."""
        status = self.consumer.status()
        return {p.partition for p in status.partitions.values() if p.owner == self.name}

    @property
    def name(self) -> str:
        assert self.consumer.instance is not None
        return self.consumer.instance


class Group:
    """Consumers that share a feed through one store, and the effects of all."""

    def __init__(self, publisher: Publisher, store: CursorStore, tasks: TaskGroup) -> None:
        self.publisher = publisher
        self.store = store
        self.effects: list[tuple[int, Any]] = []
        self.running: list[Running] = []
        self.before: Callable[[Batch], Awaitable[None]] | None = None
        self._tasks = tasks

    def start(self, **options: Any) -> Running:
        """Start one more consumer that handles batches until it is stopped."""
        options = {"store": self.store, "name": "shared", "share": QUICK, **options}
        running = Running(consume(self.publisher, **options))
        self.running.append(running)
        self._tasks.start_soon(self._run, running)
        return running

    async def _run(self, running: Running) -> None:
        async def handle(batch: Batch) -> None:
            if self.before is not None:
                await self.before(batch)
            self.effects += [(batch.partition, event.json()) for event in batch.events]

        try:
            with running.scope:
                async with running.consumer as consumer:
                    running.open = True
                    await consumer.run(handle)
        except Exception as error:
            running.error = error
        running.over = True

    async def stop(self, running: Running) -> None:
        """Stop a consumer gracefully."""
        await until(lambda: running.open or running.over)
        running.consumer.stop()
        await until(lambda: running.over)
        assert running.error is None, running.error

    @property
    def handled(self) -> Counter[Any]:
        """How often each event was handled."""
        return Counter(str(event) for _, event in self.effects)

    def in_order(self) -> bool:
        """Whether the events of each entity came in the order of their numbers."""
        numbers: dict[str, list[int]] = defaultdict(list)
        for _, event in self.effects:
            numbers[event["entity"]].append(event["n"])
        return all(found == sorted(found) for found in numbers.values())

    async def balanced(self, *running: Running, partitions: int) -> None:
        """Wait until these consumers, and no others, divide so many partitions evenly."""

        def even() -> bool:
            self.check()
            shares = [one.reads for one in running]
            sizes = [len(share) for share in shares]
            return (
                max(sizes) - min(sizes) <= 1
                and sum(sizes) == len(set().union(*shares)) == partitions
                and all(_all_known(one, partitions) for one in running)
            )

        await until(even)

    def check(self) -> None:
        """Raise the error of a consumer that failed."""
        for one in self.running:
            if one.error is not None:
                raise one.error


def _all_known(one: Running, partitions: int) -> bool:
    states = [p.state for p in one.consumer.status().partitions.values() if p.owner is not None]
    others = [p for p in one.consumer.status().partitions.values() if p.owner != one.name]
    elsewhere = sum(p.state is PartitionState.ELSEWHERE for p in others)
    return len(states) >= partitions and elsewhere == partitions - len(one.reads)


@asynccontextmanager
async def group(publisher: Publisher, store: CursorStore) -> AsyncIterator[Group]:
    """Yield a group; its consumers are cancelled at the end."""
    async with anyio.create_task_group() as tasks:
        yield Group(publisher, store, tasks)
        tasks.cancel_scope.cancel()


class Numbers:
    """Publishes events that are numbered for each entity."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.published: Counter[str] = Counter()

    def publish(self, count: int, entities: int = 20) -> None:
        """Publish events of many entities."""
        for i in range(count):
            entity = f"entity {(self.published.total() + i) % entities}"
            n = self.published[entity]
            self.publisher.publish(entity, {"entity": entity, "n": n})
            self.published[entity] += 1

    @property
    def expected(self) -> Counter[str]:
        """Every event once."""
        return Counter(
            str({"entity": entity, "n": n})
            for entity, count in self.published.items()
            for n in range(count)
        )
