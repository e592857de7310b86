"""A feed in memory: its events, topology, cursors and pages, without anything that serves it. See `feedapi_client.testing.publisher`."""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any, Literal

import orjson

from feedapi_client.model import FIRST, LAST, DialectName, Partition
from feedapi_client.testing.cursors import AWKWARD_PREFIX, Place, decode, encode
from feedapi_client.testing.entities import Payload, decoded, default_key, hash_of, mix
from feedapi_client.testing.log import Cut, Page, PartitionLog, Visible, picked_page, plain_page
from feedapi_client.testing.watched import Watched
from feedapi_client.testing.wire import Quirks, discovery

Filter = Callable[[Any, str], bool]
SplitMethod = Literal["starts-after", "cursor-from"]

DIALECTS: tuple[DialectName, ...] = ("v1", "v2-draft", "v2-token")


class PublishedFeed(Watched):
    """The feed that a `Publisher` serves: all of it but the serving."""

    def __init__(
        self,
        partitions: int | Iterable[int] = 1,
        *,
        dialect: DialectName = "v2-token",
        page_size: int = 1000,
        checkpoint_every: int = 100,
        vary: bool = False,
        seed: int | None = None,
        stream: bool = False,
        exactly_once: bool = True,
        filters: Iterable[str] | Mapping[str, Filter] = (),
        key: Callable[[Any], object] | None = None,
        quirks: Quirks | None = None,
        bearer: str | None = None,
    ) -> None:
        super().__init__()
        self._logs: dict[int, PartitionLog] = {}
        self._seq = 0
        self.event_headers: dict[int, Mapping[str, str]] = {}
        self._wakeups: dict[int, set[Callable[[], None]]] = {}
        self._random = Random(seed)
        self._nonce = 0
        self.path = "/feed"
        self.token = _new_token()
        self.page_size = page_size
        self.checkpoint_every = checkpoint_every
        self.scan_limit = 1000
        self.vary = vary or seed is not None
        self.stream = stream
        self.exactly_once = exactly_once
        self.filters: Mapping[str, Filter] = (
            filters
            if isinstance(filters, Mapping)
            else {name: _field_equals(name) for name in filters}
        )
        self.key = key or default_key
        self.quirks = quirks or Quirks()
        self.bearer = bearer
        self.require_query: dict[str, str] = {}
        self.type_field = "type"
        self._listed_count: int | None = None
        if page_size < 1 or checkpoint_every < 1:
            raise ValueError("page_size and checkpoint_every must be at least 1")
        self._roots = tuple(range(partitions)) if isinstance(partitions, int) else tuple(partitions)
        if self._roots:
            self._check_new(self._roots)
        for id in self._roots:
            self._new(id)
        self.dialect = dialect

    # Settings

    @property
    def dialect(self) -> DialectName:
        """The dialect spoken; assign another one at any time, cursors carry over."""
        return self._dialect

    @dialect.setter
    def dialect(self, dialect: DialectName) -> None:
        if dialect not in DIALECTS:
            raise ValueError(f"dialect must be one of {', '.join(DIALECTS)}, not {dialect!r}")
        with self.lock:
            listed = [log.id for log in self._logs.values() if log.listed]
            if dialect == "v1" and listed != list(range(len(listed))):
                raise ValueError(f"dialect v1 has partitions 0..n-1, this feed has {listed}")
            self._dialect = dialect
            self._wake()

    def upgrade(self, dialect: DialectName) -> None:
        """Go on in another dialect."""
        self.dialect = dialect

    # Events

    def append(
        self,
        partition: int,
        payload: Payload,
        *,
        headers: Mapping[str, str] | None = None,
        entity: object = None,
    ) -> str:
        """Append an event and return the cursor behind it. Raises ValueError when the partition is not listed or closed."""
        raw, hash = self._prepare(payload, entity)
        with self.lock:
            log = self._writable(partition)
            if headers:
                self.event_headers[self._seq] = headers
            log.add(self._seq, hash, raw)
            end = self._seq = self._seq + 1
            if self._wakeups:
                self._wake(partition)
        return self._encode_plain(partition, end)

    def extend(self, partition: int, payloads: Iterable[Payload]) -> str:
        """Append many events and return the cursor behind the last one."""
        prepared = [self._prepare(payload, None) for payload in payloads]
        with self.lock:
            log = self._writable(partition)
            log.seqs.extend(range(self._seq, self._seq + len(prepared)))
            log.hashes.extend([hash for _, hash in prepared])
            log.payloads.extend([raw for raw, _ in prepared])
            self._seq += len(prepared)
            self._wake(partition)
            return self.end_cursor(partition)

    def append_internal(self, partition: int, count: int = 1) -> str:
        """Append events that the publisher keeps to itself: they only move the cursor."""
        with self.lock:
            log = self._writable(partition)
            for _ in range(count):
                log.add(self._seq, 0, None)
                self._seq += 1
            self._wake(partition)
            return self.end_cursor(partition)

    def publish(
        self, entity: object, payload: Payload, *, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Append to the partition where the entity lives now; returns the partition and the cursor behind the event."""
        with self.lock:
            partition = self.route(entity, payload)
            return partition, self.append(partition, payload, headers=headers, entity=entity)

    def route(self, entity: object, payload: Payload | None = None) -> int:
        """The partition where events of the entity go now. `payload` is needed only after a split with a key of its own."""
        hash = hash_of(entity)
        with self.lock:
            if not self._roots:
                raise ValueError("route: the publisher was made without partitions")
            log = self._logs[self._roots[mix(hash, -1) % len(self._roots)]]
            while log.heirs:
                own = (
                    hash
                    if log.heir_key is None or payload is None
                    else hash_of(log.heir_key(decoded(payload)))
                )
                log = self._logs[log.heirs[mix(own, log.id) % len(log.heirs)]]
            return log.id

    def payloads(self, partition: int | None = None) -> list[Any]:
        """The decoded payloads of a partition, or of the whole feed in the order of publication."""
        with self.lock:
            if partition is not None:
                return [
                    orjson.loads(raw) for raw in self._logs[partition].payloads if raw is not None
                ]
            # A cursor-from split leaves the same event in the heirs and in the removed ancestor.
            every = {
                seq: raw
                for log in self._logs.values()
                for seq, raw in zip(log.seqs, log.payloads, strict=True)
                if raw is not None
            }
        return [orjson.loads(every[seq]) for seq in sorted(every)]

    def end_cursor(self, partition: int) -> str:
        """The cursor behind the last event of the partition."""
        with self.lock:
            return self._encode_plain(partition, self._logs[partition].end)

    # Topology

    @property
    def partitions(self) -> dict[int, Partition]:
        """The listed partitions."""
        with self.lock:
            return {log.id: self._describe(log) for log in self._logs.values() if log.listed}

    def open_partitions(self) -> list[int]:
        """The listed partitions that take events."""
        return [partition.id for partition in self.partitions.values() if not partition.closed]

    def discovery(self) -> dict[str, Any]:
        """The discovery object as it is sent in the present dialect."""
        partitions = list(self.partitions.values())
        return discovery(
            self.dialect,
            partitions,
            token=self.token,
            exactly_once=self.exactly_once,
            stream=self.stream,
            filters=tuple(self.filters),
            quirks=self.quirks,
        )

    def close(self, partition: int) -> None:
        """No event comes to the partition any more."""
        with self.lock:
            self._listed(partition).closed = True
            self._changed()

    def reopen(self, partition: int) -> None:
        """Take events again (which no honest publisher does)."""
        with self.lock:
            self._listed(partition).closed = False
            self._changed()

    def split(
        self,
        partition: int,
        into: int | Iterable[int] = 2,
        *,
        method: SplitMethod = "starts-after",
        key: Callable[[Any], object] | None = None,
    ) -> tuple[int, ...]:
        """Split a partition into new ones and return their ids.

        ``starts-after`` closes the partition and opens children for the events to come. ``cursor-from`` replaces it by children that share its whole
        history by the hash of the entity; `key` finds the entity for this split. Raises ValueError for ids in use, for a partition that has been
        split before, and in dialect v1.
        """
        with self.lock:
            if self._dialect == "v1":
                raise ValueError("dialect v1 has no splits: upgrade first")
            parent = self._unsplit(partition)
            ids = tuple(self._free_ids(into)) if isinstance(into, int) else tuple(into)
            self._check_new(ids)
            if method == "starts-after":
                parent.closed = True
                for id in ids:
                    self._new(id, starts_after=partition)
            elif method == "cursor-from":
                self._redistribute(parent, ids, key)
            else:
                raise ValueError(f"method must be starts-after or cursor-from, not {method!r}")
            parent.heirs, parent.heir_key = ids, key
            self._changed()
            return ids

    def merge(self, partitions: Iterable[int], into: int | None = None) -> int:
        """Replace partitions by one that holds the history of all of them; return its id."""
        with self.lock:
            parents = [self._unsplit(id) for id in partitions]
            (id,) = self._free_ids(1) if into is None else (into,)
            self._check_new((id,))
            ancestors = [parent.id for parent in parents] + [
                one for parent in parents for one in parent.cursor_from
            ]
            child = self._new(
                id,
                cursor_from=dict.fromkeys(ancestors),
                closed=all(parent.closed for parent in parents),
            )
            for entry in heapq.merge(
                *(
                    zip(parent.seqs, parent.hashes, parent.payloads, strict=True)
                    for parent in parents
                ),
                key=lambda entry: entry[0],
            ):
                child.add(*entry)
            for parent in parents:
                parent.listed, parent.heirs, parent.heir_key = False, (id,), None
            self._changed()
            return id

    def add(
        self,
        partition: int | None = None,
        *,
        starts_after: int | None = None,
        cursor_from: Iterable[int] = (),
        closed: bool = False,
    ) -> int:
        """List a partition with any lineage, legal or not; one that was removed comes back with its events."""
        with self.lock:
            (id,) = self._free_ids(1) if partition is None else (partition,)
            known = self._logs.get(id)
            if known is None:
                self._new(id, starts_after=starts_after, cursor_from=cursor_from, closed=closed)
            elif known.listed:
                raise ValueError(f"partition {id} is listed already")
            else:
                known.listed, known.closed, known.starts_after, known.cursor_from = (
                    True,
                    closed,
                    starts_after,
                    tuple(cursor_from),
                )
            self._changed()
            return id

    def remove(self, partition: int) -> None:
        """List the partition no longer."""
        with self.lock:
            self._listed(partition).listed = False
            self._changed()

    def rotate_token(self) -> str:
        """Make every token out there stale (dialect v2-token) and return the new one."""
        with self.lock:
            self.token = _new_token()
            self._wake()
            return self.token

    # For those that serve it; the caller holds the lock

    def log_of(self, partition: int) -> PartitionLog | None:
        """The log of a listed partition; None for any other."""
        log = self._logs.get(partition)
        return log if log is not None and log.listed else None

    @property
    def listed_count(self) -> int:
        """The number of listed partitions."""
        if self._listed_count is None:
            self._listed_count = sum(log.listed for log in self._logs.values())
        return self._listed_count

    def encode(self, place: Place, nonce: int | None = None) -> str:
        """The cursor of a place; one with a `nonce` looks different."""
        cursor = encode(place.origin, place.base, place.ahead, nonce=nonce)
        return AWKWARD_PREFIX + cursor if self.quirks.awkward_cursors else cursor

    def another_cursor(self, partition: int, cursor: str) -> str:
        """A cursor that differs from `cursor` and stands for the same place."""
        self._nonce += 1
        return self.encode(self.place(self._logs[partition], cursor), self._nonce)

    def place(self, log: PartitionLog, cursor: str) -> Place:
        """What a cursor, special or not, means in a partition. Raises ValueError for one that isn't valid there."""
        if cursor in (FIRST, LAST):
            return Place(log.id, 0 if cursor == FIRST else log.end, {})
        place = self._decode(cursor)
        if not log.accepts(place.origin):
            raise ValueError(f"not a cursor of partition {log.id}")
        return place

    def page(self, log: PartitionLog, place: Place, cut: Cut, visible: Visible | None) -> Page:
        """What a request from a place gets: each time another page of the same events with `vary`."""
        if self.vary or visible is not None or place.ahead or log.internal:
            return picked_page(log, place, cut, visible, self._random if self.vary else None)
        return plain_page(log, place, cut)

    @contextmanager
    def watching(self, partition: int, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` at each change that may have something new for a reader of the partition. Takes the lock itself."""
        with self.lock:
            self._wakeups.setdefault(partition, set()).add(wake)
        try:
            yield
        finally:
            with self.lock:
                watchers = self._wakeups[partition]
                watchers.discard(wake)
                if not watchers:
                    del self._wakeups[partition]

    # Inside

    def _new(
        self,
        id: int,
        *,
        starts_after: int | None = None,
        cursor_from: Iterable[int] = (),
        closed: bool = False,
    ) -> PartitionLog:
        log = self._logs[id] = PartitionLog(
            id, starts_after=starts_after, cursor_from=cursor_from, closed=closed
        )
        return log

    def _free_ids(self, count: int) -> list[int]:
        start = max(self._logs, default=-1) + 1
        return list(range(start, start + count))

    def _check_new(self, ids: tuple[int, ...]) -> None:
        if not ids or len(set(ids)) < len(ids):
            raise ValueError(f"new partitions must be one or more different ids, not {ids}")
        for id in ids:
            if id in self._logs or not 0 <= id <= 32767:
                raise ValueError(
                    f"partition {id} can't be created: the id is in use, or outside 0..32767"
                )

    def _listed(self, partition: int) -> PartitionLog:
        log = self.log_of(partition)
        if log is None:
            raise ValueError(f"partition {partition} is not listed")
        return log

    def _unsplit(self, partition: int) -> PartitionLog:
        log = self._listed(partition)
        if log.heirs:
            raise ValueError(
                f"partition {partition} was split into {log.heirs} already: no topology could say what follows what"
            )
        return log

    def _writable(self, partition: int) -> PartitionLog:
        log = self._listed(partition)
        if log.closed:
            raise ValueError(f"partition {partition} is closed")
        return log

    def _redistribute(
        self, parent: PartitionLog, ids: tuple[int, ...], key: Callable[[Any], object] | None
    ) -> None:
        ancestors = (parent.id, *parent.cursor_from)
        children = [self._new(id, cursor_from=ancestors, closed=parent.closed) for id in ids]
        homes: dict[int, PartitionLog] = {}
        for seq, hash, raw in zip(parent.seqs, parent.hashes, parent.payloads, strict=True):
            own = hash if key is None or raw is None else hash_of(key(orjson.loads(raw)))
            home = homes.get(own)
            if home is None:
                home = homes[own] = children[mix(own, parent.id) % len(children)]
            home.add(seq, hash, raw)
        parent.listed = False

    def _changed(self) -> None:
        self._listed_count = None
        if not self.quirks.keep_token:
            self.token = _new_token()
        self._wake()

    def _describe(self, log: PartitionLog) -> Partition:
        return Partition(
            log.id, log.closed, self.end_cursor(log.id), log.starts_after, log.cursor_from
        )

    def _prepare(self, payload: Payload, entity: object) -> tuple[bytes, int]:
        if isinstance(payload, bytes):
            if b"\n" in payload:
                raise ValueError("a payload is one line of JSON")
            raw = payload
        else:
            raw = orjson.dumps(payload)
        if entity is None:
            entity = self.key(decoded(payload))
        return raw, hash_of(entity)

    def _encode_plain(self, partition: int, seq: int) -> str:
        return (
            AWKWARD_PREFIX + encode(partition, seq)
            if self.quirks.awkward_cursors
            else encode(partition, seq)
        )

    def _decode(self, cursor: str) -> Place:
        place = decode(cursor.removeprefix(AWKWARD_PREFIX))
        if place.base > self._seq or any(seq > self._seq for seq in place.ahead.values()):
            raise ValueError("not a cursor of this feed")
        return place

    def _wake(self, partition: int | None = None) -> None:
        if not self._wakeups:
            return
        watchers = (
            self._wakeups.get(partition, ())
            if partition is not None
            else [one for many in self._wakeups.values() for one in many]
        )
        for wake in tuple(watchers):
            wake()


def _new_token() -> str:
    return secrets.token_urlsafe(9)


def _field_equals(name: str) -> Filter:
    return lambda payload, value: isinstance(payload, Mapping) and str(payload.get(name)) == value
