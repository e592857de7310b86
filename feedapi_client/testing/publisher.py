"""An in-memory FeedAPI publisher: what consumers are tested and demonstrated against.

::

    from feedapi_client.testing import Publisher

    publisher = Publisher(partitions=2, dialect="v2-token", page_size=100, checkpoint_every=10)
    publisher.append(0, {"entity": "a", "n": 1})        # -> the cursor behind it
    with publisher.serve() as url:                       # or: async with, on asyncio and trio
        ...                                              # http://127.0.0.1:PORT/feed
        publisher.split(0, into=(2, 3), method="starts-after")
        publisher.publish("a", {"entity": "a", "n": 2})  # goes to the partition where entity a lives now
        publisher.fail(503, times=2)                     # see feedapi_client.testing.faults

API::

    Publisher(partitions: int | Iterable[int] = 1, *, dialect="v2-token", page_size=1000, checkpoint_every=100, vary=False, seed=None,
              stream=False, exactly_once=True, filters: Iterable[str] | Mapping[str, (payload, value) -> bool] = (), key=None, quirks=Quirks(), bearer=None)

    Events
      append(partition, payload, *, headers=None, entity=None) -> str     payload: dict, str, or bytes (JSON, sent verbatim); returns the cursor behind it
      extend(partition, payloads) -> str                                  many at once, fast
      append_internal(partition, count=1) -> str                          never shown: they only move the cursor
      publish(entity, payload, *, headers=None) -> tuple[int, str]        append to where the entity lives now -> (partition, cursor)
      route(entity, payload=None) -> int                                  that partition
      payloads(partition=None) -> list                                    what was published, decoded: a partition's, or all of the feed in order
      end_cursor(partition) -> str                                        the cursor behind the last event; what `_last` and lastCursor mean
    Topology (each changes the token, unless Quirks.keep_token)
      close(partition); reopen(partition)
      split(partition, into=2 | ids, *, method="starts-after" | "cursor-from", key=None) -> tuple[int, ...]
      merge(partitions, into=None) -> int
      add(partition=None, *, starts_after=None, cursor_from=(), closed=False) -> int     any topology, illegal ones too
      remove(partition)                                                   no longer listed; add(partition) lists it again with its events
      rotate_token() -> str
      upgrade(dialect)                                                    same as assigning `dialect`; cursors carry over
      partitions -> dict[int, Partition]; open_partitions() -> list[int]; discovery() -> dict; token -> str
    Settings that may be assigned at any time: dialect, page_size, checkpoint_every, scan_limit, vary, stream, exactly_once, filters, key, quirks,
      bearer (requests without that bearer token 401, with another 403), require_query ({name: value}, else 403), type_field ("type")
    Faults: fail(fault, *, on="fetch" | "discovery" | "any", partition=None, times=1 | None, after=0) -> FaultRule; heal(); faults -> list[FaultRule]
    Watching: requests -> list[Request] (kind, partition, cursor, token, query, headers, path, time, status); clear_requests()
      counters ("discovery", "fetch", "fetch 409" ...); in_flight, max_in_flight (responses under way); bytes_sent (of bodies)
      await wait(predicate, timeout=10.0)                                 until predicate() is true; asyncio and trio
    Serving: serve(host="127.0.0.1", port=0) -> Serving (async and plain context manager giving the URL); serving = serve; url; asgi (the ASGI app)

Faults (module `feedapi_client.testing.faults`; an int is `Status`): Status(code, body, headers), Redirect(location, code), Html(), Replace(json or bytes),
Edit(change the discovery), Rewrite(bytes -> bytes), Reset(after_bytes, after_lines), Truncate(after_bytes, after_lines, chunked), BrokenChunk(),
CutLine(after_lines, text), ErrorText(after_lines), NoFinalNewline(), NoCheckpoint(keep), SameCheckpoint(), EmptyPage(moving), EndlessLine(), EndlessRun(),
UnknownCommands(commands), ExtraFields(), Delay(seconds), Hang(after_bytes, after_lines), Trickle(piece, interval), Gzip(), Both((fault, fault, ...)),
or a function of your own.

A cursor-from split redistributes the whole history. When it hits a partition that itself starts after another one, discovery can't say both (the
specification allows one mechanism), so a consumer that has not read the older partition yet loses the order between the two. Avoid it where order is what
is tested.

All methods may be called from any thread, and from the event loop that serves the publisher; none of them blocks on I/O.
"""

from __future__ import annotations

import heapq
import secrets
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import anyio
import orjson

from feedapi_client.model import FIRST, LAST, DialectName, Partition
from feedapi_client.testing.cursors import AWKWARD_PREFIX, Place, decode, encode
from feedapi_client.testing.exchange import Request
from feedapi_client.testing.faults import Fault, FaultRule, FaultTarget, as_fault
from feedapi_client.testing.log import Cut, Page, PartitionLog, Visible, picked_page, plain_page
from feedapi_client.testing.wire import Quirks, discovery

if TYPE_CHECKING:
    from feedapi_client.testing.asgi import FeedApp
    from feedapi_client.testing.server import Serving

Payload = Mapping[str, Any] | str | bytes
Filter = Callable[[Any, str], bool]
SplitMethod = Literal["starts-after", "cursor-from"]

DIALECTS: tuple[DialectName, ...] = ("v1", "v2-draft", "v2-token")
KEPT_REQUESTS = 20_000


class Publisher:
    """A feed in memory, in any of the three dialects. See the module's page for the whole interface.

    `vary` makes two requests from one cursor differ (page size, checkpoints, interleaving of entities; the order within an entity is kept); `seed` makes
    that reproducible and implies it. `key` finds the entity of a payload; by default the field ``entity``, else ``id``; payloads without either all count
    as one entity.
    """

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
        self._lock = threading.RLock()
        self._logs: dict[int, PartitionLog] = {}
        self._seq = 0
        self._headers: dict[int, Mapping[str, str]] = {}
        self._wakeups: dict[int, set[Callable[[], None]]] = {}
        self._rules: list[FaultRule] = []
        self._requests: deque[Request] = deque(maxlen=KEPT_REQUESTS)
        self._random = Random(seed)
        self._nonce = 0
        self._asgi: FeedApp | None = None
        self.path = "/feed"
        self.url: str | None = None
        self.token = _new_token()
        self.page_size = page_size
        self.checkpoint_every = checkpoint_every
        self.scan_limit = 1000
        self.vary = vary or seed is not None
        self.stream = stream
        self.exactly_once = exactly_once
        self.filters: Mapping[str, Filter] = filters if isinstance(filters, Mapping) else {name: _field_equals(name) for name in filters}
        self.key = key or default_key
        self.quirks = quirks or Quirks()
        self.bearer = bearer
        self.require_query: dict[str, str] = {}
        self.type_field = "type"
        self.counters: Counter[str] = Counter()
        self.in_flight = 0
        self.max_in_flight = 0
        self.bytes_sent = 0
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
        with self._lock:
            listed = [log.id for log in self._logs.values() if log.listed]
            if dialect == "v1" and listed != list(range(len(listed))):
                raise ValueError(f"dialect v1 has partitions 0..n-1, this feed has {listed}")
            self._dialect = dialect
            self._wake()

    def upgrade(self, dialect: DialectName) -> None:
        """Go on in another dialect."""
        self.dialect = dialect

    # Events

    def append(self, partition: int, payload: Payload, *, headers: Mapping[str, str] | None = None, entity: object = None) -> str:
        """Append an event and return the cursor behind it. Raises ValueError when the partition is not listed or closed."""
        raw, hash = self._prepare(payload, entity)
        with self._lock:
            log = self._writable(partition)
            if headers:
                self._headers[self._seq] = headers
            log.add(self._seq, hash, raw)
            end = self._seq = self._seq + 1
            if self._wakeups:
                self._wake(partition)
        return self._encode_plain(partition, end)

    def extend(self, partition: int, payloads: Iterable[Payload]) -> str:
        """Append many events and return the cursor behind the last one."""
        prepared = [self._prepare(payload, None) for payload in payloads]
        with self._lock:
            log = self._writable(partition)
            log.seqs.extend(range(self._seq, self._seq + len(prepared)))
            log.hashes.extend([hash for _, hash in prepared])
            log.payloads.extend([raw for raw, _ in prepared])
            self._seq += len(prepared)
            self._wake(partition)
            return self.end_cursor(partition)

    def append_internal(self, partition: int, count: int = 1) -> str:
        """Append events that the publisher keeps to itself: they only move the cursor."""
        with self._lock:
            log = self._writable(partition)
            for _ in range(count):
                log.add(self._seq, 0, None)
                self._seq += 1
            self._wake(partition)
            return self.end_cursor(partition)

    def publish(self, entity: object, payload: Payload, *, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Append to the partition where the entity lives now; returns the partition and the cursor behind the event."""
        with self._lock:
            partition = self.route(entity, payload)
            return partition, self.append(partition, payload, headers=headers, entity=entity)

    def route(self, entity: object, payload: Payload | None = None) -> int:
        """The partition where events of the entity go now. `payload` is needed only after a split with a key of its own."""
        hash = _hash(entity)
        with self._lock:
            if not self._roots:
                raise ValueError("route: the publisher was made without partitions")
            log = self._logs[self._roots[_mix(hash, -1) % len(self._roots)]]
            while log.heirs:
                own = hash if log.heir_key is None or payload is None else _hash(log.heir_key(_decoded(payload)))
                log = self._logs[log.heirs[_mix(own, log.id) % len(log.heirs)]]
            return log.id

    def payloads(self, partition: int | None = None) -> list[Any]:
        """The decoded payloads of a partition, or of the whole feed in the order of publication."""
        with self._lock:
            if partition is not None:
                return [orjson.loads(raw) for raw in self._logs[partition].payloads if raw is not None]
            # A cursor-from split leaves the same event in the heirs and in the removed ancestor.
            every = {seq: raw for log in self._logs.values() for seq, raw in zip(log.seqs, log.payloads, strict=True) if raw is not None}
        return [orjson.loads(every[seq]) for seq in sorted(every)]

    def end_cursor(self, partition: int) -> str:
        """The cursor behind the last event of the partition."""
        with self._lock:
            return self._encode_plain(partition, self._logs[partition].end)

    # Topology

    @property
    def partitions(self) -> dict[int, Partition]:
        """The listed partitions."""
        with self._lock:
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
        with self._lock:
            self._listed(partition).closed = True
            self._changed()

    def reopen(self, partition: int) -> None:
        """Take events again (which no honest publisher does)."""
        with self._lock:
            self._listed(partition).closed = False
            self._changed()

    def split(
        self, partition: int, into: int | Iterable[int] = 2, *, method: SplitMethod = "starts-after", key: Callable[[Any], object] | None = None
    ) -> tuple[int, ...]:
        """Split a partition into new ones and return their ids.

        ``starts-after`` closes the partition and opens children for the events to come. ``cursor-from`` replaces it by children that share its whole
        history by the hash of the entity; `key` finds the entity for this split. Raises ValueError for ids in use, for a partition that has been
        split before, and in dialect v1.
        """
        with self._lock:
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
        with self._lock:
            parents = [self._unsplit(id) for id in partitions]
            (id,) = self._free_ids(1) if into is None else (into,)
            self._check_new((id,))
            ancestors = [parent.id for parent in parents] + [one for parent in parents for one in parent.cursor_from]
            child = self._new(id, cursor_from=dict.fromkeys(ancestors), closed=all(parent.closed for parent in parents))
            for entry in heapq.merge(*(zip(parent.seqs, parent.hashes, parent.payloads, strict=True) for parent in parents), key=lambda entry: entry[0]):
                child.add(*entry)
            for parent in parents:
                parent.listed, parent.heirs, parent.heir_key = False, (id,), None
            self._changed()
            return id

    def add(self, partition: int | None = None, *, starts_after: int | None = None, cursor_from: Iterable[int] = (), closed: bool = False) -> int:
        """List a partition with any lineage, legal or not; one that was removed comes back with its events."""
        with self._lock:
            (id,) = self._free_ids(1) if partition is None else (partition,)
            known = self._logs.get(id)
            if known is None:
                self._new(id, starts_after=starts_after, cursor_from=cursor_from, closed=closed)
            elif known.listed:
                raise ValueError(f"partition {id} is listed already")
            else:
                known.listed, known.closed, known.starts_after, known.cursor_from = True, closed, starts_after, tuple(cursor_from)
            self._changed()
            return id

    def remove(self, partition: int) -> None:
        """List the partition no longer."""
        with self._lock:
            self._listed(partition).listed = False
            self._changed()

    def rotate_token(self) -> str:
        """Make every token out there stale (dialect v2-token) and return the new one."""
        with self._lock:
            self.token = _new_token()
            self._wake()
            return self.token

    # Faults and watching

    def fail(self, fault: int | Fault, *, on: FaultTarget = "fetch", partition: int | None = None, times: int | None = 1, after: int = 0) -> FaultRule:
        """Let requests fail: `times` of them (None: all from now on), the first `after` matching ones spared. An int is an error status."""
        rule = FaultRule(as_fault(fault), on=on, partition=partition, times=times, after=after)
        with self._lock:
            self._rules.append(rule)
        return rule

    def heal(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._rules.clear()

    @property
    def faults(self) -> list[FaultRule]:
        """The faults that are still to strike."""
        with self._lock:
            return [rule for rule in self._rules if rule.live]

    @property
    def requests(self) -> list[Request]:
        """The requests so far, oldest first (the last 20,000)."""
        with self._lock:
            return list(self._requests)

    def clear_requests(self) -> None:
        """Forget the requests and counters."""
        with self._lock:
            self._requests.clear()
            self.counters.clear()
            self.max_in_flight, self.bytes_sent = self.in_flight, 0

    async def wait(self, predicate: Callable[[], object], timeout: float = 10.0) -> None:
        """Wait until `predicate()` is true. Raises TimeoutError after `timeout` seconds."""
        with anyio.fail_after(timeout):
            while not predicate():  # noqa: ASYNC110 - any predicate, over state of any thread
                await anyio.sleep(0.002)

    # Serving

    @property
    def asgi(self) -> FeedApp:
        """The feed as an ASGI application, at path ``/feed``."""
        if self._asgi is None:
            from feedapi_client.testing.asgi import FeedApp

            self._asgi = FeedApp(self)
        return self._asgi

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one ASGI request: the publisher is the application `asgi` itself."""
        await self.asgi(scope, receive, send)

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> Serving:
        """Serve on a port: ``with publisher.serve() as url`` or ``async with publisher.serve() as url``, on asyncio and trio.

        The server runs in a thread of its own and is gone, with all its connections, when the block ends. Needs the extra ``testing``.
        """
        from feedapi_client.testing.server import Serving

        return Serving(self, host, port)

    serving = serve

    def __repr__(self) -> str:
        with self._lock:
            states = ", ".join(f"{log.id}{' closed' if log.closed else ''}: {len(log.seqs)} events" for log in self._logs.values() if log.listed)
        return f"<Publisher {self.dialect} {self.url or 'not served'} [{states}]>"

    # Inside

    def _new(self, id: int, *, starts_after: int | None = None, cursor_from: Iterable[int] = (), closed: bool = False) -> PartitionLog:
        log = self._logs[id] = PartitionLog(id, starts_after=starts_after, cursor_from=cursor_from, closed=closed)
        return log

    def _free_ids(self, count: int) -> list[int]:
        start = max(self._logs, default=-1) + 1
        return list(range(start, start + count))

    def _check_new(self, ids: tuple[int, ...]) -> None:
        if not ids or len(set(ids)) < len(ids):
            raise ValueError(f"new partitions must be one or more different ids, not {ids}")
        for id in ids:
            if id in self._logs or not 0 <= id <= 32767:
                raise ValueError(f"partition {id} can't be created: the id is in use, or outside 0..32767")

    def _listed(self, partition: int) -> PartitionLog:
        log = self._logs.get(partition)
        if log is None or not log.listed:
            raise ValueError(f"partition {partition} is not listed")
        return log

    def _unsplit(self, partition: int) -> PartitionLog:
        log = self._listed(partition)
        if log.heirs:
            raise ValueError(f"partition {partition} was split into {log.heirs} already: no topology could say what follows what")
        return log

    def _writable(self, partition: int) -> PartitionLog:
        log = self._listed(partition)
        if log.closed:
            raise ValueError(f"partition {partition} is closed")
        return log

    def _redistribute(self, parent: PartitionLog, ids: tuple[int, ...], key: Callable[[Any], object] | None) -> None:
        ancestors = (parent.id, *parent.cursor_from)
        children = [self._new(id, cursor_from=ancestors, closed=parent.closed) for id in ids]
        homes: dict[int, PartitionLog] = {}
        for seq, hash, raw in zip(parent.seqs, parent.hashes, parent.payloads, strict=True):
            own = hash if key is None or raw is None else _hash(key(orjson.loads(raw)))
            home = homes.get(own)
            if home is None:
                home = homes[own] = children[_mix(own, parent.id) % len(children)]
            home.add(seq, hash, raw)
        parent.listed = False

    def _count(self) -> int:
        if self._listed_count is None:
            self._listed_count = sum(log.listed for log in self._logs.values())
        return self._listed_count

    def _changed(self) -> None:
        self._listed_count = None
        if not self.quirks.keep_token:
            self.token = _new_token()
        self._wake()

    def _describe(self, log: PartitionLog) -> Partition:
        return Partition(log.id, log.closed, self.end_cursor(log.id), log.starts_after, log.cursor_from)

    def _prepare(self, payload: Payload, entity: object) -> tuple[bytes, int]:
        if isinstance(payload, bytes):
            if b"\n" in payload:
                raise ValueError("a payload is one line of JSON")
            raw = payload
        else:
            raw = orjson.dumps(payload)
        if entity is None:
            entity = self.key(_decoded(payload))
        return raw, _hash(entity)

    def _encode(self, place: Place, nonce: int | None = None) -> str:
        cursor = encode(place.origin, place.base, place.ahead, nonce=nonce)
        return AWKWARD_PREFIX + cursor if self.quirks.awkward_cursors else cursor

    def _encode_plain(self, partition: int, seq: int) -> str:
        return AWKWARD_PREFIX + encode(partition, seq) if self.quirks.awkward_cursors else encode(partition, seq)

    def _another_cursor(self, partition: int, cursor: str) -> str:
        """A cursor that differs from `cursor` and stands for the same place."""
        self._nonce += 1
        return self._encode(self._place(self._logs[partition], cursor), self._nonce)

    def _place(self, log: PartitionLog, cursor: str) -> Place:
        """What a cursor, special or not, means in a partition. Raises ValueError for one that isn't valid there."""
        if cursor in (FIRST, LAST):
            return Place(log.id, 0 if cursor == FIRST else log.end, {})
        place = self._decode(cursor)
        if not log.accepts(place.origin):
            raise ValueError(f"not a cursor of partition {log.id}")
        return place

    def _decode(self, cursor: str) -> Place:
        place = decode(cursor.removeprefix(AWKWARD_PREFIX))
        if place.base > self._seq or any(seq > self._seq for seq in place.ahead.values()):
            raise ValueError("not a cursor of this feed")
        return place

    def _page(self, log: PartitionLog, place: Place, cut: Cut, visible: Visible | None) -> Page:
        if self.vary or visible is not None or place.ahead or log.internal:
            return picked_page(log, place, cut, visible, self._random if self.vary else None)
        return plain_page(log, place, cut)

    def _wake(self, partition: int | None = None) -> None:
        if not self._wakeups:
            return
        watchers = self._wakeups.get(partition, ()) if partition is not None else [one for many in self._wakeups.values() for one in many]
        for wake in tuple(watchers):
            wake()

    def _arrived(self, request: Request) -> FaultRule | None:
        """Note a request; the fault that strikes it, if any. The caller holds the lock."""
        self._requests.append(request)
        self.counters[request.kind] += 1
        struck = next((rule for rule in self._rules if rule.strikes(request)), None)
        self._rules = [rule for rule in self._rules if rule.live]
        return struck


def default_key(payload: Any) -> object:
    """The entity of a payload: its field ``entity``, else ``id``, else None."""
    if isinstance(payload, Mapping):
        entity = payload.get("entity")
        return payload.get("id") if entity is None else entity
    return None


def _decoded(payload: Payload) -> Any:
    return orjson.loads(payload) if isinstance(payload, bytes) else payload


def _hash(entity: object) -> int:
    # crc32 is stable over processes, unlike hash(), and cheap.
    return zlib.crc32(str(entity).encode())


def _mix(hash: int, salt: int) -> int:
    """Spreads a hash differently for each salt, so that nested splits of one partition are independent (murmur3's finaliser)."""
    mixed = (hash ^ (salt * 0x9E3779B1)) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)


def _new_token() -> str:
    return secrets.token_urlsafe(9)


def _field_equals(name: str) -> Filter:
    return lambda payload, value: isinstance(payload, Mapping) and str(payload.get(name)) == value
