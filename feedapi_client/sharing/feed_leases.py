"""The leases of one consumer's feed, with our own errors."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Collection, Mapping
from typing import TypeVar

from feedapi_client.model import FeedKey
from feedapi_client.runtime.driver import ConsumerSettings
from feedapi_client.stores.foreign_errors import translated
from feedapi_client.stores.leases import Instance, Lease, LeaseStore

T = TypeVar("T")


def published_options(settings: ConsumerSettings, version: str) -> str:
    """Return what an instance tells the others: options that have to be the same in all."""
    chosen = settings.partitions
    options = {
        "follow": str(int(settings.follow)),
        "ordered": str(int(settings.ordered)),
        "partitions": "all" if chosen is None else _digest(sorted(chosen)),
        "lineage": _digest(sorted(settings.lineage.items())),
        "version": version,
    }
    return " ".join(f"{name}={value}" for name, value in options.items())[:200]


def different_options(one: str, other: str) -> list[str]:
    """Return the names of the options that both have told and that differ."""
    mine, theirs = (
        dict(part.split("=", 1) for part in options.split() if "=" in part)
        for options in (one, other)
    )
    return [name for name in mine if name in theirs and mine[name] != theirs[name]]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


class Leases:
    """The leases of one instance in a store. Every method raises `StoreError`, and nothing else.

    A store of one's own may let the errors of its driver through: an outage must not end an
    instance.
    """

    def __init__(self, store: LeaseStore, feed: FeedKey, instance: str, options: str) -> None:
        self._store = store
        self._feed = feed
        self._instance = instance
        self._options = options

    async def join(self, seconds: float) -> None:
        """See `LeaseStore.join`."""
        join = self._store.join(self._feed, self._instance, seconds, self._options)
        await self._translated(join, "joining")

    async def renew(self, seconds: float) -> bool:
        """See `LeaseStore.renew`."""
        renewal = self._store.renew(self._feed, self._instance, seconds)
        return await self._translated(renewal, "renewing the heartbeat")

    async def leave(self) -> None:
        """See `LeaseStore.leave`."""
        await self._translated(self._store.leave(self._feed, self._instance), "leaving")

    async def instances(self) -> list[Instance]:
        """See `LeaseStore.instances`."""
        return await self._translated(self._store.instances(self._feed), "reading the instances")

    async def all(self) -> dict[int, Lease]:
        """See `LeaseStore.leases`."""
        return await self._translated(self._store.leases(self._feed), "reading the leases")

    async def claim(self, epochs: Mapping[int, int]) -> dict[int, int]:
        """See `LeaseStore.claim`."""
        claim = self._store.claim(self._feed, self._instance, epochs)
        return await self._translated(claim, "claiming leases")

    async def release(self, partitions: Collection[int]) -> None:
        """See `LeaseStore.release`."""
        release = self._store.release(self._feed, self._instance, partitions)
        await self._translated(release, "releasing leases")

    async def end(self, partitions: Collection[int]) -> None:
        """See `LeaseStore.end`."""
        end = self._store.end(self._feed, self._instance, partitions)
        await self._translated(end, "marking partitions as read to their end")

    async def _translated(self, call: Awaitable[T], doing: str) -> T:
        return await translated(call, doing, self._feed.url)
