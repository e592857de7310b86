"""Instances on virtual time over one store that counts: no sockets, and no real waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
from anyio.abc import TaskGroup

from feedapi_client import Batch, FeedConsumer, FeedKey, MemoryCursorStore, Position, Share
from feedapi_client.stores import Lease, View
from feedapi_client.testing import Publisher
from tests.testing.virtual_time import HOUR, asgi_client

URL = "http://feed/feed"


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


class Member:
    """One instance."""

    def __init__(self, consumer: FeedConsumer) -> None:
        self.consumer = consumer
        self.scope = anyio.CancelScope()
        self.open = self.over = False
        self.at_end: Callable[[], object] = lambda: None
        """Called when it has ended by itself."""

    @property
    def reads(self) -> set[int]:
        """The partitions that it reads."""
        partitions = self.consumer.status().partitions.values()
        return {p.partition for p in partitions if p.owner == self.consumer.instance}


class Fleet:
    """Instances, what they handled, and the store between them."""

    def __init__(self, publisher: Publisher, tasks: TaskGroup, http: httpx.AsyncClient) -> None:
        self.publisher = publisher
        self.store = FleetStore()
        self.members: list[Member] = []
        self.payloads: list[Any] = []
        """Of the events that were handled, in that order."""
        self.before: Callable[[Batch], Awaitable[object]] | None = None
        self._tasks = tasks
        self._http = http

    @property
    def handled(self) -> list[int]:
        """The field `n` of each payload."""
        return [payload["n"] for payload in self.payloads]

    def consumer(self, **options: Any) -> FeedConsumer:
        """Return a consumer of the feed that nobody runs."""
        return FeedConsumer(URL, http=self._http, store=self.store, **{"share": Share(), **options})

    def start(self, **options: Any) -> Member:
        """Start one more instance."""
        member = Member(self.consumer(**options))
        self.members.append(member)
        self._tasks.start_soon(self._run, member)
        return member

    async def _run(self, member: Member) -> None:
        async def handle(batch: Batch) -> None:
            if self.before is not None:
                await self.before(batch)
            self.payloads += [event.json() for event in batch.events]

        with member.scope:
            async with member.consumer:
                member.open = True
                await member.consumer.run(handle)
            member.at_end()
        member.over = True

    def kill(self, member: Member) -> None:
        """End an instance at once: its heartbeat stays until it expires."""
        assert member.consumer.instance is not None
        self.store.killed.add(member.consumer.instance)
        member.scope.cancel()
        self.members.remove(member)

    async def stop(self, member: Member) -> None:
        """End an instance gracefully. One that is not open yet has nothing to stop."""
        await until(lambda: member.open or member.over)
        member.consumer.stop()
        await self.all_over(member)
        self.members.remove(member)

    async def all_over(self, *members: Member) -> None:
        """Wait until these have ended."""
        await until(lambda: all(member.over for member in members))

    async def balanced(self, *members: Member) -> None:
        """Wait until these divide all partitions evenly."""

        def even() -> bool:
            shares = [member.reads for member in members]
            sizes = [len(share) for share in shares]
            whole = set().union(*shares) == set(self.publisher.partitions)
            return whole and sum(sizes) == len(self.publisher.partitions) and spread(sizes) <= 1

        await until(even)


def spread(sizes: list[int]) -> int:
    return max(sizes) - min(sizes)


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds, which it has to within an hour of virtual time."""
    with anyio.fail_after(HOUR):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.5)


@asynccontextmanager
async def fleet(publisher: Publisher) -> AsyncIterator[Fleet]:
    """Yield a fleet without instances; those that still run are cancelled at the end."""
    async with asgi_client(publisher) as http, anyio.create_task_group() as tasks:
        yield Fleet(publisher, tasks, http)
        tasks.cancel_scope.cancel()


def publish(publisher: Publisher, partition: int, *numbers: int) -> None:
    """Append events with these numbers."""
    publisher.extend(partition, [{"n": n} for n in numbers])
