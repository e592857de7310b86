"""The heartbeat of one instance."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection

import anyio

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.options import Share
from feedapi_client.sharing.feed_leases import Leases

log = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 4
_RETRIES_PER_RENEWAL = 10
_SHOWN = 20


class Membership:
    """Joins, renews, and joins again after the heartbeat has expired.

    Whether it has expired is decided by the database. Before it answers, this instance's monotonic
    clock counts, from the moment before the last successful renewal was sent.

    Arguments:
        lost: called with the reason when all leases are lost.

    Attributes:
        joined: whether there is a heartbeat.
        expired: how often it has expired.
    """

    def __init__(
        self,
        share: Share,
        store: Leases,
        key: FeedKey,
        name: str,
        *,
        lost: Callable[[str], object],
    ) -> None:
        self.joined = False
        self.expired = 0
        self._seconds = share.lease_seconds
        self._store = store
        self._key = key
        self._name = name
        self._lost = lost
        self._deadline = 0.0
        self._failing = False
        self._changed = anyio.Event()

    async def beat(self) -> None:
        """Write the heartbeat. Raises `StoreError`."""
        sent = anyio.current_time()
        if not await self._store.beat(self._seconds):
            self._expire("its heartbeat has expired")
        self._deadline = max(self._deadline, sent + self._seconds)
        self.joined = True
        self._changed.set()

    def left(self) -> None:
        """Note that the instance leaves."""
        self.joined = False
        self._changed = anyio.Event()

    async def wait_until_joined(self) -> None:
        """Wait until the heartbeat is written for the first time."""
        await self._changed.wait()

    async def run(self) -> None:
        """Keep the heartbeat until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            while True:
                try:
                    await self.beat()
                    pause = self._seconds / _RENEWALS_PER_LEASE
                    self._failing = False
                except StoreError as error:
                    if not self._failing:  # once for each outage
                        self.log(f"could not write its heartbeat: {error}", level=logging.WARNING)
                    self._failing = True
                    pause = self._seconds / _RENEWALS_PER_LEASE / _RETRIES_PER_RENEWAL
                await anyio.sleep(pause * random.uniform(0.8, 1.0))

    async def _watch(self) -> None:
        """Stop reading by the own clock, although the database may not answer at all."""
        while True:
            if self.joined and anyio.current_time() >= self._deadline:
                self._expire("its heartbeat could not be renewed in time")
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
        """Log a change of this instance."""
        shown = ", ".join(map(str, sorted(partitions)[:_SHOWN]))
        more = f" and {len(partitions) - _SHOWN} more" if len(partitions) > _SHOWN else ""
        text = f"{text} " if shown else text
        log.log(
            level,
            "feed %s, instance %s: %s%s%s",
            self._key.url,
            self._name,
            text,
            shown,
            more,
            extra={
                "feed": self._key.url,
                "feedapi_instance": self._name,
                "feedapi_partitions": len(partitions),
            },
        )
