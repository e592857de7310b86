"""Events that go into quarantine: which may, and how they are saved with a cursor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

import anyio

from feedapi_client.arguments import WrongFunctionError
from feedapi_client.errors import CommitOrderError, FencedError, StoreError
from feedapi_client.model import Batch, Decoder, Event, FeedKey, make_event
from feedapi_client.protocol.text import counted
from feedapi_client.quarantine.failure_text import Note
from feedapi_client.quarantine.policy import OnFailure, parse_on_failure
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
from feedapi_client.stores.base import CursorStore, translated

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
        self.policy, self._quarantine = parse_on_failure(on_failure)
        self.store = (
            None if self._quarantine is None else self._quarantine.to or quarantine_beside(cursors)
        )
        self.in_a_row: dict[int, int] = {}
        self.held: HeldKeys | None = None
        self._feed = feed
        self._cursors = cursors
        self._adopts = adopts
        if self.store is not None and self._quarantine is not None and self._quarantine.whole_key:
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
        if old is not None and await self._is_left_behind(old):
            if not isinstance(store, ScriptedQuarantine):
                raise StoreError(
                    f"{type(store).__name__} holds quarantined events of this feed under "
                    f"{old.url}: replay or drop them before the feed gets a feed_name",
                    feed=self._feed.url,
                )
            await store.move(old, self._feed)
        if self.held is not None:
            await self.held.load()

    async def _is_left_behind(self, old: FeedKey) -> bool:
        assert self.store is not None
        events = await translated(self.store.page(old, limit=1), "reading the quarantine", old.url)
        if not events:
            return False
        return not await translated(self._cursors.load(old), "loading cursors", old.url)

    def backoff(self) -> Backoff:
        return self.policy.backoff(lambda error: not is_final(error))

    def takes(self, error: Exception) -> bool:
        return (
            self._quarantine is not None
            and isinstance(error, self._quarantine.errors)
            and not isinstance(error, StoreError)
            and not is_final(error)
        )

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
            if not self.takes(error):
                return None
            assert self._quarantine is not None
            in_a_row, limit = self.in_a_row.get(event.partition, 0) + 1, self._quarantine.limit
            if in_a_row > limit:
                many = counted(limit, "event in a row was", "events in a row were")
                where = f"feed {self._feed.url}, partition {event.partition}"
                error.add_note(Note(f"{where}: {many} quarantined before this one"))
                return None
            self.in_a_row[event.partition] = in_a_row
        record = quarantined(self._feed, event, cursor, index, error)
        if self.held is not None:
            self.held.add(key, record)
        return record

    async def save(
        self, batch: Batch, events: Sequence[QuarantinedEvent], transaction: Any = None
    ) -> None:
        """Save the cursor of the batch and the events: in one transaction, or the events before."""
        store = self.store
        if store is None or not events:
            await batch.commit(transaction)
            return
        # In the transactions of the cursors, where the store can join them.
        joins = getattr(store, "along", None)
        along = None if joins is None else joins(self._cursors, events)
        if along is not None and transaction is not None:
            await batch.commit(transaction)
            await store.add(events, transaction=transaction)
            return
        if along is None:
            # An attempt before may have kept them, and not have saved the cursor.
            await store.add([each for each in events if await store.get(each.id) is None])
        await batch.commit(transaction if along is None else along)


def is_final(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(is_final(one) for one in error.exceptions)
    return isinstance(error, (FencedError, CommitOrderError, WrongFunctionError))


class HeldKeys:
    """Read from the quarantine itself: instances and later runs agree which keys are held."""

    def __init__(
        self, store: QuarantineStore, feed: FeedKey, key: Callable[[QuarantinedEvent], Hashable]
    ) -> None:
        self._store = store
        self._feed = feed
        self._key = key
        self._ids: dict[Hashable, deque[str]] = {}
        """By key, in the order of quarantining."""
        self._firsts: dict[Hashable, str] = {}
        """By key, what `first_of_key` returns for these."""
        self._unsaved: set[str] = set()
        self._lock = anyio.Lock()
        self.stale = True
        """Whether another instance may have put events aside since the last `load`."""

    def __bool__(self) -> bool:
        return self.stale or bool(self._ids)

    async def load(self) -> None:
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
        firsts: dict[Hashable, str] = {}
        async for record in list_events(self._store, self._feed):
            with suppress(Exception):
                key = self._key(record)
                found.setdefault(key, deque()).append(record.id)
                firsts.setdefault(key, first_of_key(record))
        for key, ids in self._ids.items():
            if unsaved := [id for id in ids if id in self._unsaved]:
                found.setdefault(key, deque()).extend(unsaved)
                firsts.setdefault(key, self._firsts[key])
        self._ids, self._firsts = found, firsts

    async def holding(self, key: Hashable) -> str | None:
        """Return the id of the first event of the key that is in quarantine now."""
        if self.stale:
            await self.load()
        ids = self._ids.get(key)
        while ids:
            if ids[0] in self._unsaved or await self._store.get(ids[0]) is not None:
                return ids[0]
            ids.popleft()
        self._ids.pop(key, None)
        self._firsts.pop(key, None)
        return None

    async def first(self, key: Hashable) -> str | None:
        return None if await self.holding(key) is None else self._firsts[key]

    def add(self, key: Hashable, record: QuarantinedEvent) -> None:
        self._ids.setdefault(key, deque()).append(record.id)
        self._firsts.setdefault(key, first_of_key(record))
        self._unsaved.add(record.id)

    def settled(self, records: Sequence[QuarantinedEvent]) -> None:
        self._unsaved.difference_update(record.id for record in records)
