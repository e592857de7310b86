"""Instances that share a feed over one store, in one process: on virtual time no waiting is real.

A member that fails fails its test.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
from anyio.abc import TaskGroup

from feedapi_client import (
    Batch,
    FeedConsumer,
    FeedKey,
    MemoryCursorStore,
    Position,
    Share,
    StoreError,
)
from feedapi_client.stores import Lease, View
from feedapi_client.testing import Publisher
from tests.testing.virtual_time import HOUR, asgi_client

Handle = Callable[[Batch], Awaitable[None]]
URL = "http://feed/feed"
PAGES = {"page_size": 10, "checkpoint_every": 5}
BRIEF = Share(lease_seconds=12, rebalance_seconds=1)


class FleetStore(MemoryCursorStore):
    """The database of all, which counts. An instance that was killed can't say goodbye to it."""

    def __init__(self) -> None:
        self.killed: set[str] = set()
        self.calls: Counter[str] = Counter()
        super().__init__()

    def taken(self) -> Counter[str]:
        """Return what was done since the last time: operations, and what they came to."""
        calls, self.calls = self.calls, Counter()
        return calls

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        self.calls["load"] += 1
        return await super().load(feed)

    async def look(self, feed: FeedKey, last: View | None = None) -> View:
        view = await super().look(feed, last)
        self.calls["look"] += 1
        self.calls["leases"] += 0 if last is not None and view.leases is last.leases else 1
        return view

    async def beat(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> bool:
        lasted = await super().beat(feed, instance, seconds, options)
        self.calls["beat" if lasted else "join"] += 1
        return lasted

    async def put(self, feed: FeedKey, instance: str, leases: Collection[Lease]) -> set[int]:
        given_away = all(lease.owner is None for lease in leases)
        self.calls["release" if given_away else "claim"] += 1
        return await super().put(feed, instance, leases)

    async def leave(self, feed: FeedKey, instance: str) -> None:
        if instance not in self.killed:
            await super().leave(feed, instance)


class Cut:
    """A connection to the database of all, which may fail or hang.

    Attributes:
        leases: the error of operations on leases.
        loads: the error of loads.
        hangs: whether operations on leases have no answer.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self.leases: Exception | None = None
        self.loads: Exception | None = None
        self.hangs = False

    def fail(self) -> None:
        self.leases = StoreError("the connection is refused")

    def heal(self) -> None:
        self.leases = self.loads = None
        self.hangs = False

    async def check(self, operation: str) -> None:
        while self.hangs and operation in ("look", "beat", "put"):  # noqa: ASYNC110
            await anyio.sleep(0.5)
        error = {"load": self.loads, "save": None, "leave": None}.get(operation, self.leases)
        if error is not None:
            raise error


def _passed_on(name: str) -> Any:
    async def operation(cut: Cut, *args: Any, **options: Any) -> Any:
        await cut.check(name)
        return await getattr(cut.store, name)(*args, **options)

    return operation


for _name in ("load", "save", "look", "beat", "put", "leave"):
    setattr(Cut, _name, _passed_on(_name))


class Gate:
    """Holds back the batches of a partition, or of all, before their effects."""

    def __init__(self, partition: int | None = None) -> None:
        self.partition = partition
        self.reached, self.open = anyio.Event(), anyio.Event()

    async def __call__(self, batch: Batch) -> None:
        if self.partition in (None, batch.partition) and batch.events:
            self.reached.set()
            await self.open.wait()


class Member:
    """One instance."""

    def __init__(self, consumer: FeedConsumer) -> None:
        self.consumer = consumer
        self.scope = anyio.CancelScope()
        self.open = self.over = False
        self.at_end: Callable[[], object] = lambda: None
        """Called when it has ended by itself."""

    @property
    def name(self) -> str:
        assert self.consumer.instance is not None
        return self.consumer.instance

    @property
    def reads(self) -> set[int]:
        """The partitions that it reads."""
        partitions = self.consumer.status().partitions.values()
        return {p.partition for p in partitions if p.owner == self.name}

    def says(self, text: str) -> list[str]:
        """Return its reports that hold a text."""
        return [each for each in self.consumer.status().reports if text in each]


class Fleet:
    """Instances, what was published for them, what they handled, and the store between them."""

    def __init__(self, publisher: Publisher, tasks: TaskGroup, http: httpx.AsyncClient) -> None:
        self.publisher = publisher
        self.store: Any = FleetStore()
        self.members: list[Member] = []
        self.effects: list[tuple[int, Any]] = []
        """Partition and payload of the events that were handled, in that order."""
        self.before: Callable[[Batch], Awaitable[object]] | None = None
        self.published: Counter[str] = Counter()
        self._tasks = tasks
        self._http = http

    @property
    def payloads(self) -> list[Any]:
        return [payload for _, payload in self.effects]

    @property
    def handled(self) -> list[int]:
        """The field `n` of each payload."""
        return [payload["n"] for payload in self.payloads]

    def publish(self, count: int) -> None:
        """Publish events of twenty entities, each numbered."""
        for i in range(count):
            entity = f"entity {(self.published.total() + i) % 20}"
            self.publisher.publish(entity, {"entity": entity, "n": self.published[entity]})
            self.published[entity] += 1

    async def done(self) -> None:
        """Wait until all that was published by `publish` is handled: once, and in order."""
        await until(lambda: len(self.effects) >= self.published.total())
        found: dict[str, list[int]] = defaultdict(list)
        for payload in self.payloads:
            found[payload["entity"]].append(payload["n"])
        assert found == {entity: [*range(count)] for entity, count in self.published.items()}

    def consumer(self, **options: Any) -> FeedConsumer:
        """Return a consumer of the feed that nobody runs."""
        defaults = {"http": self._http, "store": self.store, "share": Share()}
        return FeedConsumer(URL, **{**defaults, **options})

    def start(
        self, handle: Callable[[Batch], Awaitable[None]] | None = None, **options: Any
    ) -> Any:
        """Start one more instance."""
        member = Member(self.consumer(**options))
        self.members.append(member)
        self._tasks.start_soon(self._run, member, handle or self._handle)
        return member

    async def _handle(self, batch: Batch) -> None:
        if self.before is not None:
            await self.before(batch)
        self.effects += [(batch.partition, event.json()) for event in batch.events]

    async def _run(self, member: Member, handle: Handle) -> None:
        with member.scope:
            async with member.consumer:
                member.open = True
                await member.consumer.run(handle)
            member.at_end()
        member.over = True

    def kill(self, member: Member) -> None:
        """End an instance at once: its heartbeat stays until it expires."""
        self.store.killed.add(member.name)
        member.scope.cancel()
        self.members.remove(member)

    async def stop(self, member: Member) -> None:
        """Stop an instance gracefully. One that is not open yet has nothing to stop."""
        await until(lambda: member.open or member.over)
        member.consumer.stop()
        await self.all_over(member)
        self.members.remove(member)

    async def all_over(self, *members: Member) -> None:
        """Wait until these have ended."""
        await until(lambda: all(member.over for member in members))

    async def balanced(self, *members: Member) -> None:
        """Wait until these divide all open partitions evenly."""

        def even() -> bool:
            shares = [member.reads for member in members]
            sizes, all = [len(share) for share in shares], set(self.publisher.open_partitions())
            divided = set().union(*shares) == all and sum(sizes) == len(all)
            return divided and max(sizes) - min(sizes) <= 1

        await until(even)

    def cut(self) -> Any:
        """Return a connection to the store that may fail."""
        return Cut(self.store)

    async def stored(self) -> dict[int, Position]:
        return await self.store.load(self.members[0].consumer.key)  # type: ignore[no-any-return]


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds, which it has to within an hour, of virtual time if it is."""
    with anyio.fail_after(HOUR):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.05)


@asynccontextmanager
async def fleet(publisher: Publisher) -> AsyncIterator[Fleet]:
    """Yield a fleet without instances; those that still run are cancelled at the end."""
    async with asgi_client(publisher) as http, anyio.create_task_group() as tasks:
        yield Fleet(publisher, tasks, http)
        tasks.cancel_scope.cancel()


def publish(publisher: Publisher, partition: int, *numbers: int) -> None:
    """Append events with these numbers."""
    publisher.extend(partition, [{"n": n} for n in numbers])
