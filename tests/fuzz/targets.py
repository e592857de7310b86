"""What must hold for any input: one function for each reader of foreign bytes.

A function raises when its promise is broken. Errors that the reader documents are part of the
promise, so they are caught here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from feedapi_client.errors import FeedError, LineageError
from feedapi_client.http.transport import retry_after
from feedapi_client.liftbridge.envelope import Envelope, decode_ack, decode_message
from feedapi_client.liftbridge.liftbridge_errors import EnvelopeError
from feedapi_client.lineage.graph import Graph
from feedapi_client.lineage.planner import Planner
from feedapi_client.model import MAX_PARTITION, Event, FeedInfo, Partition
from feedapi_client.operations import FeedPositions, export_positions, parse_export
from feedapi_client.protocol.decoder import Decoded, PageDecoder
from feedapi_client.protocol.dialects import DIALECTS, Dialect
from feedapi_client.protocol.negotiation import negotiate
from feedapi_client.protocol.page import Outcome, PageReader, Progress
from feedapi_client.spark.epoch import count_before
from tests.fuzz.chunks import cut

FEED = "https://service/feed"
ASKED = "c1"
MAX_LINE = 512
MAX_UNCLOSED = 1024
MAX_CURSOR = 16 * 1024
MAX_MESSAGE = 1500
"""Characters of an error text: 200 of the publisher's, each escaped, and our own words."""

_DIALECTS = tuple(DIALECTS.values())
_STATUSES = (200, 400, 200, 404, 204, 302, 410, 206)


def _check(holds: bool, promise: str) -> None:
    assert holds, promise


def _check_error(error: FeedError) -> None:
    text = str(error)
    assert FEED in text, "an error names its feed"
    assert text.isprintable(), "an error text is printable"
    assert len(text) <= MAX_MESSAGE, f"an error text of {len(text)} characters"


# ---------------------------------------------------------------------------------- pages


def _new_decoder(dialect: Dialect) -> PageDecoder:
    return PageDecoder(dialect, feed=FEED, partition=2, max_line_bytes=MAX_LINE)


def _decode(dialect: Dialect, chunks: list[bytes]) -> tuple[list[bytes], list[str], str]:
    """Events, cursors and the error that a decoder makes of a response."""
    decoder, events, cursors = _new_decoder(dialect), list[bytes](), list[str]()

    def receive(decoded: Decoded) -> None:
        seen = set(decoded.checkpoints)
        events.extend(_payload(e) for at, e in enumerate(decoded.records) if at not in seen)
        cursors.extend(decoded.cursors)
        for cursor in cursors:
            _check_sendable(cursor)

    try:
        for chunk in chunks:
            decoder.feed(chunk, receive)
        decoder.finish(receive)
    except FeedError as found:
        _check_error(found)
        return events, cursors, f"{type(found).__name__}: {found}"
    return events, cursors, ""


def _payload(event: Event) -> bytes:
    raw = bytes(event.raw)
    assert raw[:1] in (b"{", b'"'), "a payload is an object or a string"
    assert len(raw) <= MAX_LINE, "a payload is longer than a line may be"
    return raw


def decoder(data: bytes) -> None:
    """`PageDecoder`: any chunking gives the same events, cursor and error."""
    if len(data) < 2:
        return
    dialect, body = _DIALECTS[data[0] % len(_DIALECTS)], data[2:]
    whole, pieces = _decode(dialect, [body]), _decode(dialect, list(cut(body, data[1])))
    assert whole == pieces, f"{whole} != {pieces}"


@dataclass
class Read:
    """What a page reader made of a response."""

    events: list[bytes]
    cursor: str
    outcome: Outcome | None
    error: str | None


def _read(dialect: Dialect, chunks: list[bytes], *, closed: bool, bound: int) -> Read:
    reader = PageReader(
        _new_decoder(dialect),
        feed=FEED,
        partition=2,
        asked=ASKED,
        closed=closed,
        progress=Progress(3),
        max_unclosed_bytes=bound,
    )
    batches, outcome, error = [], None, None
    try:
        for chunk in chunks:
            batches += reader.feed(chunk)
            # The bound is checked behind each chunk: the chunk itself is in memory anyhow.
            assert reader.kept_bytes <= bound + len(chunk) or reader._error
            reader.check()
        finished = reader.finish()
        batches, outcome = batches + finished.batches, finished.outcome
    except FeedError as found:
        _check_error(found)
        error = f"{type(found).__name__}: {found}"
    batches += reader.rest()
    for batch in batches:
        assert batch.cursor, "a batch has a cursor"
        _check_sendable(batch.cursor)
    events = [_payload(event) for batch in batches for event in batch.events]
    return Read(events, batches[-1].cursor if batches else ASKED, outcome, error)


def page(data: bytes) -> None:
    """`PageReader`: any chunking gives the same events, last cursor and outcome."""
    if len(data) < 3:
        return
    dialect, closed, body = _DIALECTS[data[0] % len(_DIALECTS)], bool(data[1] & 1), data[3:]
    # The bound on bytes without a checkpoint depends on the chunks, so it is tested by itself.
    if data[1] & 2:
        _read(dialect, list(cut(body, data[2])), closed=closed, bound=MAX_UNCLOSED // 8)
        return
    unbounded = len(body) + 1
    whole = _read(dialect, [body], closed=closed, bound=unbounded)
    pieces = _read(dialect, list(cut(body, data[2])), closed=closed, bound=unbounded)
    assert whole == pieces, f"{whole} != {pieces}"


# ---------------------------------------------------------------------------------- discovery


def negotiation(data: bytes) -> None:
    """`negotiate`: a `FeedInfo` or an error of ours for any status and body."""
    if not data:
        return
    status, v1_partitions = _STATUSES[data[0] & 7], (data[0] >> 3) or None
    try:
        info = negotiate(status, data[1:], feed=FEED, v1_partitions=v1_partitions)
    except FeedError as error:
        _check_error(error)
    else:
        _check_info(info)


def _check_info(info: FeedInfo) -> None:
    assert all(type(id) is int and 0 <= id <= MAX_PARTITION for id in info.partitions)
    assert all(id == partition.id for id, partition in info.partitions.items())
    assert (info.token is not None) == (info.dialect == "v2-token")
    for text in (info.token, *(each.last_cursor for each in info.partitions.values())):
        _check_sendable(text or "")


def _check_sendable(text: str) -> None:
    """R18: anything else can't be sent, or can't be stored."""
    assert text.isascii(), "a cursor or token is ASCII"
    assert text.isprintable(), "a cursor or token is printable"
    assert len(text) <= MAX_CURSOR, f"a cursor or token of {len(text)} characters"


def graph(data: bytes) -> None:
    """`Graph`: a `LineageError`, or a graph without cycles whose edges match its partitions."""
    partitions = {}
    for at in range(0, min(len(data), 3 * 64) - 2, 3):
        id, edge, kind = data[at] & 31, data[at + 1] & 31, data[at + 2]
        ancestors = tuple({edge, kind >> 2 & 31}) if kind & 2 else ()
        parent = edge if kind & 1 else None
        partitions[id] = Partition(id, bool(kind & 128), None, parent, ancestors)
    try:
        found = Graph(partitions, feed=FEED)
    except LineageError as error:
        _check_error(error)
        _check(error.partition in partitions, "a lineage error names a partition")
    else:
        _check_graph(found)


def _check_graph(found: Graph) -> None:
    assert str(found) == repr(found)
    planner = Planner(feed=FEED)
    planner.load({})
    planner.discover(FeedInfo("v2-draft", found.partitions))
    before = {p.id: dict.fromkeys(planner.preceding(p.id), 1) for p in found}
    depths: dict[int, int] = {}
    count_before(before, depths)
    for partition in found:
        assert 0 <= depths[partition.id] <= len(found.partitions)
        if partition.starts_after is not None:
            assert partition.id in found.children[partition.starts_after]
        for ancestor in partition.cursor_from:
            assert partition.id in found.successors[ancestor]


# ---------------------------------------------------------------------------------- the rest


def envelope(data: bytes) -> None:
    """`Envelope`: an `EnvelopeError`, or an envelope that encodes to one that decodes the same."""
    for decode in (decode_ack, decode_message):
        try:
            decode(data)
        except EnvelopeError as error:
            _check(str(error).isprintable(), "an error text is printable")
    try:
        found = Envelope.decode(data)
    except EnvelopeError as error:
        _check(bool(error.check), "an error names the check that failed")
        return
    assert Envelope.decode(found.encode()) == found


def import_file(data: bytes) -> None:
    """`parse_export`: a ValueError, or positions that survive an export."""
    try:
        positions = parse_export(data)
    except ValueError as error:
        _check(str(error).isprintable(), "an error text is printable")
        return
    exported = export_positions([FeedPositions(key, each) for key, each in positions.items()])
    again = parse_export(exported)
    assert again == positions, f"{again} != {positions}"


def headers(data: bytes) -> None:
    """`retry_after`: None, or a number of seconds that is neither negative nor infinite."""
    value, _, now = data.decode("latin-1").partition("\n")
    seconds = retry_after(value, now or None)
    assert seconds is None or 0 <= seconds < float("inf")


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each
    for each in (decoder, page, negotiation, graph, envelope, import_file, headers)
}
