"""Events that go into quarantine: which may, and how they are saved with a cursor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from feedapi_client.arguments import WrongFunctionError
from feedapi_client.errors import CommitOrderError, FencedError
from feedapi_client.model import Batch, Event, FeedKey
from feedapi_client.quarantine.failure_text import note_limit
from feedapi_client.quarantine.policy import Quarantine, may_be_an_events_fault
from feedapi_client.quarantine.quarantine_location import quarantine_beside
from feedapi_client.quarantine.quarantine_store import JoiningStore
from feedapi_client.quarantine.record import QuarantinedEvent, quarantined
from feedapi_client.stores.base import CursorStore


class Aside:
    """The quarantine of one consumer.

    Attributes:
        store: where the events go.
        in_a_row: by partition: how many were put aside since one was handled.

    Raises `StoreError` if there is no place for quarantined events.
    """

    def __init__(self, quarantine: Quarantine, feed: FeedKey, cursors: CursorStore) -> None:
        self.store = quarantine.to or quarantine_beside(cursors)
        self.in_a_row: dict[int, int] = {}
        self._quarantine = quarantine
        self._feed = feed
        self._cursors = cursors

    def takes(self, error: Exception) -> bool:
        """Return whether an error of the handler may be the fault of an event."""
        return not is_final(error) and may_be_an_events_fault(self._quarantine, error)

    def handled(self, partition: int) -> None:
        """Note that an event of the partition was handled: the row of failures has ended."""
        self.in_a_row.pop(partition, None)

    def record(
        self, event: Event, cursor: str, index: int, error: Exception
    ) -> QuarantinedEvent | None:
        """Return the record of an event that goes into quarantine.

        None if its error is to be raised: one that is no event's fault, or too many in a row.
        """
        in_a_row = self.in_a_row.get(event.partition, 0) + 1
        if not self.takes(error):
            return None
        if in_a_row > self._quarantine.limit:
            note_limit(error, self._feed, event.partition, self._quarantine.limit)
            return None
        self.in_a_row[event.partition] = in_a_row
        return quarantined(self._feed, event, cursor, index, error)

    async def save(
        self, batch: Batch, events: Sequence[QuarantinedEvent], transaction: Any = None
    ) -> None:
        """Save the cursor of the batch and the events: in one transaction, or the events before."""
        store = self.store
        along = None
        if events and isinstance(store, JoiningStore):
            along = store.along(self._cursors, events)
        if along is not None and transaction is not None:
            await batch.commit(transaction)
            await store.add(events, transaction=transaction)
            return
        if events and along is None:
            # An attempt before may have kept them, and not have saved the cursor.
            await store.add([each for each in events if await store.get(each.id) is None])
        await batch.commit(transaction if along is None else along)


def is_final(error: BaseException) -> bool:
    """Return whether the consumer can't go on, whatever the application does."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_final(one) for one in error.exceptions)
    return isinstance(error, (FencedError, CommitOrderError, WrongFunctionError))
