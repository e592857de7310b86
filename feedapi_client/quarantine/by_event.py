"""What `FeedConsumer.run_by_key` does with an event that its handler can't handle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

import anyio

from feedapi_client.model import Batch, Decoder, Event, FeedKey, make_event
from feedapi_client.quarantine.aside import Aside, is_final
from feedapi_client.quarantine.operations import list_events
from feedapi_client.quarantine.policy import OnFailure, parse_on_failure
from feedapi_client.quarantine.quarantine_store import QuarantineStore
from feedapi_client.quarantine.record import EarlierEventQuarantined, QuarantinedEvent, quarantined
from feedapi_client.retry import Backoff
from feedapi_client.stores.base import CursorStore

Key = Callable[[Event], Hashable]


class HeldKeys:
    """The keys that have an event in quarantine, whose later events go there, too.

    Which these are is read from the quarantine itself: other instances and later runs agree.

    Arguments:
        store: the quarantine.
        feed: whose events.
        key: of an event.
        decoder: what the event's `json()` uses.
    """

    def __init__(self, store: QuarantineStore, feed: FeedKey, key: Key, decoder: Decoder) -> None:
        self._store = store
        self._feed = feed
        self._key = key
        self._decoder = decoder
        self._ids: dict[Hashable, deque[str]] = {}
        """By key, in the order of quarantining."""
        self._unsaved: set[str] = set()
        self._lock = anyio.Lock()
        self.stale = True
        """Whether another instance may have put events aside since the last `load`."""

    def __bool__(self) -> bool:
        return self.stale or bool(self._ids)

    async def load(self) -> None:
        """Read the keys of all quarantined events of the feed. Raises `StoreError`."""
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
        async for record in list_events(self._store, self._feed):
            event = make_event(record.partition, record.raw, record.headers, decoder=self._decoder)
            try:
                found.setdefault(self._key(event), deque()).append(record.id)
            except Exception:  # noqa: BLE001, S112 - an event without a key holds nothing back
                continue
        for key, ids in self._ids.items():
            found.setdefault(key, deque()).extend(id for id in ids if id in self._unsaved)
        self._ids = {key: ids for key, ids in found.items() if ids}

    async def first(self, key: Hashable) -> str | None:
        """Return the id of the first event of the key that is in quarantine now.

        Raises:
            StoreError
        """
        if self.stale:
            await self.load()
        ids = self._ids.get(key)
        while ids:
            if ids[0] in self._unsaved or await self._store.get(ids[0]) is not None:
                return ids[0]
            ids.popleft()
        self._ids.pop(key, None)
        return None

    def add(self, key: Hashable, id: str) -> None:
        """Note that an event of the key goes into quarantine, with the next save."""
        self._ids.setdefault(key, deque()).append(id)
        self._unsaved.add(id)

    def settled(self, records: Sequence[QuarantinedEvent]) -> None:
        """Note that these were saved, or never will be."""
        self._unsaved.difference_update(record.id for record in records)


class EventFailures:
    """The policy for events that fail, and what of them has to be saved with a cursor.

    Arguments: `on_failure` and `key` as in `FeedConsumer.run_by_key`, the others as in `HeldKeys`.

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
            self.held = HeldKeys(self._aside.store, feed, key, decoder)

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
            self.held.add(key, record.id)
        return record

    async def save(self, batch: Batch, records: list[QuarantinedEvent]) -> None:
        """Save the cursor of the batch and what was quarantined up to it."""
        if self._aside is None:
            await batch.commit()
        else:
            await self._aside.save(batch, records)
