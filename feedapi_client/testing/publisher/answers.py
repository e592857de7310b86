"""Request in, response out: the publisher's side of the protocol. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl

import orjson

from feedapi_client.model import FIRST, LAST, DialectName

if TYPE_CHECKING:
    from feedapi_client.testing.publisher.feed import Log, Moment, Publisher

RequestKind = Literal["discovery", "fetch", "other"]
Ending = Literal["complete", "close", "reset", "hang", "garbage"]
EmptyAnswer = Literal["cursor", "echo", "silent", "204"]
Wanted = Callable[[Any], bool]
"""A function from a payload to whether the consumer asked for such events."""

NDJSON = "application/x-ndjson"
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
MAX_PAGE_SIZE = 100_000
SCANNED = 1000
"""Number of events that a page looks at, where it leaves some of them out."""


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


@dataclass(slots=True)
class Request:
    """A request as `Publisher.requests` keeps it.

    `time` is `Publisher.clock()` at its arrival. `status` is None until it is answered.
    """

    kind: RequestKind
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    time: float
    method: str = "GET"
    partition: int | None = None
    cursor: str | None = None
    status: int | None = None

    @property
    def token(self) -> str | None:
        """The token that was sent (dialect v2-token)."""
        return self.query.get("token")

    @property
    def stream(self) -> str | None:
        """The argument `stream`, if there is one."""
        return self.query.get("stream")


@dataclass(slots=True)
class EventStream:
    """What follows the body of a response that is held open."""

    next_lines: Callable[[], tuple[bytes, bool]]
    """Returns the lines that have become available, and whether the stream ends with them."""
    seconds: float | None
    """How long the response is held open, None for ever."""


@dataclass(slots=True)
class Response:
    """What is sent, and how. See `feedapi_client.testing.faults` for what changes it."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    stream: EventStream | None = None
    """Lines that are sent after the body, as they become available."""
    delay: float = 0.0
    """Seconds before anything is sent."""
    piece_size: int | None = None
    """Size of the pieces in which the body is sent; None: all at once."""
    interval: float = 0.0
    """Seconds after each piece."""
    send_head: bool = True
    """Whether status, headers and body are sent."""
    content_length: int | None = None
    """The Content-Length that is announced. None: the true one, or chunked framing."""
    ending: Ending = "complete"
    """What follows: the end of the response, garbage in place of a chunk, or a connection that is
    closed, reset or hangs."""
    endless: bytes = b""
    """What is sent after the body, again and again."""

    @property
    def is_plain(self) -> bool:
        """Whether it is sent in one piece, at once and completely."""
        takes_time = self.stream or self.delay or self.piece_size or self.endless
        return not takes_time and self.ending == "complete"

    def whole(self) -> Response:
        """Return it with the first lines of its stream as its whole body."""
        if self.stream is not None:
            self.body += self.stream.next_lines()[0]
            self.stream = None
        return self


class RefusedError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def json_response(value: Any) -> Response:
    """Return a 200 response with a JSON value, whose keys may be numbers."""
    body = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    return Response(200, {"content-type": JSON}, body)


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


# Requests


def parse_request(feed_path: str, scope: Mapping[str, Any], now: float) -> Request:
    """Return the request of an ASGI scope. `feed_path` is the path of the feed's URL."""
    query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
    headers = {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }
    request = Request("other", scope["path"], query, headers, now, scope["method"])
    v1 = [name for name in query if name.startswith("cursor") and name[6:].isdigit()]
    if request.path == feed_path + "/events" or query.keys() & {"partition", "cursor"}:
        request.partition, request.cursor = _number(query.get("partition")), query.get("cursor")
    elif len(v1) == 1:
        request.partition, request.cursor = int(v1[0][6:]), query[v1[0]]
    if request.path == feed_path:
        asks = v1 or query.keys() & {"partition", "cursor", "n"}
        request.kind = "fetch" if asks else "discovery"
    elif request.path == feed_path + "/events":
        request.kind = "fetch"
    return request


def _number(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 9):
        return None
    return int(text)


# Answers


def answer(feed: Publisher, request: Request, now: float) -> Response:
    """Return what the publisher answers when no fault applies.

    `now` is the time whose events and topology it answers with: the present of `feed.clock()`, or
    an earlier one, as of a replica that lags. The caller holds the feed's lock.
    """
    moment = feed.at(now)
    try:
        _authorize(feed, request)
        if request.kind == "other":
            raise RefusedError(404, "not found")
        if request.kind == "fetch":
            return _fetch(feed, request, _dialect_of(feed, request, moment), moment)
        if feed.dialect == "v1":
            raise RefusedError(400, "handshake error: partition count missing")
        return json_response(discovery(feed, moment))
    except RefusedError as refusal:
        return Response(refusal.status, {"content-type": TEXT}, f"{refusal}\n".encode())


def _authorize(feed: Publisher, request: Request) -> None:
    if request.method != "GET":
        raise RefusedError(405, "only GET")
    authorization = request.headers.get("authorization")
    if feed.bearer is not None and authorization != f"Bearer {feed.bearer}":
        raise RefusedError(401 if authorization is None else 403, "bearer token missing or wrong")
    if any(request.query.get(name) != value for name, value in feed.require_query.items()):
        raise RefusedError(403, "a query argument is missing or wrong")


def discovery(feed: Publisher, moment: Moment) -> dict[str, Any]:
    found: dict[str, Any] = {"token": moment.token} if feed.dialect == "v2-token" else {}
    found["partitions"] = [_entry(feed, feed.logs[id], moment) for id in moment.closed]
    found["exactlyOnce"] = feed.exactly_once
    if feed.stream:
        found["stream"] = True
    if feed.filters:
        found["filters"] = list(feed.filters)
    return found


def _entry(feed: Publisher, log: Log, moment: Moment) -> dict[str, Any]:
    quirks, parent = feed.quirks, log.starts_after
    lineage = int if quirks.integer_lineage else str
    entry: dict[str, Any] = {"id": log.id if quirks.integer_ids else str(log.id)}
    if moment.closed[log.id]:
        entry["closed"] = True
    if _lists_last_cursor(feed, closed=moment.closed[log.id]):
        entry["lastCursor"] = feed.cursor(log.id, log.end(moment.next_seq))
    omitted = quirks.omit_starts_after or (parent == 0 and quirks.omit_parent_zero)
    if parent is not None and not omitted:
        old = quirks.old_lineage_names
        entry["startsAfterParent" if old else "startsAfterPartition"] = lineage(parent)
    if log.cursor_from:
        name = "splitFromAncestors" if quirks.old_lineage_names else "cursorFromPartitions"
        entry[name] = [lineage(ancestor) for ancestor in log.cursor_from]
    return entry


def _lists_last_cursor(feed: Publisher, *, closed: bool) -> bool:
    mode = feed.quirks.last_cursor or ("closed" if feed.dialect == "v2-draft" else "never")
    return mode == "always" or (mode == "closed" and closed)


def _dialect_of(feed: Publisher, request: Request, moment: Moment) -> DialectName:
    """Return the dialect of a fetch. Raises RefusedError when the feed doesn't speak it."""
    dialect, query = feed.dialect, request.query
    if request.path != feed.path:
        if dialect != "v2-token":
            raise RefusedError(404, "not found")
        if request.token != moment.token:
            raise RefusedError(409, "the token is stale: discover again")
        return dialect
    if dialect == "v2-draft" and "partition" in query:
        return dialect
    if "partition" in query or not (dialect == "v1" or feed.quirks.answers_v1):
        raise RefusedError(400, f"handshake error: this is not how dialect {dialect} fetches")
    if "n" not in query:
        raise RefusedError(400, "handshake error: partition count missing")
    if query["n"] != str(len(moment.closed)):
        raise RefusedError(400, f"handshake error: partition count is {len(moment.closed)}")
    if request.cursor is None:
        raise RefusedError(400, "handshake error: exactly one cursor expected")
    return "v1"


def _fetch(feed: Publisher, request: Request, dialect: DialectName, moment: Moment) -> Response:
    if request.partition is None:
        raise RefusedError(400, "argument partition missing or not a number")
    if request.partition not in moment.closed:
        raise RefusedError(feed.quirks.unknown_partition, f"no partition {request.partition}")
    if not request.cursor:
        raise RefusedError(400, "argument cursor missing")
    reader = _Reader(feed, request, dialect, moment)
    response = Response(200, {"content-type": NDJSON})
    if reader.streamed:
        response.stream = _stream(feed, reader, str(request.stream), moment)
        return response
    response.body = reader.next_page(moment)[0]
    silent = not response.body and feed.quirks.empty_page == "204"
    return Response(204) if silent else response


def _stream(feed: Publisher, reader: _Reader, argument: str, began: Moment) -> EventStream:
    if not feed.stream:
        raise RefusedError(400, "stream is not supported")
    milliseconds = _number(argument)
    if argument != "y" and milliseconds is None:
        raise RefusedError(400, "stream is neither y nor a number of milliseconds")
    # The stream of a replica stays as far behind as it began.
    id, dialect, behind = reader.log.id, feed.dialect, feed.clock() - began.now
    first = True
    nothing_new: tuple[Any, ...] | None = None

    def next_lines() -> tuple[bytes, bool]:
        nonlocal first, nothing_new
        with feed.lock:
            moment = feed.at(feed.clock() - behind)
            stale = dialect == "v2-token" and moment.token != began.token
            if id not in moment.closed or feed.dialect != dialect or stale:
                return b"", True
            if nothing_new == moment[1:]:  # looking must cost little: hundreds of streams do
                return b"", False
            before = reader.position
            lines, at_end = reader.next_page(moment)
            if reader.position == before and not first:
                lines = b""  # the checkpoint of an empty page is sent only once
            ended = at_end and moment.closed[id]
            first, nothing_new = False, None if lines or ended else moment[1:]
            return lines, ended

    return EventStream(next_lines, None if milliseconds is None else milliseconds / 1000)


def _position(log: Log, cursor: str, moment: Moment) -> int:
    if cursor in (FIRST, LAST):
        return 0 if cursor == FIRST else log.end(moment.next_seq)
    try:
        partition, seq = decode_cursor(cursor)
    except ValueError as error:
        raise RefusedError(400, str(error)) from None
    if seq > moment.next_seq:
        raise RefusedError(400, "not a cursor of this feed")
    if partition not in (log.id, *log.cursor_from, *log.split_before):
        raise RefusedError(400, f"not a cursor of partition {log.id}")
    return seq


def _page_size(feed: Publisher, request: Request, dialect: DialectName, *, streamed: bool) -> int:
    hint = request.query.get("pageSizeHint" if dialect == "v2-draft" else "pagesizehint")
    if hint is None:
        return feed.page_size
    if streamed:
        raise RefusedError(400, "stream and pageSizeHint exclude each other")
    if not (wanted := _number(hint)):
        raise RefusedError(400, "the page size hint is not a positive number")
    return min(wanted, MAX_PAGE_SIZE)


def _wanted(feed: Publisher, request: Request, dialect: DialectName) -> Wanted | None:
    """Return which payloads a request asks for, None for all."""
    query = request.query
    if dialect == "v2-draft":
        chosen = {name[7:]: value for name, value in query.items() if name.startswith("filter-")}
        if not chosen.keys() <= feed.filters.keys():
            raise RefusedError(400, "unsupported filter")
        filters = [(feed.filters[name], value) for name, value in chosen.items()]
        if filters:
            return lambda payload: all(matches(payload, value) for matches, value in filters)
    if dialect == "v2-token":
        included, skipped = query.get("event-types"), query.get("skip-event-types")
        if included is not None and skipped is not None:
            raise RefusedError(400, "event-types and skip-event-types exclude each other")
        names = skipped if included is None else included
        if names is not None and not feed.quirks.ignore_event_types:
            types, include, field = {*names.split(";")}, included is not None, feed.type_field
            return lambda payload: (_type_of(payload, field) in types) is include
    return None


def _type_of(payload: Any, field: str) -> str | None:
    value = payload.get(field) if isinstance(payload, dict) else None
    return value if isinstance(value, str) else None


class _Reader:
    """Reads a partition from the cursor of a request, a page with each call.

    One call makes an ordinary response, many calls a streamed one.
    """

    def __init__(
        self, feed: Publisher, request: Request, dialect: DialectName, moment: Moment
    ) -> None:
        assert request.partition is not None
        assert request.cursor is not None
        self.feed = feed
        self.log = log = feed.logs[request.partition]
        self.cursor = request.cursor
        self.position = _position(log, request.cursor, moment)
        self.streamed = request.stream is not None and dialect != "v1"
        self._symbolic = request.cursor in (FIRST, LAST)
        self._size = _page_size(feed, request, dialect, streamed=self.streamed)
        self._wanted = _wanted(feed, request, dialect)
        v1 = dialect == "v1"
        self._headers = {*request.query.get("headers", "").split(",")} if v1 else set[str]()
        # How lines begin
        event = (dialect == "v2-draft") is not feed.quirks.swapped_payload_key and not v1
        names = ("event" if event else "data", "cursor")
        if feed.quirks.pascal_case:
            names = names[0].capitalize(), names[1].capitalize()
        payload, cursor = (f'"{name}":'.encode() for name in names)
        start = b"{" + (b'"partition":%d,' % log.id if v1 else b"")
        self._event = start + (b'"headers":{},' if v1 else b"") + payload
        self._event_with_headers = start + b'"headers":%b,' + payload + b"%b}\n"
        self._checkpoint = start + cursor

    def next_page(self, moment: Moment) -> tuple[bytes, bool]:
        """Return the lines of the next page, and whether the end of the log was reached."""
        feed, id = self.feed, self.log.id
        runs, end, at_end = self._runs(self.log.stop(moment.next_seq))
        # Every way through a closed partition ends at the cursor that discovery lists. At any other
        # end a consumer gets back the very cursor that it asked with.
        last = None
        if at_end and moment.closed[id] and _lists_last_cursor(feed, closed=True):
            last = feed.cursor(id, self.log.end(moment.next_seq))
        nothing = end == self.position and not any(run for run, _ in runs)
        if nothing and last in (None, self.cursor) and feed.quirks.empty_page != "cursor":
            echo = feed.quirks.empty_page == "echo"
            return self._cursor_line(self.cursor) if echo else b"", at_end
        lines = []
        for run, seq in runs:
            lines.append(self._event_lines(run))
            if seq is not None:
                unmoved = seq == self.position and not self._symbolic
                text = self.cursor if unmoved else feed.cursor(id, seq)
                lines.append(self._cursor_line(last if last and seq == end else text))
        if end != self.position:
            self.cursor, self.position, self._symbolic = feed.cursor(id, end), end, False
        return b"".join(lines), at_end

    def _runs(self, stop: int) -> tuple[list[tuple[Sequence[int], int | None]], int, bool]:
        """Cut the next page into runs of events.

        Returns: the indices of each run and the sequence number of the checkpoint behind it, the
        sequence number where the next page begins, and whether the log ends there.
        """
        log, every = self.log, self.feed.checkpoint_every
        random = self.feed.random if self.feed.vary else None
        first = bisect_left(log.seqs, self.position)
        shown, reached = self._shown(first, stop, random)
        end = log.seqs[reached - 1] + 1 if reached > first else self.position
        runs: list[tuple[Sequence[int], int | None]] = []
        at = 0
        while at < len(shown):
            length = every if random is None else random.randint(1, 2 * every)
            run, at = shown[at : at + length], at + length
            behind = log.seqs[run[-1]] + 1 if at < len(shown) else end
            runs.append((run if random is None else self._interleaved(run, random), behind))
        if not runs:
            return [((), end)], end, reached == stop
        if random is None:
            return runs, end, reached == stop
        if random.random() < 0.1:
            runs.insert(0, ((), self.position))
        before = runs[-2][1] if len(runs) > 1 else self.position
        if before != self.position and not self.streamed and random.random() < 0.3:
            # Legal, and easily got wrong: events after the last checkpoint, which the consumer
            # drops and gets again.
            assert before is not None
            return [*runs[:-1], (runs[-1][0], None)], before, False
        return runs, end, reached == stop

    def _shown(self, first: int, stop: int, random: Random | None) -> tuple[Sequence[int], int]:
        """Return the indices of the events of a page, and the one behind all it has looked at."""
        size = self._size if random is None else random.randint(1, self._size)
        payloads, wanted = self.log.payloads, self._wanted
        if wanted is None and not self.log.has_internal:
            shown = range(first, min(first + size, stop))
            return shown, shown.stop
        found: list[int] = []
        until = min(first + max(size, SCANNED), stop)
        for index in range(first, until):
            raw = payloads[index]
            if raw is not None and (wanted is None or wanted(orjson.loads(raw))):
                found.append(index)
                if len(found) == size:
                    return found, index + 1
        return found, until

    def _interleaved(self, run: Sequence[int], random: Random) -> list[int]:
        """Return a run in a random order that keeps the order within each entity."""
        entities: dict[int, list[int]] = {}
        for index in run:
            entities.setdefault(self.log.hashes[index], []).append(index)
        order = [hash for hash, indices in entities.items() for _ in indices]
        random.shuffle(order)
        left = {hash: iter(indices) for hash, indices in entities.items()}
        return [next(left[hash]) for hash in order]

    def _cursor_line(self, cursor: str) -> bytes:
        return self._checkpoint + orjson.dumps(cursor) + b"}\n"

    def _event_lines(self, run: Sequence[int]) -> bytes:
        payloads, headers = self.log.payloads, self.feed.event_headers
        if not run:
            return b""
        if not (self._headers and headers):
            whole = payloads[run.start : run.stop] if isinstance(run, range) else None
            between = b"}\n" + self._event
            found = [payloads[index] for index in run] if whole is None else whole
            return self._event + between.join(found) + b"}\n"  # type: ignore[arg-type]
        lines = []
        for index in run:
            given = headers.get(self.log.seqs[index], {})
            if "_all" not in self._headers:
                given = {name: given[name] for name in given if name in self._headers}
            lines.append(self._event_with_headers % (orjson.dumps(dict(given)), payloads[index]))
        return b"".join(lines)
