"""The leases of one consumer's feed, with our own errors."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Collection
from typing import TypeVar

from feedapi_client.model import FeedKey
from feedapi_client.runtime.driver import ConsumerSettings
from feedapi_client.stores.foreign_errors import translated
from feedapi_client.stores.leases import Lease, LeaseStore, View

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

    async def look(self, last: View | None = None) -> View:
        """See `LeaseStore.look`."""
        return await self._translated(self._store.look(self._feed, last), "looking at the leases")

    async def beat(self, seconds: float) -> bool:
        """See `LeaseStore.beat`."""
        beat = self._store.beat(self._feed, self._instance, seconds, self._options)
        return await self._translated(beat, "writing the heartbeat")

    async def put(self, leases: Collection[Lease]) -> set[int]:
        """See `LeaseStore.put`."""
        put = self._store.put(self._feed, self._instance, leases)
        return await self._translated(put, "writing leases")

    async def leave(self) -> None:
        """See `LeaseStore.leave`."""
        await self._translated(self._store.leave(self._feed, self._instance), "leaving")

    async def _translated(self, call: Awaitable[T], doing: str) -> T:
        return await translated(call, doing, self._feed.url)
