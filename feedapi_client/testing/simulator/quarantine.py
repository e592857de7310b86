"""The quarantine in the simulated database: it joins the transactions of cursors and effects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import orjson

from feedapi_client.model import FeedKey
from feedapi_client.quarantine.record import QuarantinedEvent
from feedapi_client.stores.base import CursorStore
from feedapi_client.testing.simulator.store import Effect, Session, Transaction


class SimulatedQuarantine:
    """A `QuarantineStore`. An event in it counts as one that took effect: it was not lost."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def prepare(self) -> None:
        """See `QuarantineStore.prepare`."""
        await self._session.operation()

    def joins(self, cursors: CursorStore) -> bool:
        """Return whether the cursors are in the same database."""
        return cursors is self._session

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Transaction]:
        """Give a transaction that is committed at the end of the block."""
        transaction = self._session.transaction()
        yield transaction
        with anyio.CancelScope(shield=True):
            await transaction.commit()

    async def add(self, events: Sequence[QuarantinedEvent], *, transaction: Any = None) -> None:
        """See `QuarantineStore.add`."""
        await self._session.operation()
        effects = [_effect(event) for event in events]
        if transaction is None:
            self._session.apply_at_once(effects)
        else:
            transaction.quarantined += effects

    async def page(
        self,
        feed: FeedKey | None = None,  # noqa: ARG002
        *,
        partition: int | None = None,  # noqa: ARG002
        after: str = "",  # noqa: ARG002
        limit: int = 100,  # noqa: ARG002
    ) -> list[QuarantinedEvent]:
        """Return nothing: no simulated operator looks."""
        return []

    async def get(self, id: str) -> QuarantinedEvent | None:  # noqa: ARG002
        """Return None."""
        return None

    async def remove(self, ids: Iterable[str], *, transaction: Any = None) -> int:  # noqa: ARG002
        """Remove nothing."""
        return 0


def _effect(event: QuarantinedEvent) -> Effect:
    payload = orjson.loads(event.raw)
    return Effect(payload["entity"], payload["n"], event.partition, quarantined=True)
