"""Request in, response out: the publisher's side of the protocol. No I/O."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from feedapi_client.model import FIRST, LAST, DialectName
from feedapi_client.testing.publisher.feed import Feed
from feedapi_client.testing.publisher.log_position import LogPosition
from feedapi_client.testing.publisher.pages import EventFilter, LogPage, PageLimits
from feedapi_client.testing.publisher.partition_log import PartitionLog
from feedapi_client.testing.publisher.requests import Request, parse_number
from feedapi_client.testing.publisher.responses import (
    NDJSON,
    EventStream,
    HttpError,
    Response,
    json_response,
    text_response,
)
from feedapi_client.testing.publisher.wire_format import LineWriter, lists_last_cursor

MAX_PAGE_SIZE = 100_000


def handle(feed: Feed, request: Request) -> Response:
    """Return what the publisher answers when no fault applies. The caller holds the feed's lock."""
    try:
        _authorize(feed, request)
        if request.kind == "discovery":
            return _discover(feed)
        if request.kind == "fetch":
            return _fetch(feed, request, _dialect_of(feed, request))
        raise HttpError(404, "not found")
    except HttpError as error:
        return text_response(error.status, error.text + "\n")


def _authorize(feed: Feed, request: Request) -> None:
    if request.method != "GET":
        raise HttpError(405, "only GET")
    authorization = request.headers.get("authorization")
    if feed.bearer is not None and authorization != f"Bearer {feed.bearer}":
        raise HttpError(401 if authorization is None else 403, "bearer token missing or wrong")
    if any(request.query.get(name) != value for name, value in feed.require_query.items()):
        raise HttpError(403, "a query argument is missing or wrong")


def _discover(feed: Feed) -> Response:
    if feed.dialect == "v1":
        raise HttpError(400, "handshake error: partition count missing")
    return json_response(feed.discovery())


def _dialect_of(feed: Feed, request: Request) -> DialectName:
    """Return the dialect of a fetch. Raises HttpError when the feed doesn't speak it."""
    dialect = feed.dialect
    if request.path != feed.path:
        if dialect != "v2-token":
            raise HttpError(404, "not found")
        if request.token != feed.token:
            raise HttpError(409, "the token is stale: discover again")
        return dialect
    if dialect == "v2-draft" and "partition" in request.query:
        return dialect
    if "partition" not in request.query and (dialect == "v1" or feed.quirks.answers_v1):
        _check_v1_arguments(feed, request)
        return "v1"
    raise HttpError(400, f"handshake error: this is not how dialect {dialect} fetches")


def _check_v1_arguments(feed: Feed, request: Request) -> None:
    count = feed.listed_count
    if "n" not in request.query:
        raise HttpError(400, "handshake error: partition count missing")
    if request.query["n"] != str(count):
        raise HttpError(400, f"handshake error: partition count is {count}")
    if request.cursor is None:
        raise HttpError(400, "handshake error: exactly one cursor expected")


def _fetch(feed: Feed, request: Request, dialect: DialectName) -> Response:
    """Return the response to a fetch in a dialect. The caller holds the feed's lock.

    Raises HttpError for arguments that the publisher refuses.
    """
    log = _log_of(feed, request)
    if not request.cursor:
        raise HttpError(400, "argument cursor missing")
    reader = LogReader(feed, log, dialect, request)
    response = Response(200, {"content-type": NDJSON})
    stream = request.stream if dialect != "v1" else None
    if stream is None:
        response.body = reader.next_page()[0]
        if not response.body and feed.quirks.empty_page == "204":
            return Response(204)
    else:
        response.stream = _stream(feed, reader, stream)
    return response


def _log_of(feed: Feed, request: Request) -> PartitionLog:
    if request.partition is None:
        raise HttpError(400, "argument partition missing or not a number")
    log = feed.log_of(request.partition)
    if log is None:
        raise HttpError(feed.quirks.unknown_partition, f"no partition {request.partition}")
    return log


class LogReader:
    """Reads a partition from the cursor of a request. Each call returns the next page.

    One call makes an ordinary response, many calls a streamed one.
    """

    def __init__(
        self, feed: Feed, log: PartitionLog, dialect: DialectName, request: Request
    ) -> None:
        assert request.cursor is not None
        self.feed = feed
        self.log = log
        self.cursor = request.cursor
        self.symbolic = request.cursor in (FIRST, LAST)
        try:
            self.position = feed.position_of(log, request.cursor)
        except ValueError as error:
            raise HttpError(400, str(error)) from None
        self.limits = _page_limits(feed, request, dialect)
        self.wanted = _event_filter(feed, request, dialect)
        headers = request.query.get("headers", "") if dialect == "v1" else ""
        header_names = [name for name in headers.split(",") if name]
        self.writer = LineWriter(dialect, log.id, header_names, feed.event_headers, feed.quirks)

    def next_page(self) -> tuple[bytes, bool]:
        """Return the lines of the next page, and whether the end of the log was reached."""
        page = self.feed.page(self.log, self.position, self.limits, self.wanted)
        if self._is_empty(page):
            return self._empty_page(), page.at_end_of_log
        lines = []
        for group in page.groups:
            lines.append(self.writer.events(self.log, group.indices))
            if group.checkpoint is not None:
                lines.append(self.writer.checkpoint(self._cursor(group.checkpoint, page)))
        if not page.groups:
            lines.append(self.writer.checkpoint(self._cursor(page.end, page)))
        if page.end != self.position:
            self.cursor, self.symbolic = self.feed.encode(page.end), False
        self.position = page.end
        return b"".join(lines), page.at_end_of_log

    def _is_empty(self, page: LogPage) -> bool:
        """Whether the page tells nothing, of a publisher that doesn't make up a cursor for it."""
        if self.feed.quirks.empty_page == "cursor" or page.end != self.position:
            return False
        if any(group.indices for group in page.groups):
            return False
        return not self._ends_at_last_cursor() or self.cursor == self.feed.end_cursor(self.log.id)

    def _empty_page(self) -> bytes:
        return self.writer.checkpoint(self.cursor) if self.feed.quirks.empty_page == "echo" else b""

    def _ends_at_last_cursor(self) -> bool:
        """Whether every way through the closed partition ends at the cursor that discovery lists.

        An equivalent one would do for the publisher, but tell the consumer that more is to come.
        """
        feed, closed = self.feed, self.log.closed
        return closed and lists_last_cursor(feed.dialect, feed.quirks, closed=closed)

    def _cursor(self, position: LogPosition, page: LogPage) -> str:
        if position == page.end and page.at_end_of_log and self._ends_at_last_cursor():
            return self.feed.end_cursor(self.log.id)
        # At the end a consumer gets back the very cursor that it asked with.
        unmoved = position == self.position and not self.symbolic
        return self.cursor if unmoved else self.feed.encode(position)


def _page_limits(feed: Feed, request: Request, dialect: DialectName) -> PageLimits:
    hint = request.query.get("pageSizeHint" if dialect == "v2-draft" else "pagesizehint")
    streamed = request.stream is not None and dialect != "v1"
    if hint is not None and streamed:
        raise HttpError(400, "stream and pageSizeHint exclude each other")
    size = feed.page_size
    if hint is not None:
        wanted = parse_number(hint)
        if not wanted:
            raise HttpError(400, "the page size hint is not a positive number")
        size = min(wanted, MAX_PAGE_SIZE)
    return PageLimits(size, feed.checkpoint_every, max(size, feed.scan_limit), continues=streamed)


def _event_filter(feed: Feed, request: Request, dialect: DialectName) -> EventFilter | None:
    if dialect == "v2-draft":
        return _draft_filters(feed, request)
    return _event_types(feed, request) if dialect == "v2-token" else None


def _draft_filters(feed: Feed, request: Request) -> EventFilter | None:
    chosen: list[tuple[Callable[[object, str], bool], str]] = []
    for name, value in request.query.items():
        if name.startswith("filter-"):
            matches = feed.filters.get(name.removeprefix("filter-"))
            if matches is None:
                raise HttpError(400, "unsupported filter")
            chosen.append((matches, value))
    if not chosen:
        return None
    return lambda raw: all(matches(orjson.loads(raw), value) for matches, value in chosen)


def _event_types(feed: Feed, request: Request) -> EventFilter | None:
    included, skipped = request.query.get("event-types"), request.query.get("skip-event-types")
    if included is not None and skipped is not None:
        raise HttpError(400, "event-types and skip-event-types exclude each other")
    names = included if included is not None else skipped
    if names is None or feed.quirks.ignore_event_types:
        return None
    types, include, field = frozenset(names.split(";")), included is not None, feed.type_field
    return lambda raw: (_type_of(raw, field) in types) is include


def _type_of(raw: bytes, field: str) -> str | None:
    payload = orjson.loads(raw)
    value = payload.get(field) if isinstance(payload, dict) else None
    return value if isinstance(value, str) else None


def _stream(feed: Feed, reader: LogReader, argument: str) -> EventStream:
    if not feed.stream:
        raise HttpError(400, "stream is not supported")
    milliseconds = parse_number(argument)
    if argument != "y" and milliseconds is None:
        raise HttpError(400, "stream is neither y nor a number of milliseconds")
    token, dialect = feed.token, feed.dialect
    began = False

    def next_lines() -> tuple[bytes, bool]:
        nonlocal began
        with feed.lock:
            stale = dialect == "v2-token" and feed.token != token
            if not reader.log.listed or feed.dialect != dialect or stale:
                return b"", True
            before = reader.position
            lines, at_end = reader.next_page()
            if began and reader.position == before:
                lines = b""  # the checkpoint of an empty page is sent only once
            began = True
            return lines, at_end and reader.log.closed

    return EventStream(
        next_lines, None if milliseconds is None else milliseconds / 1000, reader.log.id
    )
