"""The protocol of quarantine stores (elsewhere: dead-letter queues), and the one in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, runtime_checkable

import anyio.lowlevel

from feedapi_client.model import FeedKey
from feedapi_client.quarantine.record import QuarantinedEvent
from feedapi_client.stores.base import CursorStore


@runtime_checkable
class QuarantineStore(Protocol):
    """Keeps quarantined events until an operator drops or replays them.

    Nothing else ever deletes an event. All methods may be called concurrently, by several tasks
    and processes. They raise `StoreError`.
    """

    async def prepare(self) -> None:
        """Get ready to take events, or raise.

        A consumer calls this before it reads, so that no event finds the store missing.
        """
        ...

    def joins(self, cursors: CursorStore) -> bool:
        """Return whether a transaction on this store may also hold the save of a cursor there."""
        ...

    def begin(self) -> AbstractAsyncContextManager[Any]:
        """Return a transaction as a context manager; it gives None if the store has none.

        The transaction is committed at the end of the block, and rolled back by an exception.
        """
        ...

    async def add(self, events: Sequence[QuarantinedEvent], *, transaction: Any = None) -> None:
        """Keep all of the events or none; with `transaction`, as part of it."""
        ...

    async def page(
        self,
        feed: FeedKey | None = None,
        *,
        partition: int | None = None,
        after: str = "",
        limit: int = 100,
    ) -> list[QuarantinedEvent]:
        """Return up to `limit` events whose id is above `after`, in the order of their ids.

        `feed` and `partition` select; None: all of them.
        """
        ...

    async def get(self, id: str) -> QuarantinedEvent | None:
        """Return one event, or None."""
        ...

    async def remove(self, ids: Iterable[str], *, transaction: Any = None) -> int:
        """Delete events; with `transaction`, as part of it. Returns how many there were."""
        ...


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

    async def add(
        self,
        events: Sequence[QuarantinedEvent],
        *,
        transaction: Any = None,  # noqa: ARG002
    ) -> None:
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
