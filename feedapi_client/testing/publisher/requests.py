"""Requests to the publisher, and what their arguments mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl

RequestKind = Literal["discovery", "fetch", "other"]


@dataclass(slots=True)
class Request:
    """A request as `Publisher.requests` keeps it.

    `time` is `time.monotonic()` at its arrival. `status` is None until it is answered.
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


def parse_request(feed_path: str, scope: Mapping[str, Any], now: float) -> Request:
    """Return the request of an ASGI scope. `feed_path` is the path of the feed's URL."""
    query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
    headers = {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }
    request = Request("other", scope["path"], query, headers, now, scope["method"])
    if request.path == feed_path:
        _parse_arguments(request)
    elif request.path == feed_path + "/events":
        request.kind = "fetch"
        request.partition = parse_number(query.get("partition"))
        request.cursor = query.get("cursor")
    return request


def _parse_arguments(request: Request) -> None:
    query = request.query
    v1 = [name for name in query if name.startswith("cursor") and name[6:].isdigit()]
    if "partition" in query or "cursor" in query:
        request.kind = "fetch"
        request.partition = parse_number(query.get("partition"))
        request.cursor = query.get("cursor")
    elif v1 or "n" in query:
        request.kind = "fetch"
        if len(v1) == 1:
            request.partition, request.cursor = int(v1[0][6:]), query[v1[0]]
    else:
        request.kind = "discovery"


def parse_number(text: str | None) -> int | None:
    """Return the number that a query argument holds, None when it holds none."""
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 9):
        return None
    return int(text)
