"""Responses of the publisher, before they are sent. Faults change them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

Ending = Literal["complete", "close", "reset", "hang"]

NDJSON = "application/x-ndjson"
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


@dataclass(slots=True)
class EventStream:
    """What follows the body of a response that is held open."""

    next_lines: Callable[[], tuple[bytes, bool]]
    """Returns the lines that have become available, and whether the stream ends with them."""
    seconds: float | None
    """How long the response is held open, None for ever."""
    partition: int
    """The partition whose changes can bring new lines."""


@dataclass(slots=True)
class Response:
    """What is sent, and how. See `feedapi_client.testing.faults` for what changes it."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    stream: EventStream | None = None
    """Lines that are sent after the body, as they become available."""
    transforms: list[Callable[[bytes], bytes]] = field(default_factory=list)
    """Applied to the lines of `stream`."""
    delay: float = 0.0
    """Seconds before anything is sent."""
    piece_size: int | None = None
    """Size of the pieces in which the body is sent; None: all at once."""
    interval: float = 0.0
    """Seconds after each piece."""
    send_head: bool = True
    """Whether status and headers are sent."""
    content_length: int | None = None
    """The Content-Length that is announced. None: the true one, or chunked framing."""
    chunked: bool = False
    """Use chunked framing even where the length is known."""
    ending: Ending = "complete"
    """What follows: the end of the response, or a connection that is closed, reset or hangs."""
    endless: Callable[[], Iterable[bytes]] | None = None
    """Pieces that are sent after the body, without end."""
    raw: bytes | None = None
    """Written to the socket in place of it all."""

    @property
    def is_plain(self) -> bool:
        """Whether it is sent in one piece, at once and completely."""
        takes_time = self.stream or self.delay or self.piece_size or self.endless
        complete = self.send_head and self.content_length is None and self.ending == "complete"
        return complete and not (takes_time or self.chunked or self.raw is not None)


def text_response(status: int, text: str) -> Response:
    """Return a response of plain text."""
    return Response(status, {"content-type": TEXT}, text.encode())


def json_response(value: Any) -> Response:
    """Return a 200 response with a JSON value."""
    body = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    return Response(200, {"content-type": JSON}, body)


def without_stream(response: Response) -> Response:
    """Return the response with the first lines of its stream as its whole body."""
    if response.stream is not None:
        response.body += response.stream.next_lines()[0]
        response.stream = None
    return response


def parse_lines(body: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Give each line, with its line end, and the object that it holds."""
    for line in body.split(b"\n")[:-1]:
        yield line + b"\n", orjson.loads(line)


def cut(body: bytes, after_bytes: int | None, after_lines: int | None) -> bytes:
    """Return the start of a body.

    It ends after a number of bytes, or in the middle of the line after a number of whole lines.
    Without either it ends in the middle of the last line.
    """
    if after_bytes is not None:
        return body[:after_bytes]
    lines = body.split(b"\n")[:-1]
    if not lines:
        return body
    kept = len(lines) - 1 if after_lines is None else min(after_lines, len(lines) - 1)
    half_line = lines[kept][: max(1, len(lines[kept]) // 2)]
    return b"".join(line + b"\n" for line in lines[:kept]) + half_line


class HttpError(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
