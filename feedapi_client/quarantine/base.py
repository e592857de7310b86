"""The protocol of quarantine stores (elsewhere: the storage of a dead-letter queue)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

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
