"""Events that go into quarantine: which may, and how they are saved with a cursor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

import anyio

from feedapi_client.arguments import WrongFunctionError
from feedapi_client.errors import CommitOrderError, FencedError, StoreError
from feedapi_client.model import Batch, Decoder, Event, FeedKey, make_event
from feedapi_client.protocol.text import counted
from feedapi_client.quarantine.failure_text import Note
from feedapi_client.quarantine.policy import OnFailure, Quarantine, parse_on_failure
from feedapi_client.quarantine.quarantine_store import (
    QuarantineStore,
    ScriptedQuarantine,
    list_events,
    quarantine_beside,
)
from feedapi_client.quarantine.record import (
    EarlierEventQuarantined,
    QuarantinedEvent,
    first_of_key,
    quarantined,
)
from feedapi_client.retry import Backoff
from feedapi_client.stores.base import CursorStore

Key = Callable[[Event], Hashable]


class Aside:
    """What `on_failure` asks for, and the quarantine of one consumer if there is one.

    Attributes:
        store: where events go; None without a quarantine.
        in_a_row: by partition, how many were put aside since one was handled.
        held: the keys that wait for a replay (``Quarantine(whole_key=True)``).
    """

    def __init__(
        self,
        on_failure: OnFailure,
        feed: FeedKey,
        cursors: CursorStore,
        *,
        adopts: FeedKey | None = None,
        key: Key | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        self.policy = parse_on_failure(on_failure)
        self.store: QuarantineStore | None = None
        self.in_a_row: dict[int, int] = {}
        self.held: HeldKeys | None = None
        self._then, self._feed, self._cursors = self.policy.then, feed, cursors
        self._adopts = adopts
        if not isinstance(self._then, Quarantine):
            return
        self.store = self._then.to or quarantine_beside(cursors)
        if self._then.whole_key:
            if key is None or decoder is None:
                raise ValueError("Quarantine.whole_key needs a key for each event: use run_by_key")

            def key_of(record: QuarantinedEvent) -> Hashable:
                raw, headers = record.raw, record.headers
                return key(make_event(record.partition, raw, headers, decoder=decoder))

            self.held = HeldKeys(self.store, feed, key_of)

    async def prepare(self) -> None:
        """Get ready to take events, and take along those whose cursors were adopted (R7).

        Beside the cursors they were moved with them already.
        """
        store, old = self.store, self._adopts
        if store is None:
            return
        await store.prepare()
        if old and await store.page(old, limit=1) and not await self._cursors.load(old):
            if not isinstance(store, ScriptedQuarantine):
                raise StoreError(
                    f"{type(store).__name__} holds quarantined events of this feed under "
                    f"{old.url}: replay or drop them before the feed gets a feed_name",
                    feed=self._feed.url,
                )
            await store.move(old, self._feed)
        if self.held is not None:
            await self.held.load()

    def backoff(self) -> Backoff:
        return self.policy.backoff(lambda error: not is_final(error))

    def takes(self, error: Exception) -> bool:
        kinds = self._then.errors if isinstance(self._then, Quarantine) else ()
        return isinstance(error, kinds) and not (isinstance(error, StoreError) or is_final(error))

    def handled(self, partition: int) -> None:
        self.in_a_row.pop(partition, None)

    def record(
        self, event: Event, cursor: str, index: int, error: Exception, key: Hashable = None
    ) -> QuarantinedEvent | None:
        """Return the record of an event that goes into quarantine.

        None if its error is to be raised: one that is no event's fault, or too many in a row. An
        event whose key is held is put aside in any case.
        """
        if not isinstance(error, EarlierEventQuarantined):
            if not self.takes(error) or not isinstance(self._then, Quarantine):
                return None
            in_a_row, limit = self.in_a_row.get(event.partition, 0) + 1, self._then.limit
            if in_a_row > limit:
                many = counted(limit, "event in a row was", "events in a row were")
                where = f"feed {self._feed.url}, partition {event.partition}"
                error.add_note(Note(f"{where}: {many} quarantined before this one"))
                return None
            self.in_a_row[event.partition] = in_a_row
        after = "" if self.held is None else self.held.last(key)
        record = quarantined(self._feed, event, cursor, index, error, after)
        if self.held is not None:
            self.held.add(key, record)
        return record

    async def save(
        self, batch: Batch, events: Sequence[QuarantinedEvent], transaction: Any = None
    ) -> None:
        """Save the cursor of the batch and the events: in one transaction, or the events before."""
        store, along = self.store, None
        if store is not None and events:
            if joins := getattr(store, "along", None):  # the transactions of the cursors
                along = joins(self._cursors, events)
            if along is None:
                # An attempt before may have kept them, and not have saved the cursor.
                await store.add([each for each in events if await store.get(each.id) is None])
        await batch.commit(along if transaction is None else transaction)
        if store is not None and along is not None and transaction is not None:
            await store.add(events, transaction=transaction)


def is_final(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(is_final(one) for one in error.exceptions)
    return isinstance(error, (FencedError, CommitOrderError, WrongFunctionError))


class HeldKeys:
    """Read from the quarantine itself: instances and later runs agree which keys are held."""

    def __init__(
        self, store: QuarantineStore, feed: FeedKey, key: Callable[[QuarantinedEvent], Hashable]
    ) -> None:
        self._store, self._feed, self._key = store, feed, key
        self._firsts: dict[Hashable, dict[str, str]] = {}
        """By key, what `first_of_key` returns for each id, in the order of quarantining."""
        self._unsaved: set[str] = set()
        self._lock = anyio.Lock()
        self._doubts, self._loaded = 1, 0

    @property
    def _is_stale(self) -> bool:
        return self._loaded < self._doubts

    def __bool__(self) -> bool:
        return self._is_stale or bool(self._firsts)

    def doubt(self) -> None:
        """Read the quarantine again: another instance may have put events aside."""
        self._doubts += 1

    async def load(self) -> None:
        async with self._lock:
            if self._is_stale:
                doubts = self._doubts
                async for record in list_events(self._store, self._feed):
                    with suppress(Exception):  # an event whose key can't be found
                        self._note(self._key(record), record)
                self._firsts = {key: dict(sorted(ids.items())) for key, ids in self._firsts.items()}
                self._loaded = doubts

    async def holding(self, key: Hashable) -> tuple[str, str] | None:
        """Return the first event of the key that is in quarantine now, and its `first_of_key`."""
        if self._is_stale:
            await self.load()
        firsts = self._firsts.get(key, {})
        while firsts:
            id, first = next(iter(firsts.items()))
            if id in self._unsaved or await self._store.get(id) is not None:
                return id, first
            firsts.pop(id, None)
        self._firsts.pop(key, None)
        return None

    def last(self, key: Hashable) -> str:
        return max(self._firsts.get(key, ()), default="")

    def add(self, key: Hashable, record: QuarantinedEvent) -> None:
        self._note(key, record)
        self._unsaved.add(record.id)

    def _note(self, key: Hashable, record: QuarantinedEvent) -> None:
        self._firsts.setdefault(key, {})[record.id] = first_of_key(record)

    def settled(self, records: Sequence[QuarantinedEvent]) -> None:
        self._unsaved.difference_update(record.id for record in records)
