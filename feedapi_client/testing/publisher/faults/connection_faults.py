"""Faults of the connection and of its timing."""

# ruff: noqa: ARG002, D102 - all faults have the one signature, which `Fault` documents

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from feedapi_client.testing.publisher.requests import Request
from feedapi_client.testing.publisher.responses import Response, cut, without_stream

if TYPE_CHECKING:
    from feedapi_client.testing.publisher.feed import Feed


@dataclass(frozen=True)
class Reset:
    """The connection is reset.

    By default before anything is sent, else after a number of bytes of the body, or after a number
    of whole lines and half of the next line.
    """

    after_bytes: int | None = None
    after_lines: int | None = None

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        before = self.after_bytes is None and self.after_lines is None
        whole = without_stream(response)
        kept = b"" if before else cut(whole.body, self.after_bytes, self.after_lines)
        whole.content_length, whole.body, whole.ending, whole.send_head = (
            max(len(whole.body), len(kept) + 1),
            kept,
            "reset",
            not before,
        )
        return whole


@dataclass(frozen=True)
class Truncate:
    """The connection is closed in the middle of the body.

    Content-Length, or chunked framing, promised more. By default it happens in the middle of the
    last line, else after a number of bytes, or of whole lines and half of the next line.
    """

    after_bytes: int | None = None
    after_lines: int | None = None
    chunked: bool = False

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        whole = without_stream(response)
        kept = cut(whole.body, self.after_bytes, self.after_lines)
        whole.content_length = None if self.chunked else len(whole.body) + 1
        whole.body, whole.ending, whole.chunked = kept, "close", self.chunked
        return whole


@dataclass(frozen=True)
class BrokenChunk:
    """Chunked framing that is garbage after the first chunk."""

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        whole = without_stream(response)
        head = (
            b"HTTP/1.1 200 OK\r\n"
            b"content-type: application/x-ndjson\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        first_chunk = b"%x\r\n" % len(whole.body) + whole.body + b"\r\n"
        whole.raw = head + first_chunk + b"this is no chunk size\r\n"
        return whole


@dataclass(frozen=True)
class Delay:
    """The response is sent `seconds` late."""

    seconds: float

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        response.delay = self.seconds
        return response


@dataclass(frozen=True)
class Hang:
    """The connection stays open and nothing more is sent.

    By default there is no response at all, else nothing after a number of bytes of the body, or
    after a number of whole lines and half of the next line.
    """

    after_bytes: int | None = None
    after_lines: int | None = None

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        silent = self.after_bytes is None and self.after_lines is None
        whole = without_stream(response)
        whole.body = b"" if silent else cut(whole.body, self.after_bytes, self.after_lines)
        whole.ending, whole.send_head, whole.chunked = "hang", not silent, True
        return whole


@dataclass(frozen=True)
class Trickle:
    """The body in small pieces, `interval` seconds apart."""

    piece: int = 1
    interval: float = 0.0

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        response.piece_size, response.interval, response.chunked = self.piece, self.interval, True
        return response
