"""Leases in memory: for several consumers in one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from feedapi_client.model import FeedKey
from feedapi_client.stores.leases import Instance, Lease


@dataclass(slots=True)
class _Heartbeat:
    joined: float
    expires: float
    changes: int
    options: str = ""


@dataclass(slots=True)
class _Row:
    owner: str | None = None
    epoch: int = 0
    ended: bool = False
    since: float = 0.0


@dataclass(slots=True)
class _Feed:
    instances: dict[str, _Heartbeat] = field(default_factory=dict)
    leases: dict[int, _Row] = field(default_factory=dict)
    changes: int = 0
    """Of all instances: what one that joins again counts from was never there before."""

    def changed(self, instance: str) -> None:
        if instance in self.instances:
            self.changes += 1
            self.instances[instance].changes = self.changes

    def alive(self, instance: str | None, now: float) -> bool:
        found = self.instances.get(instance) if instance is not None else None
        return found is not None and found.expires > now


class MemoryLeases:
    """Implements `LeaseStore`. The clock is that of the event loop."""

    def __init__(self) -> None:
        self._shared: dict[FeedKey, _Feed] = {}

    async def join(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> None:
        """See `LeaseStore.join`."""
        shared, now = await self._at(feed)
        if not any(shared.alive(name, now) for name in shared.instances if name != instance):
            for row in shared.leases.values():
                row.ended = False
        found = shared.instances.setdefault(instance, _Heartbeat(now, now, 0))
        found.expires, found.options = now + seconds, options
        shared.changed(instance)

    async def renew(self, feed: FeedKey, instance: str, seconds: float) -> bool:
        """See `LeaseStore.renew`."""
        shared, now = await self._at(feed)
        if not shared.alive(instance, now):
            return False
        shared.instances[instance].expires = now + seconds
        return True

    async def leave(self, feed: FeedKey, instance: str) -> None:
        """See `LeaseStore.leave`."""
        shared, now = await self._at(feed)
        shared.instances.pop(instance, None)
        for row in shared.leases.values():
            if row.owner == instance:
                row.owner, row.since = None, now

    async def instances(self, feed: FeedKey) -> list[Instance]:
        """See `LeaseStore.instances`."""
        shared, now = await self._at(feed)
        return [
            Instance(name, found.expires - now, now - found.joined, found.changes, found.options)
            for name, found in sorted(shared.instances.items())
        ]

    async def leases(self, feed: FeedKey) -> dict[int, Lease]:
        """See `LeaseStore.leases`."""
        shared, now = await self._at(feed)
        return {
            partition: Lease(partition, row.owner, row.epoch, row.ended, now - row.since)
            for partition, row in sorted(shared.leases.items())
        }

    async def claim(
        self, feed: FeedKey, instance: str, epochs: Mapping[int, int]
    ) -> dict[int, int]:
        """See `LeaseStore.claim`."""
        shared, now = await self._at(feed)
        claimed: dict[int, int] = {}
        for partition, epoch in epochs.items() if shared.alive(instance, now) else ():
            row = shared.leases.setdefault(partition, _Row())
            if row.epoch != epoch or (row.owner != instance and shared.alive(row.owner, now)):
                continue
            row.owner, row.epoch, row.since = instance, epoch + 1, now
            row.ended = False
            claimed[partition] = row.epoch
        if claimed:
            shared.changed(instance)
        return claimed

    async def release(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> None:
        """See `LeaseStore.release`."""

        def release(row: _Row) -> None:
            row.owner = None

        await self._change(feed, instance, partitions, release)

    async def end(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> None:
        """See `LeaseStore.end`."""

        def end(row: _Row) -> None:
            row.ended = True

        await self._change(feed, instance, partitions, end)

    async def _change(
        self,
        feed: FeedKey,
        instance: str,
        partitions: Collection[int],
        change: Callable[[_Row], None],
    ) -> None:
        shared, now = await self._at(feed)
        for partition in partitions:
            row = shared.leases.get(partition)
            if row is not None and row.owner == instance:
                change(row)
                row.since = now
        shared.changed(instance)

    async def _at(self, feed: FeedKey) -> tuple[_Feed, float]:
        await anyio.lowlevel.checkpoint_if_cancelled()
        return self._shared.setdefault(feed, _Feed()), anyio.current_time()
