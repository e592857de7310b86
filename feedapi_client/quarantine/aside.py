"""Events that go into quarantine: which may, and how they are saved with a cursor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from feedapi_client.arguments import WrongFunctionError
from feedapi_client.errors import CommitOrderError, FencedError, StoreError
from feedapi_client.model import Batch, Event, FeedKey
from feedapi_client.quarantine.failure_text import note_limit
from feedapi_client.quarantine.policy import Quarantine, may_be_an_events_fault
from feedapi_client.quarantine.quarantine_store import (
    JoiningStore,
    ScriptedQuarantine,
    quarantine_beside,
)
from feedapi_client.quarantine.record import QuarantinedEvent, quarantined
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.foreign_errors import translated


class Aside:
    """The quarantine of one consumer.

    Attributes:
        store: where the events go.
        in_a_row: by partition: how many were put aside since one was handled.

    Arguments:
        feed: whose events.
        adopts: the key that the cursors of `feed` may have been stored under.

    Raises `StoreError` if there is no place for quarantined events.
    """

    def __init__(
        self,
        quarantine: Quarantine,
        feed: FeedKey,
        cursors: CursorStore,
        *,
        adopts: FeedKey | None = None,
    ) -> None:
        self.store = quarantine.to or quarantine_beside(cursors)
        self.in_a_row: dict[int, int] = {}
        self._quarantine = quarantine
        self._feed = feed
        self._cursors = cursors
        self._adopts = adopts

    async def prepare(self) -> None:
        """Get ready to take events, and take along those whose cursors were adopted.

        Beside the cursors they were moved with them already.

        Raises:
            StoreError: the store failed, or can't move events.
        """
        store, old = self.store, self._adopts
        await store.prepare()
        if old is None or not await self._is_left_behind(old):
            return
        if isinstance(store, ScriptedQuarantine):
            await store.move(old, self._feed)
        else:
            raise StoreError(
                f"{type(store).__name__} holds quarantined events of this feed under {old.url}: "
                "replay or drop them before the feed gets a feed_name",
                feed=self._feed.url,
            )

    async def _is_left_behind(self, old: FeedKey) -> bool:
        """Return whether the key has events, and no cursors any more."""
        events = await translated(self.store.page(old, limit=1), "reading the quarantine", old.url)
        if not events:
            return False
        cursors = await translated(self._cursors.load(old), "loading cursors", old.url)
        return not cursors

    def takes(self, error: Exception) -> bool:
        return not is_final(error) and may_be_an_events_fault(self._quarantine, error)

    def handled(self, partition: int) -> None:
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
    if isinstance(error, BaseExceptionGroup):
        return any(is_final(one) for one in error.exceptions)
    return isinstance(error, (FencedError, CommitOrderError, WrongFunctionError))
