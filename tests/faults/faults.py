"""The faults of connections, timing, framing and content, as data."""

from __future__ import annotations

import gzip
import zlib

from tests.faults import responses
from tests.faults.outcomes import (
    A_DISCOVERY,
    HARMLESS,
    MEANINGLESS,
    NO_FEED,
    TORN,
    UNAVAILABLE,
    UNREADABLE,
    Fault,
)
from tests.faults.responses import (
    END_OF_CHUNKS,
    chunk,
    chunked,
    half,
    head,
    in_character,
    in_line,
    whole,
)
from tests.faults.server import Close, Hold, Repeat, Reset, Script, Slowly

_MAINTENANCE = b'{"status":"maintenance"}\n'
_NULL_LIST = b'{"token":"t","partitions":null}\n'


def _gzipped(body: bytes) -> bytes:
    return gzip.compress(body, mtime=0)


def _cut_chunked(body: bytes, at: int, *then: Close | Hold | Reset) -> Script:
    return [chunked() + chunk(body[:at]), *then]


def _cut_gzip(body: bytes, then: Close | Reset) -> Script:
    # Random-looking text does not compress, so that the cut is behind some of the content.
    packed = _gzipped(body)
    return [chunked("Content-Encoding: gzip") + chunk(packed[: len(packed) // 2]), then]


CONNECTION = (
    Fault("connection", "reset before the response", lambda _: [Reset()], UNAVAILABLE),
    Fault("connection", "closed before the response", lambda _: [Close()], UNAVAILABLE),
    Fault(
        "connection",
        "reset within the headers",
        lambda _: [b"HTTP/1.1 200 OK\r\nContent-Le", Reset()],
        UNAVAILABLE,
    ),
    Fault(
        "connection",
        "closed within the headers",
        lambda _: [b"HTTP/1.1 200 OK\r\nContent-Le", Close()],
        UNAVAILABLE,
    ),
    Fault("connection", "reset after the headers", lambda _: [chunked(), Reset()], TORN),
    Fault("connection", "closed after the headers", lambda _: [chunked(), Close()], TORN),
    Fault(
        "connection",
        "reset between two chunks",
        lambda body: _cut_chunked(body, half(body), Reset()),
        TORN,
    ),
    Fault(
        "connection",
        "closed between two chunks",
        lambda body: _cut_chunked(body, half(body), Close()),
        TORN,
    ),
    Fault(
        "connection",
        "reset within a line",
        lambda body: _cut_chunked(body, in_line(body), Reset()),
        TORN,
    ),
    Fault(
        "connection",
        "reset within a UTF-8 sequence",
        lambda body: _cut_chunked(body, in_character(body), Reset()),
        TORN,
    ),
    Fault(
        "connection",
        "reset within a gzip member",
        lambda body: _cut_gzip(body, Reset()),
        TORN,
    ),
    Fault(
        "connection",
        "closed before the last chunk",
        lambda body: [chunked() + chunk(body[: in_line(body)]), Close()],
        TORN,
    ),
)

TIMING = (
    Fault("timing", "no response", lambda _: [Hold()], UNAVAILABLE),
    Fault(
        "timing", "headers that stop", lambda _: [b"HTTP/1.1 200 OK\r\nX: ", Hold()], UNAVAILABLE
    ),
    Fault(
        "timing",
        "headers without an end, byte by byte",
        lambda _: [b"HTTP/1.1 200 OK\r\nX: ", Repeat(b"x", pause=0.02)],
        UNAVAILABLE,
    ),
    Fault(
        "timing",
        "slow headers",
        lambda body: [Slowly(head(f"Content-Length: {len(body)}")), body],
        HARMLESS,
    ),
    Fault(
        "timing",
        "a body that stops",
        lambda body: _cut_chunked(body, half(body), Hold()),
        TORN,
    ),
    Fault(
        "timing",
        "a slow body",
        lambda body: [head(f"Content-Length: {len(body)}"), Slowly(body)],
        HARMLESS,
    ),
    Fault(
        "timing",
        "the body of an error without an end, byte by byte",
        lambda _: [
            head("Transfer-Encoding: chunked", status="503 Busy"),
            Repeat(chunk(b"x"), pause=0.02),
        ],
        UNAVAILABLE,
    ),
    Fault(
        "timing",
        "100 interim responses (102)",
        lambda body: [b"HTTP/1.1 102 Processing\r\n\r\n" * 100, *responses.whole(body)],
        HARMLESS,
    ),
    Fault(
        "timing",
        "interim responses (102) without an end",
        lambda _: [Repeat(b"HTTP/1.1 102 Processing\r\n\r\n", pause=0.02)],
        UNAVAILABLE,
    ),
    Fault(
        "timing",
        "a flood of interim responses (103)",
        lambda _: [Repeat(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 50)],
        UNAVAILABLE,
    ),
)


def _ended(*parts: bytes) -> Script:
    return [*parts, Close()]


FRAMING = (
    Fault(
        "framing",
        "Content-Length too large",
        lambda body: _ended(head(f"Content-Length: {len(body) + 9}"), body),
        TORN,
    ),
    Fault(
        "framing",
        "Content-Length too small",
        lambda body: _ended(head(f"Content-Length: {in_line(body)}"), body),
        NO_FEED,
    ),
    Fault(
        "framing",
        "Content-Length negative",
        lambda body: _ended(head("Content-Length: -1"), body),
        UNAVAILABLE,
    ),
    Fault(
        "framing",
        "Content-Length not a number",
        lambda body: _ended(head("Content-Length: many"), body),
        UNAVAILABLE,
    ),
    Fault(
        "framing",
        "two Content-Lengths that differ",
        lambda body: _ended(head(f"Content-Length: {len(body)}", "Content-Length: 3"), body),
        UNAVAILABLE,
    ),
    Fault(
        "framing",
        "an unknown Transfer-Encoding",
        lambda body: _ended(head("Transfer-Encoding: rot13"), body),
        UNAVAILABLE,
    ),
    Fault(
        "framing",
        "no length, until the connection closes",
        lambda body: _ended(head("Connection: close"), body),
        HARMLESS,
    ),
    Fault(
        "framing",
        "a chunk size that is no number",
        lambda body: _ended(chunked(), b"zz\r\n", body),
        TORN,
    ),
    Fault(
        "framing",
        "a chunk size that is negative",
        lambda body: _ended(chunked(), b"-5\r\n", body),
        TORN,
    ),
    Fault(
        "framing",
        "a chunk size of 40 digits",
        lambda body: _ended(chunked(), b"f" * 40 + b"\r\n", body),
        TORN,
    ),
    Fault(
        "framing",
        "a chunk longer than its size",
        lambda body: _ended(chunked(), b"%x\r\n%s\r\n" % (half(body), body), END_OF_CHUNKS),
        TORN,
    ),
    Fault(
        "framing",
        "a chunk header without an end",
        lambda _: [chunked() + b"1;x=", Repeat(b"x" * 4096)],
        TORN,
    ),
    Fault(
        "framing",
        "trailers without an end",
        lambda body: [chunked() + chunk(body) + b"0\r\n", Repeat(b"X: " + b"x" * 4000 + b"\r\n")],
        TORN,
    ),
    Fault(
        "framing",
        "headers without an end",
        lambda _: [b"HTTP/1.1 200 OK\r\n", Repeat(b"X: " + b"x" * 4000 + b"\r\n")],
        UNAVAILABLE,
    ),
    Fault("framing", "no HTTP at all", lambda _: _ended(b"\x00\xff" * 100), UNAVAILABLE),
    Fault(
        "framing",
        "a TLS alert",
        lambda _: _ended(b"\x15\x03\x01\x00\x02\x02\x28"),
        UNAVAILABLE,
    ),
    Fault("framing", "HTTP/0.9", _ended, UNAVAILABLE),
    Fault(
        "framing",
        "a status that is no number",
        lambda _: _ended(b"HTTP/1.1 abc OK\r\n\r\n"),
        UNAVAILABLE,
    ),
    Fault(
        "framing",
        "a header with a NUL",
        lambda _: _ended(b"HTTP/1.1 200 OK\r\nX: a\x00b\r\n\r\n"),
        UNAVAILABLE,
    ),
)

HTML = b"<!DOCTYPE html><title>Sign in</title>\n"


def _encoded(packed: bytes, coding: str) -> Script:
    return responses.whole(packed, f"Content-Encoding: {coding}")


CONTENT = (
    Fault("content", "an HTML page", lambda _: responses.whole(HTML), NO_FEED),
    Fault("content", "a JSON list", lambda _: responses.whole(b"[1, 2]"), NO_FEED),
    Fault("content", "binary data", lambda _: responses.whole(b"\x00\xff\xfe\x80" * 8), NO_FEED),
    Fault(
        "content",
        "an error text behind the content",
        lambda body: responses.whole(body + b"Internal server error"),
        NO_FEED,
    ),
    Fault(
        "content",
        "gzip",
        lambda body: _encoded(_gzipped(body), "gzip"),
        HARMLESS,
    ),
    Fault(
        "content",
        "gzip in two members",
        lambda body: _encoded(_gzipped(body[:9]) + _gzipped(body[9:]), "gzip"),
        HARMLESS,
    ),
    Fault(
        "content",
        "deflate",
        lambda body: _encoded(zlib.compress(body), "deflate"),
        HARMLESS,
    ),
    Fault(
        "content",
        "gzip with a wrong checksum",
        lambda body: _encoded(_gzipped(body)[:-8] + b"\0" * 8, "gzip"),
        TORN,
    ),
    Fault(
        "content",
        "gzip cut short in a complete response",
        lambda body: _encoded(_gzipped(body)[:-12], "gzip"),
        TORN,
    ),
    Fault("content", "plain content called gzip", lambda body: _encoded(body, "gzip"), TORN),
    Fault("content", "an unknown coding", lambda body: _encoded(body, "rot13"), UNREADABLE),
    Fault(
        "content",
        "gzip in gzip",
        lambda body: _encoded(_gzipped(_gzipped(body)), "gzip, gzip"),
        UNREADABLE,
    ),
    Fault("content", "an object without meaning", lambda _: whole(_MAINTENANCE), MEANINGLESS),
    Fault("content", "a discovery that lists null", lambda _: whole(_NULL_LIST), A_DISCOVERY),
    Fault(
        "content",
        "payloads under the other dialect's key",
        lambda body: whole(body.replace(b'"data"', b'"event"')),
        HARMLESS,
    ),
    Fault(
        "content",
        "keys in PascalCase",
        lambda body: whole(body.replace(b'"data"', b'"Data"').replace(b'"cursor"', b'"Cursor"')),
        HARMLESS,
    ),
)
