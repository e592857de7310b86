"""One request to the publisher and the response to it, before it goes onto the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl

import orjson

RequestKind = Literal["discovery", "fetch", "other"]
Ending = Literal["complete", "close", "reset", "hang"]


@dataclass(slots=True)
class Request:
    """A request as `Publisher.requests` keeps it. `time` is `time.monotonic()` at its arrival; `status` is None until it is answered."""

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
        """The token that was sent, dialect v2-token."""
        return self.query.get("token")

    @property
    def stream(self) -> str | None:
        """The argument `stream`, if there is one."""
        return self.query.get("stream")


def read_request(feed_path: str, scope: Mapping[str, Any], now: float) -> Request:
    """The request of an ASGI scope."""
    query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
    headers = {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }
    request = Request("other", scope["path"], query, headers, now, scope["method"])
    if request.path == feed_path:
        _read_arguments(request)
    elif request.path == feed_path + "/events":
        request.kind = "fetch"
        request.partition = number(query.get("partition"))
        request.cursor = query.get("cursor")
    return request


def _read_arguments(request: Request) -> None:
    query = request.query
    v1 = [name for name in query if name.startswith("cursor") and name[6:].isdigit()]
    if "partition" in query or "cursor" in query:
        request.kind = "fetch"
        request.partition, request.cursor = number(query.get("partition")), query.get("cursor")
    elif v1 or "n" in query:
        request.kind = "fetch"
        if len(v1) == 1:
            request.partition, request.cursor = int(v1[0][6:]), query[v1[0]]
    else:
        request.kind = "discovery"


def number(text: str | None) -> int | None:
    """The number that a query argument holds; None without one."""
    return (
        int(text)
        if text is not None and text.isascii() and text.isdigit() and len(text) <= 9
        else None
    )


@dataclass(slots=True)
class Follow:
    """A response that is held open: `next_chunk` gives the lines that have become available and whether the stream ends with them. `until` is a
    `time.monotonic()`, None for ever."""

    next_chunk: Callable[[], tuple[bytes, bool]]
    until: float | None
    watched: int


@dataclass(slots=True)
class Response:
    """What is sent, and how. Faults change it; see `feedapi_client.testing.faults`.

    `body` is sent in pieces of `piece` bytes (None: at once), each after `interval` seconds, the whole after `delay` seconds. `endless` goes on after
    it without end. `ending` says what follows: a complete response, or the connection is closed, reset or left hanging. `declared` is the
    Content-Length that is announced, None for chunked. `raw` is written to the socket in place of it all.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    follow: Follow | None = None
    transforms: list[Callable[[bytes], bytes]] = field(default_factory=list)
    delay: float = 0.0
    piece: int | None = None
    interval: float = 0.0
    send_head: bool = True
    declared: int | None = None
    chunked: bool = False
    ending: Ending = "complete"
    endless: Callable[[], Iterable[bytes]] | None = None
    raw: bytes | None = None

    @property
    def plain(self) -> bool:
        """Whether it goes out in one piece and at once."""
        return not (
            self.follow
            or self.delay
            or self.piece
            or self.endless
            or self.chunked
            or self.raw is not None
        ) and (self.send_head and self.declared is None and self.ending == "complete")


NDJSON = "application/x-ndjson"
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


def text_response(status: int, text: str) -> Response:
    """A response of plain text."""
    return Response(status, {"content-type": TEXT}, text.encode())


def json_response(value: Any) -> Response:
    """A 200 response with a JSON value."""
    return Response(
        200, {"content-type": JSON}, orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    )


class Refused(Exception):  # noqa: N818
    """A request that is answered with an error status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
