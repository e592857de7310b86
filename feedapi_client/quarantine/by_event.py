"""What `FeedConsumer.run_by_key` does with an event that its handler can't handle."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from feedapi_client.model import Batch, Decoder, Event, FeedKey, make_event
from feedapi_client.quarantine.aside import Aside, is_final
from feedapi_client.quarantine.held_keys import HeldKeys
from feedapi_client.quarantine.policy import OnFailure, parse_on_failure
from feedapi_client.quarantine.record import EarlierEventQuarantined, QuarantinedEvent, quarantined
from feedapi_client.retry import Backoff
from feedapi_client.stores.base import CursorStore

Key = Callable[[Event], Hashable]


class EventFailures:
    """The policy for events that fail, and what of them has to be saved with a cursor.

    Arguments:
        on_failure, key: as in `FeedConsumer.run_by_key`.
        feed: whose events.
        cursors: the cursor store.
        decoder: what the event's `json()` uses.

    Raises ValueError or TypeError for an `on_failure` that is none; `StoreError` if there is no
    place for quarantined events.
    """

    def __init__(
        self,
        on_failure: OnFailure,
        feed: FeedKey,
        cursors: CursorStore,
        key: Key,
        decoder: Decoder,
    ) -> None:
        self._policy, quarantine = parse_on_failure(on_failure)
        self._feed = feed
        self._aside = None if quarantine is None else Aside(quarantine, feed, cursors)
        self.in_a_row = {} if self._aside is None else self._aside.in_a_row
        """By partition: how many events were put aside since one was handled."""
        self.held: HeldKeys | None = None
        """With ``Quarantine(whole_key=True)``: the keys that wait for a replay."""
        if self._aside is not None and quarantine is not None and quarantine.whole_key:

            def key_of(record: QuarantinedEvent) -> Hashable:
                raw, headers = record.raw, record.headers
                return key(make_event(record.partition, raw, headers, decoder=decoder))

            self.held = HeldKeys(self._aside.store, feed, key_of)

    async def prepare(self) -> None:
        """Get ready, before anything is read. Raises `StoreError`."""
        if self._aside is not None:
            await self._aside.store.prepare()
        if self.held is not None:
            await self.held.load()

    def backoff(self) -> Backoff:
        """Return the backoff of one event, or of one save."""
        return self._policy.backoff(lambda error: not is_final(error))

    def handled(self, partition: int) -> None:
        """Note that an event of the partition was handled: the row of failures has ended."""
        self.in_a_row.pop(partition, None)

    def put_aside(
        self, event: Event, cursor: str, index: int, key: Hashable, error: Exception
    ) -> QuarantinedEvent | None:
        """Return the record of an event that goes into quarantine; None to raise its error.

        One whose key is held is put aside in any case.
        """
        record: QuarantinedEvent | None = None
        if isinstance(error, EarlierEventQuarantined):
            record = quarantined(self._feed, event, cursor, index, error)
        elif self._aside is not None:
            record = self._aside.record(event, cursor, index, error)
        if record is not None and self.held is not None:
            self.held.add(key, record)
        return record

    async def save(self, batch: Batch, records: list[QuarantinedEvent]) -> None:
        """Save the cursor of the batch and what was quarantined up to it."""
        if self._aside is None:
            await batch.commit()
        else:
            await self._aside.save(batch, records)
