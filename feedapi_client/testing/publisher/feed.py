"""A feed in memory: its settings, events, cursors and pages, without anything that serves it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from random import Random
from time import monotonic
from typing import Any

import orjson

from feedapi_client.model import FIRST, LAST, DialectName
from feedapi_client.testing.publisher.log_position import LogPosition, decode, encode
from feedapi_client.testing.publisher.pages import (
    EventFilter,
    LogPage,
    PageLimits,
    ordered_page,
    varied_page,
)
from feedapi_client.testing.publisher.partition_log import PartitionLog
from feedapi_client.testing.publisher.quirks import Quirks
from feedapi_client.testing.publisher.routing import (
    EntityKey,
    Payload,
    decoded,
    default_key,
    hash_of,
)
from feedapi_client.testing.publisher.topology import Topology
from feedapi_client.testing.publisher.wire_format import discovery

_MOMENT_SECONDS = 0.01
_KEPT_MOMENTS = 100_000

Filter = Callable[[Any, str], bool]
"""A filter of dialect v2-draft: payload and value of the query argument in, whether it fits out."""


class Feed(Topology):
    """The feed that a `Publisher` serves. See `Publisher` for its arguments."""

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
        key: EntityKey | None = None,
        quirks: Quirks | None = None,
        bearer: str | None = None,
    ) -> None:
        if page_size < 1 or checkpoint_every < 1:
            raise ValueError("page_size and checkpoint_every must be at least 1")
        super().__init__(partitions, dialect=dialect, quirks=quirks or Quirks())
        if not isinstance(filters, Mapping):
            filters = {name: _field_equals(name) for name in filters}
        self.path = "/feed"
        self.page_size = page_size
        self.checkpoint_every = checkpoint_every
        self.scan_limit = 1000
        self.vary = vary or seed is not None
        self.stream = stream
        self.exactly_once = exactly_once
        self.filters: Mapping[str, Filter] = filters
        self.key = key or default_key
        self.bearer = bearer
        self.require_query: dict[str, str] = {}
        self.type_field = "type"
        self.event_headers: dict[int, Mapping[str, str]] = {}
        self._next_seq = 0
        self._moments: deque[tuple[float, int]] = deque(maxlen=_KEPT_MOMENTS)
        """What the next sequence number was when: for `replica`."""
        self._moment_began = float("-inf")
        self._random = Random(seed)
        self._nonce = 0

    def append(
        self,
        partition: int,
        payload: Payload,
        *,
        headers: Mapping[str, str] | None = None,
        entity: object = None,
    ) -> str:
        """Append an event and return the cursor after it.

        Raises ValueError when the partition is not listed or closed.
        """
        raw, hash = self._prepare(payload, entity)
        with self.lock:
            log = self._writable(partition)
            if headers:
                self.event_headers[self._next_seq] = headers
            log.add(self._next_seq, hash, raw)
            self._advance(1)
            self.changes.notify(partition)
            return self._cursor_at(partition, self._next_seq)

    def extend(self, partition: int, payloads: Iterable[Payload]) -> str:
        """Append many events and return the cursor after the last one."""
        prepared = [self._prepare(payload, None) for payload in payloads]
        with self.lock:
            log = self._writable(partition)
            log.seqs.extend(range(self._next_seq, self._next_seq + len(prepared)))
            log.hashes.extend([hash for _, hash in prepared])
            log.payloads.extend([raw for raw, _ in prepared])
            self._advance(len(prepared))
            self.changes.notify(partition)
            return self.end_cursor(partition)

    def append_internal(self, partition: int, count: int = 1) -> str:
        """Append events that are never shown. They only move the cursor."""
        with self.lock:
            log = self._writable(partition)
            for _ in range(count):
                log.add(self._next_seq, 0, None)
                self._advance(1)
            self.changes.notify(partition)
            return self.end_cursor(partition)

    def publish(
        self, entity: object, payload: Payload, *, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Append to the partition where events of the entity go now.

        Returns: the partition, and the cursor after the event.
        """
        with self.lock:
            partition = self.route(entity, payload)
            return partition, self.append(partition, payload, headers=headers, entity=entity)

    def payloads(self, partition: int | None = None) -> list[Any]:
        """Return the decoded payloads of a partition, or of the feed in the order of publication.

        Internal events have none.
        """
        with self.lock:
            if partition is not None:
                stored = self._logs[partition].payloads
                return [orjson.loads(raw) for raw in stored if raw is not None]
            # A cursor-from split leaves an event in the successors and in the removed ancestor.
            by_seq = {
                seq: raw
                for log in self._logs.values()
                for seq, raw in zip(log.seqs, log.payloads, strict=True)
                if raw is not None
            }
        return [orjson.loads(by_seq[seq]) for seq in sorted(by_seq)]

    def discovery(self) -> dict[str, Any]:
        """Return the discovery object as it is sent in the present dialect."""
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

    # For request handling; the caller holds the lock

    def replica(self, behind: float) -> Feed:
        """Return a copy of the feed as it was some seconds ago, to answer one request.

        A replica that lags has fewer events and an older topology, with its token. What it was
        made with it always has.
        """
        time = max(monotonic() - behind, self._began)
        replica = copy(self)
        earlier = (seq for at, seq in reversed(self._moments) if at <= time)
        replica._next_seq = next(earlier, 0)
        replica._logs = {id: log.as_of(time, replica._next_seq) for id, log in self._logs.items()}
        replica._listed_count = None
        replica._token = self._token_at(time)
        return replica

    def is_ahead(self, cursor: str) -> bool:
        """Return whether a cursor stands behind an event that the feed doesn't have.

        Raises ValueError for text that is no cursor.
        """
        position = decode(cursor)
        return max(position.base, *position.ahead.values(), 0) > self._next_seq

    def encode(self, position: LogPosition) -> str:
        """Return the cursor of a position."""
        return encode(position, awkward=self.quirks.awkward_cursors)

    def another_cursor(self, partition: int, cursor: str) -> str:
        """Return a cursor that differs from `cursor` and stands for the same position."""
        self._nonce += 1
        position = self.position_of(self._logs[partition], cursor)
        return encode(position, nonce=self._nonce, awkward=self.quirks.awkward_cursors)

    def position_of(self, log: PartitionLog, cursor: str) -> LogPosition:
        """Return what a cursor, ``_first`` and ``_last`` included, means in a partition.

        Raises ValueError for a cursor that isn't valid there.
        """
        if cursor in (FIRST, LAST):
            return LogPosition(log.id, 0 if cursor == FIRST else log.end, {})
        position = decode(cursor)
        if self.is_ahead(cursor):
            raise ValueError("not a cursor of this feed")
        if not log.accepts_cursors_of(position.partition):
            raise ValueError(f"not a cursor of partition {log.id}")
        return position

    def page(
        self, log: PartitionLog, start: LogPosition, limits: PageLimits, wanted: EventFilter | None
    ) -> LogPage:
        """Return what a request from a position gets.

        With `vary` each call divides the same events into other pages.
        """
        if self.vary or wanted is not None or start.ahead or log.internal_events:
            random = self._random if self.vary else None
            return varied_page(log, start, limits, wanted=wanted, random=random)
        return ordered_page(log, start, limits)

    # Internal

    def _advance(self, count: int) -> None:
        self._next_seq += count
        now = monotonic()
        if now - self._moment_began < _MOMENT_SECONDS:
            self._moments[-1] = now, self._next_seq
            return
        self._moment_began = now
        self._moments.append((now, self._next_seq))

    def _writable(self, partition: int) -> PartitionLog:
        log = self._listed(partition)
        if log.closed:
            raise ValueError(f"partition {partition} is closed")
        return log

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


def _field_equals(name: str) -> Filter:
    return lambda payload, value: isinstance(payload, Mapping) and str(payload.get(name)) == value
