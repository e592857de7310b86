"""Delivery of one batch to the handler, and the save of its cursor with its quarantined events."""

from __future__ import annotations

from typing import Any

from feedapi_client.arguments import WrongFunctionError
from feedapi_client.errors import CommitOrderError, FencedError
from feedapi_client.model import Batch, Committer, Event
from feedapi_client.quarantine.policy import Handler
from feedapi_client.quarantine.quarantine_store import QuarantineStore
from feedapi_client.quarantine.record import QuarantinedEvent


class BatchDelivery:
    """One batch: its remaining events, those to be quarantined, and whether its cursor is saved.

    Arguments:
        store: the quarantine; None without one.
        same_transaction: whether `store` can take part in the transaction that saves the cursor.
    """

    def __init__(
        self,
        batch: Batch,
        handle: Handler,
        store: QuarantineStore | None,
        same_transaction: bool,
    ) -> None:
        self.batch = batch
        self.remaining: list[tuple[int, Event]] = list(enumerate(batch.events))
        self.quarantined: list[QuarantinedEvent] = []
        self.committed = False
        self.handled = False
        """The handler has returned with the remaining events: only their save is left."""
        self._handle = handle
        self._store = store
        self._same_transaction = same_transaction
        self._stored = 0  # quarantined events that are in a store of another database already

    async def deliver(self) -> None:
        """Call the handler with the remaining events, and save the cursor if it did not.

        What failed is what is repeated: of a handler that has returned only the save (R5). Raises
        what the handler or the save raises.
        """
        saved = False

        async def commit(_: Batch, transaction: Any) -> None:
            nonlocal saved
            if not self.committed:
                await self.save(transaction)
                saved, self.committed = True, transaction is None

        if not self.handled:
            await self.call_handler(self.remaining, commit)
            self.handled = True
        if not saved:
            await self.save(None)

    def is_beyond_recovery(self, error: Exception) -> bool:
        """Return whether an error of `deliver` ends the consumer.

        Once the cursor is saved the events count as handled: there is nothing to try again.
        """
        return self.committed or is_final(error)

    async def call_handler(self, events: list[tuple[int, Event]], commit: Committer) -> None:
        """Call the handler with these events; `commit` is called for its ``batch.commit``."""
        chosen = [event for _, event in events]
        await self._handle(Batch(self.batch.partition, chosen, self.batch.cursor, commit))

    async def save(self, transaction: Any) -> None:
        """Save the cursor, and the quarantined events with it."""
        commit, store, events = self.batch.commit, self._store, self.quarantined
        if not events or store is None:
            await commit(transaction)
        elif not self._same_transaction:
            await store.add(events[self._stored :])
            self._stored = len(events)
            await commit(transaction)
        elif transaction is not None:
            await commit(transaction)
            await store.add(events, transaction=transaction)
        else:
            async with store.begin() as own:
                await commit(own)
                await store.add(events, transaction=own)


def is_final(error: BaseException) -> bool:
    """Return whether the consumer can't go on, whatever the application does."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_final(one) for one in error.exceptions)
    return isinstance(error, (FencedError, CommitOrderError, WrongFunctionError))
