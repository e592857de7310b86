"""HTTP responses as scripts: the healthy one, and pieces of broken ones."""

from __future__ import annotations

from tests.faults.server import Script

SNOWMAN = "☃".encode()
"""In every healthy body, to cut a UTF-8 sequence in."""


def head(*headers: str, status: str = "200 OK") -> bytes:
    """Return a status line, headers and the empty line."""
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode("latin-1")


def whole(body: bytes, *headers: str, status: str = "200 OK") -> Script:
    """Return a complete response with Content-Length."""
    return [head(f"Content-Length: {len(body)}", *headers, status=status) + body]


def chunked(*headers: str) -> bytes:
    """Return the head of a chunked response."""
    return head("Transfer-Encoding: chunked", *headers)


def chunk(data: bytes) -> bytes:
    """Return one chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


END_OF_CHUNKS = b"0\r\n\r\n"


def half(body: bytes) -> int:
    """Return where to cut: behind the first line of a page, in the middle of a discovery."""
    line = body.find(b"\n") + 1
    return line if 0 < line < len(body) else len(body) // 2


def in_line(body: bytes) -> int:
    """Return where to cut in the middle of the last line."""
    return len(body) - 6


def in_character(body: bytes) -> int:
    """Return where to cut in the middle of a UTF-8 sequence."""
    return body.index(SNOWMAN) + 1
