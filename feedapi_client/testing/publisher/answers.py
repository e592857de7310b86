"""Request in, response out: the publisher's side of the protocol. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import orjson

from feedapi_client.model import FIRST, LAST, DialectName
from feedapi_client.testing.publisher.feed import Feed, Log, Moment, decode_cursor
from feedapi_client.testing.publisher.messages import (
    NDJSON,
    TEXT,
    EventStream,
    Request,
    Response,
    json_response,
    number,
)

Wanted = Callable[[Any], bool]
"""A function from a payload to whether the consumer asked for such events."""

MAX_PAGE_SIZE = 100_000
SCANNED = 1000
"""Number of events that a page looks at, where it leaves some of them out."""


class RefusedError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def answer(feed: Feed, request: Request, now: float) -> Response:
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


def _authorize(feed: Feed, request: Request) -> None:
    if request.method != "GET":
        raise RefusedError(405, "only GET")
    authorization = request.headers.get("authorization")
    if feed.bearer is not None and authorization != f"Bearer {feed.bearer}":
        raise RefusedError(401 if authorization is None else 403, "bearer token missing or wrong")
    if any(request.query.get(name) != value for name, value in feed.require_query.items()):
        raise RefusedError(403, "a query argument is missing or wrong")


def discovery(feed: Feed, moment: Moment) -> dict[str, Any]:
    found: dict[str, Any] = {"token": moment.token} if feed.dialect == "v2-token" else {}
    found["partitions"] = [_entry(feed, feed.logs[id], moment) for id in moment.closed]
    found["exactlyOnce"] = feed.exactly_once
    if feed.stream:
        found["stream"] = True
    if feed.filters:
        found["filters"] = list(feed.filters)
    return found


def _entry(feed: Feed, log: Log, moment: Moment) -> dict[str, Any]:
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


def _lists_last_cursor(feed: Feed, *, closed: bool) -> bool:
    mode = feed.quirks.last_cursor or ("closed" if feed.dialect == "v2-draft" else "never")
    return mode == "always" or (mode == "closed" and closed)


def _dialect_of(feed: Feed, request: Request, moment: Moment) -> DialectName:
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


def _fetch(feed: Feed, request: Request, dialect: DialectName, moment: Moment) -> Response:
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


def _stream(feed: Feed, reader: _Reader, argument: str, began: Moment) -> EventStream:
    if not feed.stream:
        raise RefusedError(400, "stream is not supported")
    milliseconds = number(argument)
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


def _page_size(feed: Feed, request: Request, dialect: DialectName, *, streamed: bool) -> int:
    hint = request.query.get("pageSizeHint" if dialect == "v2-draft" else "pagesizehint")
    if hint is None:
        return feed.page_size
    if streamed:
        raise RefusedError(400, "stream and pageSizeHint exclude each other")
    if not (wanted := number(hint)):
        raise RefusedError(400, "the page size hint is not a positive number")
    return min(wanted, MAX_PAGE_SIZE)


def _wanted(feed: Feed, request: Request, dialect: DialectName) -> Wanted | None:
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

    def __init__(self, feed: Feed, request: Request, dialect: DialectName, moment: Moment) -> None:
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
