"""The keys that have an event in quarantine (``Quarantine(whole_key=True)``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress

import anyio

from feedapi_client.model import FeedKey
from feedapi_client.quarantine.quarantine_store import QuarantineStore, list_events
from feedapi_client.quarantine.record import QuarantinedEvent, first_of_key


class HeldKeys:
    """Read from the quarantine itself: instances and later runs agree which keys are held."""

    def __init__(
        self, store: QuarantineStore, feed: FeedKey, key: Callable[[QuarantinedEvent], Hashable]
    ) -> None:
        self._store = store
        self._feed = feed
        self._key = key
        self._ids: dict[Hashable, deque[str]] = {}
        """By key, in the order of quarantining."""
        self._firsts: dict[Hashable, str] = {}
        """By key, what `first_of_key` returns for these."""
        self._unsaved: set[str] = set()
        self._lock = anyio.Lock()
        self.stale = True
        """Whether another instance may have put events aside since the last `load`."""

    def __bool__(self) -> bool:
        return self.stale or bool(self._ids)

    async def load(self) -> None:
        async with self._lock:
            if not self.stale:
                return
            self.stale = False
            try:
                await self._load()
            except BaseException:
                self.stale = True
                raise

    async def _load(self) -> None:
        found: dict[Hashable, deque[str]] = {}
        firsts: dict[Hashable, str] = {}
        async for record in list_events(self._store, self._feed):
            with suppress(Exception):
                key = self._key(record)
                found.setdefault(key, deque()).append(record.id)
                firsts.setdefault(key, first_of_key(record))
        for key, ids in self._ids.items():
            if unsaved := [id for id in ids if id in self._unsaved]:
                found.setdefault(key, deque()).extend(unsaved)
                firsts.setdefault(key, self._firsts[key])
        self._ids, self._firsts = found, firsts

    async def holding(self, key: Hashable) -> str | None:
        """Return the id of the first event of the key that is in quarantine now."""
        if self.stale:
            await self.load()
        ids = self._ids.get(key)
        while ids:
            if ids[0] in self._unsaved or await self._store.get(ids[0]) is not None:
                return ids[0]
            ids.popleft()
        self._ids.pop(key, None)
        self._firsts.pop(key, None)
        return None

    async def first(self, key: Hashable) -> str | None:
        return None if await self.holding(key) is None else self._firsts[key]

    def add(self, key: Hashable, record: QuarantinedEvent) -> None:
        self._ids.setdefault(key, deque()).append(record.id)
        self._firsts.setdefault(key, first_of_key(record))
        self._unsaved.add(record.id)

    def settled(self, records: Sequence[QuarantinedEvent]) -> None:
        self._unsaved.difference_update(record.id for record in records)
