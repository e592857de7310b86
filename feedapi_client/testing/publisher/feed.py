"""A feed in memory: its events, its topology and its past, and the traffic that it has had."""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import inf
from operator import itemgetter
from random import Random
from threading import RLock
from time import monotonic
from typing import Any, Literal, NamedTuple

import anyio
import orjson

from feedapi_client.model import FIRST, LAST, MAX_PARTITION, DialectName, Partition
from feedapi_client.testing.publisher.messages import Request
from feedapi_client.testing.publisher.rules import FaultRule

EmptyAnswer = Literal["cursor", "echo", "silent", "204"]
SplitMethod = Literal["starts-after", "cursor-from"]
Payload = Mapping[str, Any] | str | bytes
"""The data of an event: a JSON value, or bytes of JSON that are sent verbatim."""
EntityKey = Callable[[Any], object]
"""A function from a decoded payload to the entity that the event belongs to."""
Filter = Callable[[Any, str], bool]
"""A filter of dialect v2-draft: payload and value of the query argument in, whether it fits out."""
Headers = Mapping[str, str]
"""The headers of an event, in dialect v1."""
StoredEvent = tuple[int, int, bytes | None]
"""Sequence number, hash of the entity, and payload of an event; without payload it is internal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """Deviations of real publishers. Assign a new one to `Publisher.quirks` at any time."""

    integer_ids: bool = False
    """Discovery holds partition ids as JSON integers."""
    integer_lineage: bool = False
    """Discovery holds lineage as JSON integers."""
    old_lineage_names: bool = False
    """`startsAfterParent` and `splitFromAncestors`, as in the specification's first example."""
    omit_parent_zero: bool = False
    """`startsAfterPartition` is left out when the parent is partition 0: Go's zero value."""
    omit_starts_after: bool = False
    """`startsAfterPartition` is left out everywhere."""
    last_cursor: Literal["closed", "always", "never"] | None = None
    """Which partitions have `lastCursor`.

    None: the closed ones in dialect v2-draft, none in v2-token.
    """
    awkward_cursors: bool = False
    """Cursors hold characters that need percent-encoding."""
    ignore_event_types: bool = False
    """`event-types` and `skip-event-types` are ignored, which a publisher may do."""
    answers_v1: bool = False
    """A v2 publisher still answers fetches in dialect v1."""
    keep_token: bool = False
    """A change of topology leaves the token as it is; only `rotate_token()` changes it."""
    unknown_partition: int = 404
    """Status for a partition that is not listed."""
    empty_page: EmptyAnswer = "cursor"
    """What answers a request behind which there is nothing.

    ``cursor``: a line with a cursor. ``echo``: a line with the cursor of the request, ``_first``
    and ``_last`` included. ``silent``: no line. ``204``: status 204. A publisher that lists a
    `lastCursor` still answers with it where another cursor was sent.
    """
    swapped_payload_key: bool = False
    """Events are under ``event`` in dialect v2-token, and under ``data`` in v2-draft."""
    pascal_case: bool = False
    """Lines hold ``Data``, ``Event`` and ``Cursor``, as Go's decoder accepts them."""


# Cursors
#
# Every event of a feed has a sequence number, counted over the whole feed. A cursor names the
# partition that it was made for, and the number behind the last event that it stands after. A
# partition that a split or a merge makes keeps the numbers of the events that it inherits, so that
# a cursor of an ancestor means the same point on its successors.

# The factor is odd, hence invertible modulo 2**64. Words look random and decode exactly, and a
# made-up cursor decodes to numbers that are out of range.
_FACTOR = 0x9E3779B97F4A7C15
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_XOR = 0x5EED_FEED_A710_C0DE
_WORD = (1 << 64) - 1
_SEQ_BITS = 48
AWKWARD_PREFIX = 'a%2B+ /?&=#"\\:;,'
"""What `Quirks.awkward_cursors` puts before a cursor: it needs escaping in a URL and in JSON."""


def encode_cursor(partition: int, seq: int, quirks: Quirks, nonce: int | None = None) -> str:
    """Return the cursor after all events of a partition with lower sequence numbers.

    Cursors with different nonces differ and stand for the same position.
    """
    word = ((partition << _SEQ_BITS | seq) ^ _XOR) * _FACTOR & _WORD
    text = f"{word:016x}" if nonce is None else f"{word:016x}{nonce:016x}"
    return AWKWARD_PREFIX + text if quirks.awkward_cursors else text


def decode_cursor(cursor: str) -> tuple[int, int]:
    """Return partition and sequence number. Raises ValueError for what can't be a cursor."""
    text = cursor.removeprefix(AWKWARD_PREFIX)
    if len(text) not in (16, 32) or not text.isascii():
        raise ValueError("not a cursor of this feed")
    word = (int(text[:16], 16) * _INVERSE & _WORD) ^ _XOR
    return word >> _SEQ_BITS, word & ((1 << _SEQ_BITS) - 1)


DIALECTS: tuple[DialectName, ...] = ("v1", "v2-draft", "v2-token")
KEPT_REQUESTS = 20_000
_KEPT_TOPOLOGIES = 100


def _default_key(payload: Any) -> object:
    if not isinstance(payload, Mapping):
        return None
    entity = payload.get("entity")
    return payload.get("id") if entity is None else entity


class Moment(NamedTuple):
    """What a feed is at a time: all that an answer depends on, beside its settings."""

    now: float
    token: str
    closed: dict[int, bool]
    """Of each listed partition, whether it is closed."""
    next_seq: float = inf
    """All events with lower sequence numbers are there."""


class Log:
    """A partition: its lineage, and its events in the order of their sequence numbers."""

    def __init__(self, id: int, starts_after: int | None, cursor_from: Iterable[int]) -> None:
        self.id = id
        self.starts_after = starts_after
        self.cursor_from = tuple(cursor_from)
        self.split_into: tuple[int, ...] = ()
        self.split_before: tuple[int, ...] = ()
        """What it was split into before the split was rolled back."""
        self.seqs: array[int] = array("Q")
        self.hashes: array[int] = array("I")
        self.payloads: list[bytes | None] = []
        self.has_internal = False

    def stop(self, next_seq: float = inf) -> int:
        return bisect_left(self.seqs, next_seq)

    def end(self, next_seq: float = inf) -> int:
        """Return the sequence number after the last event below another one, 0 without events."""
        stop = self.stop(next_seq)
        return self.seqs[stop - 1] + 1 if stop else 0

    def events(self, since: int = 0) -> Iterator[StoredEvent]:
        first = self.stop(since)
        return zip(self.seqs[first:], self.hashes[first:], self.payloads[first:], strict=True)

    def add(self, seq: int, hash: int, payload: bytes | None) -> None:
        self.seqs.append(seq)
        self.hashes.append(hash)
        self.payloads.append(payload)
        self.has_internal |= payload is None


class Feed:
    """What `Publisher` has but for its answers. Its arguments are documented there."""

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
        if not isinstance(filters, Mapping):
            filters = {name: _field_equals(name) for name in filters}
        self.lock = RLock()
        self.clock: Callable[[], float] = monotonic
        self.url: str | None = None
        self.path = "/feed"
        self.page_size = page_size
        self.checkpoint_every = checkpoint_every
        self.vary = vary or seed is not None
        self.random = Random(seed)
        self.stream = stream
        self.exactly_once = exactly_once
        self.filters: Mapping[str, Filter] = filters
        self.key = key or _default_key
        self.quirks = quirks or Quirks()
        self.bearer = bearer
        self.require_query: dict[str, str] = {}
        self.type_field = "type"
        self.event_headers: dict[int, Headers] = {}
        self.counters: Counter[str] = Counter()
        self.in_flight = self.max_in_flight = self.bytes_sent = 0
        self._rules: list[FaultRule] = []
        self._requests: deque[Request] = deque(maxlen=KEPT_REQUESTS)
        self._nonce = 0
        self._times: array[float] = array("d")
        """When the event of each sequence number was appended."""
        self.logs: dict[int, Log] = {}
        roots = range(partitions) if isinstance(partitions, int) else tuple(partitions)
        self._roots = self._new(roots) if roots else ()
        # What a publisher was made with it has always had.
        first = Moment(-inf, self._new_token(), dict.fromkeys(self._roots, False))
        self._topologies = deque([first], maxlen=_KEPT_TOPOLOGIES)
        self.dialect = dialect

    # Events

    def append(
        self,
        partition: int,
        payload: Payload,
        *,
        headers: Headers | None = None,
        entity: object = None,
    ) -> str:
        """Append an event and return the cursor after it.

        Raises ValueError when the partition is not listed or closed.
        """
        return self._append(partition, [self._encoded(payload, entity)], headers)

    def extend(self, partition: int, payloads: Iterable[Payload]) -> str:
        """Append many events and return the cursor after the last one."""
        return self._append(partition, [self._encoded(payload) for payload in payloads])

    def append_internal(self, partition: int, count: int = 1) -> str:
        """Append events that are never shown. They only move the cursor."""
        return self._append(partition, [(0, None)] * count)

    def publish(
        self, entity: object, payload: Payload, *, headers: Headers | None = None
    ) -> tuple[int, str]:
        """Append to the partition where events of the entity go now.

        Returns: the partition, and the cursor after the event.
        """
        with self.lock:
            partition = self.route(entity)
            return partition, self.append(partition, payload, headers=headers, entity=entity)

    def route(self, entity: object) -> int:
        """Return the partition where events of the entity go now."""
        if not self._roots:
            raise ValueError("route: the publisher was made without partitions")
        hash = _hash(entity)
        with self.lock:
            id = _choose(hash, self._roots, salt=-1)
            while children := self.logs[id].split_into:
                id = _choose(hash, children, salt=id)
            return id

    def payloads(self, partition: int | None = None) -> list[Any]:
        """Return the decoded payloads of a partition, or of the feed in the order of publication.

        Internal events have none.
        """
        with self.lock:
            logs = self.logs.values() if partition is None else [self.logs[partition]]
            # A cursor-from split leaves an event in the successors and in the removed ancestor.
            stored = {seq: raw for log in logs for seq, _, raw in log.events() if raw is not None}
        return [orjson.loads(stored[seq]) for seq in sorted(stored)]

    def end_cursor(self, partition: int) -> str:
        """Return the cursor after the last event of the partition."""
        return self.cursor(partition, self.logs[partition].end())

    def another_cursor(self, partition: int, cursor: str) -> str:
        """Return a cursor that differs from `cursor` and stands for the same position."""
        with self.lock:
            seq = {FIRST: 0, LAST: self.logs[partition].end()}.get(cursor)
            seq = decode_cursor(cursor)[1] if seq is None else seq
            self._nonce += 1
            return encode_cursor(partition, seq, self.quirks, self._nonce)

    # Topology

    @property
    def token(self) -> str:
        """The token in discovery, in dialect v2-token."""
        return self._topologies[-1].token

    @token.setter
    def token(self, token: str) -> None:
        self._changed(self._topologies[-1].closed, token)

    def rotate_token(self) -> str:
        """Make all tokens given out so far stale (dialect v2-token), and return the new one."""
        with self.lock:
            self.token = self._new_token()
            return self.token

    @property
    def dialect(self) -> DialectName:
        """The dialect spoken. Assign another one at any time; cursors carry over."""
        return self._dialect

    @dialect.setter
    def dialect(self, dialect: DialectName) -> None:
        listed = list(self._topologies[-1].closed)
        if dialect not in DIALECTS:
            raise ValueError(f"dialect must be one of {', '.join(DIALECTS)}, not {dialect!r}")
        if dialect == "v1" and sorted(listed) != list(range(len(listed))):
            raise ValueError(f"dialect v1 has partitions 0..n-1, this feed has {listed}")
        self._dialect: DialectName = dialect

    def upgrade(self, dialect: DialectName) -> None:
        """Continue in another dialect."""
        self.dialect = dialect

    @property
    def partitions(self) -> dict[int, Partition]:
        """The listed partitions."""
        with self.lock:
            found = {}
            for id, closed in self._topologies[-1].closed.items():
                log, end = self.logs[id], self.end_cursor(id)
                found[id] = Partition(id, closed, end, log.starts_after, log.cursor_from)
            return found

    def open_partitions(self) -> list[int]:
        """Return the listed partitions that take events."""
        return [id for id, partition in self.partitions.items() if not partition.closed]

    def close(self, partition: int) -> None:
        """Take no more events for the partition."""
        with self._change() as closed:
            closed[self._listed(partition).id] = True

    def reopen(self, partition: int) -> None:
        """Take events again, which no correct publisher does."""
        with self._change() as closed:
            closed[self._listed(partition).id] = False

    def split(
        self, partition: int, into: int | Iterable[int] = 2, *, method: SplitMethod = "starts-after"
    ) -> tuple[int, ...]:
        """Split a partition into so many new ones, or into these ids; return the ids.

        ``starts-after`` closes the partition and opens children for the events to come.
        ``cursor-from`` replaces it by successors that share its whole history by the hash of the
        entity.

        Raises: ValueError for ids in use, for a partition that was split before, and in dialect v1.
        """
        with self._change() as closed:
            if self._dialect == "v1":
                raise ValueError("dialect v1 has no splits: upgrade first")
            parent = self._unsplit(partition)
            if method == "starts-after":
                ids = self._new(into, starts_after=partition)
                closed |= {partition: True, **dict.fromkeys(ids, False)}
                parent.split_into = ids
                return ids
            if method == "cursor-from":
                return self._replace(closed, [parent], into)
            raise ValueError(f"method must be starts-after or cursor-from, not {method!r}")

    def merge(self, partitions: Iterable[int], into: int | None = None) -> int:
        """Replace partitions by one that holds the history of all of them; return its id."""
        with self._change() as closed:
            parents = [self._unsplit(id) for id in partitions]
            return self._replace(closed, parents, 1 if into is None else (into,))[0]

    def add(
        self,
        partition: int | None = None,
        *,
        starts_after: int | None = None,
        cursor_from: Iterable[int] = (),
        closed: bool = False,
    ) -> int:
        """List a partition with any lineage, legal or not; return its id.

        A partition that was removed comes back with its events.
        """
        with self._change() as listed:
            if partition in listed:
                raise ValueError(f"partition {partition} is listed already")
            if partition is None or partition not in self.logs:
                (partition,) = self._new(1 if partition is None else (partition,))
            log = self.logs[partition]
            log.starts_after, log.cursor_from = starts_after, tuple(cursor_from)
            listed[partition] = closed
            return partition

    def remove(self, partition: int) -> None:
        """Stop listing the partition. `add` lists it again."""
        with self._change() as closed:
            del closed[self._listed(partition).id]

    def roll_back(self, partition: int) -> None:
        """Undo a split by cursor transfer, as a publisher does that goes back to an old version.

        The partition is listed again under its old id, open, with all events that its successors
        got meanwhile. They are not listed any more. Cursors of theirs are valid in it.

        Raises: ValueError unless it was split that way, and its successors are listed and unsplit.
        """
        with self._change() as closed:
            parent = self.logs.get(partition)
            if parent is None or partition in closed or not parent.split_into:
                raise ValueError(f"partition {partition} was not split by cursor transfer")
            successors = [self._unsplit(id) for id in parent.split_into]
            if sum(log.split_into == parent.split_into for log in self.logs.values()) > 1:
                raise ValueError(f"partition {partition} was merged with others")
            self._inherit((partition,), successors)
            parent.split_before, parent.split_into = parent.split_into, ()
            for successor in successors:
                del closed[successor.id]
            closed[partition] = False

    def roll_forward(self, partition: int) -> tuple[int, ...]:
        """Make a split again that `roll_back` has undone; return the successors.

        They have the events that the partition got meanwhile.
        """
        with self._change() as closed:
            parent = self._unsplit(partition)
            ids = parent.split_before
            if not ids:
                raise ValueError(f"no split of partition {partition} was rolled back")
            self._inherit(ids, [parent])
            parent.split_into, parent.split_before = ids, ()
            del closed[partition]
            closed |= dict.fromkeys(ids, False)
            return ids

    # Faults and traffic

    def heal(self) -> None:
        """Remove all faults."""
        with self.lock:
            self._rules.clear()

    @property
    def faults(self) -> list[FaultRule]:
        """The faults that may still apply."""
        with self.lock:
            return [rule for rule in self._rules if rule.is_live(self.clock())]

    @property
    def requests(self) -> list[Request]:
        """The requests so far, oldest first (the last 20,000)."""
        with self.lock:
            return list(self._requests)

    def clear_requests(self) -> None:
        """Forget the requests and counters."""
        with self.lock:
            self._requests.clear()
            self.counters.clear()
            self.max_in_flight, self.bytes_sent = self.in_flight, 0

    async def wait(self, predicate: Callable[[], object], timeout: float = 10.0) -> None:
        """Wait until `predicate()` is true. Raises TimeoutError after `timeout` seconds."""
        with anyio.fail_after(timeout):
            while not predicate():  # noqa: ASYNC110 - any predicate, over state of any thread
                await anyio.sleep(0.002)

    def arrived(self, request: Request) -> FaultRule | None:
        """Record a request. Return the fault that applies to it."""
        self._requests.append(request)
        self.counters[request.kind] += 1
        rule = next((rule for rule in self._rules if rule.applies_to(request)), None)
        self._rules = self.faults
        return rule

    def count_in_flight(self, change: int) -> None:
        """Record that a response begins (1) or ends (-1)."""
        with self.lock:
            self.in_flight += change
            self.max_in_flight = max(self.max_in_flight, self.in_flight)

    def __repr__(self) -> str:
        states = ", ".join(
            f"{id}{' closed' if listed.closed else ''}: {len(self.logs[id].seqs)} events"
            for id, listed in self.partitions.items()
        )
        return f"<Publisher {self.dialect} {self.url or 'not served'} [{states}]>"

    # What answers and faults ask. The caller holds the lock, also of all below.

    def at(self, now: float) -> Moment:
        """Return what the feed was at a time."""
        since = (each for each in reversed(self._topologies) if each.now <= now)
        topology = next(since, self._topologies[0])
        return topology._replace(now=now, next_seq=bisect_right(self._times, now))

    def cursor(self, partition: int, seq: int) -> str:
        """Return the cursor after all events of a partition with lower sequence numbers."""
        return encode_cursor(partition, seq, self.quirks)

    def _encoded(self, payload: Payload, entity: object = None) -> tuple[int, bytes]:
        raw = payload if isinstance(payload, bytes) else orjson.dumps(payload)
        if b"\n" in raw:
            raise ValueError("a payload is one line of JSON")
        if entity is None:
            entity = self.key(orjson.loads(raw) if payload is raw else payload)
        return _hash(entity), raw

    def _append(
        self,
        partition: int,
        events: Sequence[tuple[int, bytes | None]],
        headers: Headers | None = None,
    ) -> str:
        with self.lock:
            log = self._listed(partition)
            if self._topologies[-1].closed[partition]:
                raise ValueError(f"partition {partition} is closed")
            first = len(self._times)
            if headers:
                self.event_headers[first] = headers
            self._times.extend(array("d", [self.clock()]) * len(events))
            for seq, (hash, payload) in enumerate(events, first):
                log.add(seq, hash, payload)
            return self.end_cursor(partition)

    @contextmanager
    def _change(self) -> Iterator[dict[int, bool]]:
        """Change which partitions are listed and closed, and the token with them."""
        with self.lock:
            closed = dict(self._topologies[-1].closed)
            yield closed
            self._changed(closed, self.token if self.quirks.keep_token else self._new_token())

    def _new_token(self) -> str:
        return f"{self.random.getrandbits(64):016x}"

    def _changed(self, closed: dict[int, bool], token: str) -> None:
        self._topologies.append(Moment(self.clock(), token, closed))

    def _new(
        self,
        wanted: int | Iterable[int],
        *,
        starts_after: int | None = None,
        cursor_from: Iterable[int] = (),
    ) -> tuple[int, ...]:
        free = max(self.logs, default=-1) + 1
        ids = tuple(range(free, free + wanted) if isinstance(wanted, int) else wanted)
        if not ids or len(set(ids)) < len(ids):
            raise ValueError(f"new partitions must be one or more different ids, not {ids}")
        for id in ids:
            if id in self.logs or not 0 <= id <= MAX_PARTITION:
                raise ValueError(f"partition {id}: in use already, or outside 0..{MAX_PARTITION}")
        self.logs |= {id: Log(id, starts_after, cursor_from) for id in ids}
        return ids

    def _listed(self, partition: int) -> Log:
        if partition not in self._topologies[-1].closed:
            raise ValueError(f"partition {partition} is not listed")
        return self.logs[partition]

    def _unsplit(self, partition: int) -> Log:
        log = self._listed(partition)
        if log.split_into:
            raise ValueError(f"partition {partition} was split into {log.split_into} already")
        return log

    def _replace(
        self, closed: dict[int, bool], parents: Sequence[Log], into: int | Iterable[int]
    ) -> tuple[int, ...]:
        """Replace partitions by new ones that hold their history, and return the ids of these."""
        ancestors = chain([p.id for p in parents], *(p.cursor_from for p in parents))
        ids = self._new(into, cursor_from=dict.fromkeys(ancestors))
        self._inherit(ids, parents)
        closed |= dict.fromkeys(ids, all(closed[parent.id] for parent in parents))
        for parent in parents:
            parent.split_into = ids
            del closed[parent.id]
        return ids

    def _inherit(self, ids: tuple[int, ...], ancestors: Sequence[Log]) -> None:
        """Divide events of the ancestors by entity among partitions that don't have them yet."""
        known = max(self.logs[id].end() for id in ids)
        for event in sorted(chain(*(log.events(known) for log in ancestors)), key=itemgetter(0)):
            self.logs[_choose(event[1], ids, salt=ancestors[0].id)].add(*event)


def _field_equals(name: str) -> Filter:
    return lambda payload, value: isinstance(payload, Mapping) and str(payload.get(name)) == value


def _hash(entity: object) -> int:
    # crc32 is the same in every process, unlike hash(), and cheap.
    return zlib.crc32(str(entity).encode())


def _choose(hash: int, partitions: tuple[int, ...], *, salt: int) -> int:
    """Return which of the partitions an entity goes to, by its hash.

    A different `salt` spreads the same hashes differently, so that nested splits of one partition
    are independent. The mixing is the finaliser of murmur3.
    """
    mixed = (hash ^ (salt * 0x9E3779B1)) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return partitions[(mixed ^ (mixed >> 16)) % len(partitions)]
