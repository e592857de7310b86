"""Faults of a response as a whole: another status, another body, or several faults at once."""

# ruff: noqa: ARG002, D102 - all faults have the one signature, which `Fault` documents

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from feedapi_client.testing.publisher.faults.body import without_stream
from feedapi_client.testing.publisher.faults.rules import Fault
from feedapi_client.testing.publisher.requests import Request
from feedapi_client.testing.publisher.responses import JSON, TEXT, Response

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
