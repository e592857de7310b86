"""Request in, response out: the publisher's side of the protocol. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable

import orjson

from feedapi_client.model import FIRST, LAST, DialectName
from feedapi_client.testing.cursors import Place
from feedapi_client.testing.exchange import (
    NDJSON,
    Follow,
    Refused,
    Request,
    Response,
    json_response,
    number,
    text_response,
)
from feedapi_client.testing.feed import PublishedFeed
from feedapi_client.testing.log import Cut, PartitionLog, Visible
from feedapi_client.testing.wire import LineWriter

MAX_PAGE = 100_000


def answer(publisher: PublishedFeed, request: Request) -> Response:
    """What the publisher answers when no fault is set. The caller holds the publisher's lock."""
    try:
        _admit(publisher, request)
        if request.kind == "discovery":
            return _discover(publisher)
        if request.kind == "fetch":
            return _fetch(publisher, request)
        raise Refused(404, "not found")
    except Refused as refused:
        return text_response(refused.status, refused.text + "\n")


def _admit(publisher: PublishedFeed, request: Request) -> None:
    if request.method != "GET":
        raise Refused(405, "only GET")
    if (
        publisher.bearer is not None
        and request.headers.get("authorization") != f"Bearer {publisher.bearer}"
    ):
        raise Refused(401 if "authorization" not in request.headers else 403, "who are you?")
    if any(request.query.get(name) != value for name, value in publisher.require_query.items()):
        raise Refused(403, "a query argument is missing or wrong")


def _discover(publisher: PublishedFeed) -> Response:
    if publisher.dialect == "v1":
        raise Refused(400, "handshake error: partition count missing")
    return json_response(publisher.discovery())


def _fetch(publisher: PublishedFeed, request: Request) -> Response:
    dialect = _dialect_of(publisher, request)
    log = _partition_of(publisher, request)
    if not request.cursor:
        raise Refused(400, "argument cursor missing")
    reader = Reader(publisher, log, dialect, request)
    stream = request.query.get("stream") if dialect != "v1" else None
    if stream is not None:
        return Response(200, {"content-type": NDJSON}, follow=_follow(publisher, reader, stream))
    return Response(200, {"content-type": NDJSON}, reader.next_page()[0])


def _dialect_of(publisher: PublishedFeed, request: Request) -> DialectName:
    """The dialect that the request is in; refused when the publisher doesn't speak it."""
    dialect = publisher.dialect
    on_events = request.path.endswith("/events") and request.path != publisher.path
    if on_events:
        if dialect != "v2-token":
            raise Refused(404, "not found")
        if request.token != publisher.token:
            raise Refused(409, "the token is stale: discover again")
        return dialect
    if dialect == "v2-draft" and "partition" in request.query:
        return dialect
    if "partition" not in request.query and (dialect == "v1" or publisher.quirks.answers_v1):
        _check_v1(publisher, request)
        return "v1"
    raise Refused(400, f"handshake error: this is not how dialect {dialect} fetches")


def _check_v1(publisher: PublishedFeed, request: Request) -> None:
    count = publisher.listed_count
    if "n" not in request.query:
        raise Refused(400, "handshake error: partition count missing")
    if request.query["n"] != str(count):
        raise Refused(400, f"handshake error: partition count is {count}")
    if request.cursor is None:
        raise Refused(400, "handshake error: exactly one cursor expected")


def _partition_of(publisher: PublishedFeed, request: Request) -> PartitionLog:
    if request.partition is None:
        raise Refused(400, "argument partition missing or not a number")
    log = publisher.log_of(request.partition)
    if log is None:
        raise Refused(publisher.quirks.unknown_partition, f"no partition {request.partition}")
    return log


class Reader:
    """Reads on from one request's cursor. Each call gives the next page; one call is a normal response, many are a streamed one."""

    def __init__(
        self, publisher: PublishedFeed, log: PartitionLog, dialect: DialectName, request: Request
    ) -> None:
        self.publisher = publisher
        self.log = log
        self.dialect = dialect
        assert request.cursor is not None
        self.cursor = request.cursor
        try:
            self.place, self.symbolic = (
                publisher.place(log, request.cursor),
                request.cursor in (FIRST, LAST),
            )
        except ValueError as invalid:
            raise Refused(400, str(invalid)) from None
        self.cut = _cut_of(publisher, request, dialect)
        self.visible = _visible(publisher, request, dialect)
        names = request.query.get("headers", "") if dialect == "v1" else ""
        self.writer = LineWriter(
            dialect, log.id, [name for name in names.split(",") if name], publisher.event_headers
        )

    def next_page(self) -> tuple[bytes, bool]:
        """Lines, and whether the end of the log was reached."""
        page = self.publisher.page(self.log, self.place, self.cut, self.visible)
        parts = []
        for run in page.runs:
            parts.append(self.writer.events(self.log, run.indices))
            if run.place is not None:
                parts.append(self.writer.checkpoint(self._cursor(run.place)))
        if not page.runs:
            parts.append(self.writer.checkpoint(self._cursor(page.place)))
        if page.place != self.place:
            self.cursor, self.symbolic = self.publisher.encode(page.place), False
        self.place = page.place
        return b"".join(parts), page.at_end

    def _cursor(self, place: Place) -> str:
        # At the end a consumer gets back the very cursor that it asked with.
        return (
            self.cursor
            if place == self.place and not self.symbolic
            else self.publisher.encode(place)
        )


def _cut_of(publisher: PublishedFeed, request: Request, dialect: DialectName) -> Cut:
    hint = request.query.get("pageSizeHint" if dialect == "v2-draft" else "pagesizehint")
    if hint is not None and request.stream is not None and dialect != "v1":
        raise Refused(400, "stream and pageSizeHint exclude each other")
    size = publisher.page_size
    if hint is not None:
        wanted = number(hint)
        if not wanted:
            raise Refused(400, "the page size hint is not a positive number")
        size = min(wanted, MAX_PAGE)
    return Cut(
        size,
        publisher.checkpoint_every,
        max(size, publisher.scan_limit),
        goes_on=dialect != "v1" and request.stream is not None,
    )


def _visible(publisher: PublishedFeed, request: Request, dialect: DialectName) -> Visible | None:
    if dialect == "v2-draft":
        return _filters(publisher, request)
    return _event_types(publisher, request) if dialect == "v2-token" else None


def _filters(publisher: PublishedFeed, request: Request) -> Visible | None:
    chosen: list[tuple[Callable[[object, str], bool], str]] = []
    for name, value in request.query.items():
        if name.startswith("filter-"):
            matches = publisher.filters.get(name.removeprefix("filter-"))
            if matches is None:
                raise Refused(400, "unsupported filter")
            chosen.append((matches, value))
    if not chosen:
        return None
    return lambda raw: all(matches(orjson.loads(raw), value) for matches, value in chosen)


def _event_types(publisher: PublishedFeed, request: Request) -> Visible | None:
    wanted, skipped = request.query.get("event-types"), request.query.get("skip-event-types")
    if wanted is not None and skipped is not None:
        raise Refused(400, "event-types and skip-event-types exclude each other")
    names = wanted if wanted is not None else skipped
    if names is None or publisher.quirks.ignore_event_types:
        return None
    types, keep, field = frozenset(names.split(";")), wanted is not None, publisher.type_field
    return lambda raw: (_field(raw, field) in types) is keep


def _field(raw: bytes, field: str) -> str | None:
    payload = orjson.loads(raw)
    value = payload.get(field) if isinstance(payload, dict) else None
    return value if isinstance(value, str) else None


def _follow(publisher: PublishedFeed, reader: Reader, stream: str) -> Follow:
    if not publisher.stream:
        raise Refused(400, "stream is not supported")
    milliseconds = number(stream)
    if stream != "y" and milliseconds is None:
        raise Refused(400, "stream is neither y nor a number of milliseconds")
    until = None if milliseconds is None else time.monotonic() + milliseconds / 1000
    sent = False

    def next_chunk() -> tuple[bytes, bool]:
        nonlocal sent
        with publisher.lock:
            log = reader.log
            if (
                not log.listed
                or publisher.dialect != dialect
                or (dialect == "v2-token" and publisher.token != token)
            ):
                return b"", True
            before = reader.place
            lines, at_end = reader.next_page()
            if sent and reader.place == before:
                lines = b""
            sent = True
            return lines, at_end and log.closed

    token, dialect = publisher.token, publisher.dialect
    return Follow(next_chunk, until, reader.log.id)
