"""The quarantine in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio.lowlevel

from feedapi_client.model import FeedKey
from feedapi_client.quarantine.record import QuarantinedEvent
from feedapi_client.stores.base import CursorStore


class MemoryQuarantineStore:
    """Keeps events for as long as the object lives.

    It has no transactions: a consumer that is killed may quarantine an event again.
    """

    def __init__(self) -> None:
        self._events: dict[str, QuarantinedEvent] = {}

    async def prepare(self) -> None:
        """See `QuarantineStore.prepare`."""
        await anyio.lowlevel.checkpoint()

    def joins(self, cursors: CursorStore) -> bool:  # noqa: ARG002
        """Return False: there are no transactions."""
        return False

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[None]:
        """Give None: there are no transactions."""
        yield None

    async def add(self, events: Sequence[QuarantinedEvent], *, transaction: Any = None) -> None:  # noqa: ARG002
        """See `QuarantineStore.add`; not part of any transaction."""
        await anyio.lowlevel.checkpoint()
        self._events.update((event.id, event) for event in events)

    async def page(
        self,
        feed: FeedKey | None = None,
        *,
        partition: int | None = None,
        after: str = "",
        limit: int = 100,
    ) -> list[QuarantinedEvent]:
        """See `QuarantineStore.page`."""
        await anyio.lowlevel.checkpoint()
        chosen = (self._events[id] for id in sorted(self._events) if id > after)
        return [
            event
            for event in chosen
            if feed in (None, event.feed) and partition in (None, event.partition)
        ][:limit]

    async def get(self, id: str) -> QuarantinedEvent | None:
        """See `QuarantineStore.get`."""
        await anyio.lowlevel.checkpoint()
        return self._events.get(id)

    async def remove(self, ids: Iterable[str], *, transaction: Any = None) -> int:  # noqa: ARG002
        """See `QuarantineStore.remove`; not part of any transaction."""
        await anyio.lowlevel.checkpoint()
        return sum(self._events.pop(id, None) is not None for id in set(ids))

    def __repr__(self) -> str:
        return f"<MemoryQuarantineStore: {len(self._events)} events>"
