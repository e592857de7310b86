"""One instance among others: its heartbeat, its leases in the store, and what it tells."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Collection

import anyio

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.options import Share
from feedapi_client.runtime.iteration import ConsumerSettings
from feedapi_client.stores.base import translated
from feedapi_client.stores.leases import Lease, LeaseStore, View

log = logging.getLogger(__name__)

_BEATS_PER_LEASE = 4
_RETRIES_PER_BEAT = 10
_SHOWN = 20


class Membership:
    """The database decides whether the heartbeat has expired; until it answers, the own clock."""

    def __init__(
        self,
        share: Share,
        store: LeaseStore,
        key: FeedKey,
        name: str,
        options: str,
        *,
        lost: Callable[[str], object],
    ) -> None:
        self.joined = False
        self.expired = 0
        self._seconds = share.lease_seconds
        self._store = store
        self._key = key
        self._name = name
        self._options = options
        self._lost = lost
        self._deadline = 0.0
        self._failing = False
        self._changed = anyio.Event()

    async def look(self) -> View:
        looking = self._store.look(self._key)
        return await translated(looking, "looking at the leases", self._key.url)

    async def put(self, leases: Collection[Lease]) -> set[int]:
        if not leases:
            return set()
        putting = self._store.put(self._key, self._name, leases)
        return await translated(putting, "writing leases", self._key.url)

    async def leave(self) -> None:
        self.joined = False
        self._changed = anyio.Event()
        await translated(self._store.leave(self._key, self._name), "leaving", self._key.url)

    async def beat(self) -> None:
        sent = anyio.current_time()
        beating = self._store.beat(self._key, self._name, self._seconds, self._options)
        if not await translated(beating, "writing the heartbeat", self._key.url):
            self._expire("its heartbeat has expired")
        self._deadline = max(self._deadline, sent + self._seconds)
        self.joined = True
        self._changed.set()

    async def wait_until_joined(self) -> None:
        await self._changed.wait()

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            while True:
                pause = self._seconds / _BEATS_PER_LEASE
                try:
                    await self.beat()
                    self._failing = False
                except StoreError as error:
                    if not self._failing:  # once for each outage
                        self.log(f"could not write its heartbeat: {error}", level=logging.WARNING)
                    self._failing = True
                    pause /= _RETRIES_PER_BEAT
                await anyio.sleep(pause * random.uniform(0.8, 1.0))

    async def _watch(self) -> None:
        """Stop reading by the own clock, although the database may not answer at all."""
        while True:
            if anyio.current_time() >= self._deadline:
                self._expire("its heartbeat could not be written in time")
            pause = self._deadline - anyio.current_time() if self.joined else self._seconds
            await anyio.sleep(max(pause, self._seconds / 100))

    def _expire(self, why: str) -> None:
        if self.joined:
            self.joined = False
            self.expired += 1
            self._lost(why)

    def log(
        self, text: str, partitions: Collection[int] = (), *, level: int = logging.INFO
    ) -> None:
        shown = ", ".join(map(str, sorted(partitions)[:_SHOWN]))
        more = f" and {len(partitions) - _SHOWN} more" if len(partitions) > _SHOWN else ""
        log.log(
            level,
            "feed %s, instance %s: %s",
            self._key.url,
            self._name,
            f"{text} {shown}{more}".rstrip(),
            extra={
                "feed": self._key.url,
                "feedapi_instance": self._name,
                "feedapi_partitions": len(partitions),
            },
        )


def published_options(settings: ConsumerSettings) -> str:
    from feedapi_client import __version__

    chosen = settings.partitions
    options = {
        "follow": int(settings.follow),
        "ordered": int(settings.ordered),
        "partitions": "all" if chosen is None else _digest(sorted(chosen)),
        "lineage": _digest(sorted(settings.lineage.items())),
        "version": __version__,
    }
    return " ".join(f"{name}={value}" for name, value in options.items())[:200]


def different_options(one: str, other: str) -> list[str]:
    mine, theirs = (
        dict(part.split("=", 1) for part in options.split() if "=" in part)
        for options in (one, other)
    )
    return [name for name in mine if name in theirs and mine[name] != theirs[name]]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
