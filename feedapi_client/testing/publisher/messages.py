"""Requests and responses of a publisher, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl

import orjson

RequestKind = Literal["discovery", "fetch", "other"]
Ending = Literal["complete", "close", "reset", "hang", "garbage"]

NDJSON = "application/x-ndjson"
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


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


def json_response(value: Any) -> Response:
    """Return a 200 response with a JSON value, whose keys may be numbers."""
    body = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    return Response(200, {"content-type": JSON}, body)


def parse_request(feed_path: str, scope: Mapping[str, Any], now: float) -> Request:
    """Return the request of an ASGI scope. `feed_path` is the path of the feed's URL."""
    query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
    headers = {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }
    request = Request("other", scope["path"], query, headers, now, scope["method"])
    v1 = [name for name in query if name.startswith("cursor") and name[6:].isdigit()]
    if request.path == feed_path + "/events" or query.keys() & {"partition", "cursor"}:
        request.partition, request.cursor = number(query.get("partition")), query.get("cursor")
    elif len(v1) == 1:
        request.partition, request.cursor = int(v1[0][6:]), query[v1[0]]
    if request.path == feed_path:
        asks = v1 or query.keys() & {"partition", "cursor", "n"}
        request.kind = "fetch" if asks else "discovery"
    elif request.path == feed_path + "/events":
        request.kind = "fetch"
    return request


def number(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 9):
        return None
    return int(text)
