"""Faults of a response as a whole: another status or body, replicas that lag, gateways."""

# ruff: noqa: ARG002, D102 - all faults have the one signature, which `Fault` documents

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import orjson

from feedapi_client.model import FIRST, LAST
from feedapi_client.testing.publisher.faults.rules import Fault
from feedapi_client.testing.publisher.handler import handle
from feedapi_client.testing.publisher.log_position import LogPosition, decode
from feedapi_client.testing.publisher.requests import Request
from feedapi_client.testing.publisher.responses import (
    JSON,
    NDJSON,
    TEXT,
    Response,
    json_response,
    without_stream,
)

if TYPE_CHECKING:
    from feedapi_client.testing.publisher.feed import Feed


@dataclass(frozen=True)
class Status:
    """A response with a status, headers and body of your choice."""

    code: int
    body: str | bytes = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        body = self.body.encode() if isinstance(self.body, str) else self.body
        return Response(self.code, {"content-type": TEXT, **self.headers}, body)


@dataclass(frozen=True)
class Redirect:
    """A redirect, to a path of the same origin or to another URL."""

    location: str
    code: int = 302

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        return Response(self.code, {"location": self.location})


@dataclass(frozen=True)
class Html:
    """An HTML page with status 200, as a login proxy answers."""

    body: str = (
        "<!DOCTYPE html><html><head><title>Sign in</title></head>"
        "<body><form>Please sign in</form></body></html>"
    )

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        return Response(200, {"content-type": "text/html; charset=utf-8"}, self.body.encode())


@dataclass(frozen=True)
class Replace:
    """A 200 response with another body: any JSON value, or bytes as they are."""

    body: Any
    content_type: str = JSON

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        body = (
            self.body
            if isinstance(self.body, bytes)
            else orjson.dumps(self.body, option=orjson.OPT_NON_STR_KEYS)
        )
        return Response(200, {"content-type": self.content_type}, body)


@dataclass(frozen=True)
class Edit:
    """A changed discovery object.

    `change` gets the decoded object. It returns another one, or changes it and returns None.
    """

    change: Callable[[Any], Any]

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        if response.status == 200 and request.kind == "discovery":
            value = orjson.loads(response.body)
            changed = self.change(value)
            response.body = orjson.dumps(
                value if changed is None else changed, option=orjson.OPT_NON_STR_KEYS
            )
        return response


@dataclass(frozen=True)
class Rewrite:
    """A 200 response whose body, and the lines of its stream, went through a function."""

    change: Callable[[bytes], bytes]

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        if response.status == 200:
            response.body = self.change(response.body)
            response.transforms.append(self.change)
        return response


@dataclass(frozen=True)
class Gzip:
    """The body is compressed, although the request did not allow it."""

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        whole = without_stream(response)
        whole.body = gzip.compress(whole.body)
        whole.headers = {**whole.headers, "content-encoding": "gzip"}
        return whole


@dataclass(frozen=True)
class Both:
    """Several faults at once, applied one after the other: ``Both((Delay(0.5), ErrorText()))``."""

    faults: tuple[Fault, ...]

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        for fault in self.faults:
            response = fault(response, request, publisher)
        return response


@dataclass(frozen=True)
class Lag:
    """The answer of a replica that is `seconds` behind, in events and in topology.

    `ahead` says how it answers a cursor that is ahead of it:

    - ``echo``: with that cursor,
    - ``tail``: with an older one, of the last place that both have reached: its own end, but where
      a page brought events of one entity before earlier ones of another,
    - ``silent``: without a line,
    - ``refused``: with status 400.
    """

    seconds: float
    ahead: Literal["echo", "tail", "silent", "refused"] = "echo"

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        replica = publisher.replica(self.seconds)
        partition, cursor = request.partition, request.cursor
        ahead = response.status == 200 and _is_ahead(replica, partition, cursor)
        if partition is None or cursor is None or not ahead or self.ahead == "refused":
            return handle(replica, request)
        reached = min(decode(cursor).base, decode(replica.end_cursor(partition)).base)
        tail = replica.encode(LogPosition(partition, reached, {}))
        answer = {"echo": cursor, "tail": tail, "silent": None}[self.ahead]
        return page_without_events(publisher, partition, answer)


def _is_ahead(replica: Feed, partition: int | None, cursor: str | None) -> bool:
    if partition is None or cursor is None or replica.log_of(partition) is None:
        return False
    return cursor not in (FIRST, LAST) and replica.is_ahead(cursor)


@dataclass(frozen=True)
class Maintenance:
    """A gateway in maintenance: status 200, with a JSON object that is no page and no discovery."""

    body: Any = field(default_factory=lambda: {"status": "maintenance"})

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        return json_response(self.body)


@dataclass(frozen=True)
class Empty:
    """Status 200 and an empty body."""

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        return Response(200)


@dataclass(frozen=True)
class DroppedQuery:
    """The discovery document in answer to a fetch, as after a redirect that drops the query."""

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        return json_response(publisher.discovery())


@dataclass(frozen=True)
class NoPartitions:
    """A discovery without partitions: null, as Go writes an empty slice, or an empty list."""

    null: bool = True

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        partitions: list[Any] | None = None if self.null else []
        return Edit(lambda found: {**found, "partitions": partitions})(response, request, publisher)


def page_without_events(publisher: Feed, partition: int, cursor: str | None) -> Response:
    """Return a page that holds nothing but a cursor, or without one no line."""
    if cursor is None:
        return Response(200, {"content-type": NDJSON})
    lead = {"partition": partition} if publisher.dialect == "v1" else {}
    line = orjson.dumps({**lead, "cursor": cursor}) + b"\n"
    return Response(200, {"content-type": NDJSON}, line)
