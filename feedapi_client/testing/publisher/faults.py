"""What can go wrong at a publisher. Use it with `Publisher.fail`.

::

    publisher.fail(503, times=2)  # an error status, on fetch
    publisher.fail(Status(429, headers={"retry-after": "1"}), partition=3)
    publisher.fail(Replace({"partitions": [{"id": "70000"}]}), on="discovery", times=None)
    publisher.fail(Truncate(after_lines=7))  # the connection ends in the middle of line eight

Faults that break the connection or the framing (`Reset`, `Truncate`, `BrokenChunk`) need the
publisher on a port (`Publisher.serve`). All others also work through `Publisher.asgi`.

Any function ``(response, request, publisher) -> response`` is a fault too. It may change the
`Response` or return another one.
"""

# ruff: noqa: ARG002, D102 - all faults have the one signature, which `Fault` documents

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from feedapi_client.testing.publisher.fault_rules import Fault as Fault
from feedapi_client.testing.publisher.fault_rules import FaultRule as FaultRule
from feedapi_client.testing.publisher.fault_rules import FaultTarget as FaultTarget
from feedapi_client.testing.publisher.requests import Request
from feedapi_client.testing.publisher.responses import JSON, TEXT, Response

if TYPE_CHECKING:
    from feedapi_client.testing.publisher.publisher import Publisher


def as_fault(fault: int | Fault) -> Fault:
    """Return a fault: the given one, or one for an error status."""
    return Status(fault) if isinstance(fault, int) else fault


@dataclass(frozen=True)
class Status:
    """A response with a status, headers and body of your choice."""

    code: int
    body: str | bytes = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        body = self.body.encode() if isinstance(self.body, str) else self.body
        return Response(self.code, {"content-type": TEXT, **self.headers}, body)


@dataclass(frozen=True)
class Redirect:
    """A redirect, to a path of the same origin or to another URL."""

    location: str
    code: int = 302

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        return Response(self.code, {"location": self.location})


@dataclass(frozen=True)
class Html:
    """An HTML page with status 200, as a login proxy answers."""

    body: str = (
        "<!DOCTYPE html><html><head><title>Sign in</title></head>"
        "<body><form>Please sign in</form></body></html>"
    )

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        return Response(200, {"content-type": "text/html; charset=utf-8"}, self.body.encode())


@dataclass(frozen=True)
class Replace:
    """A 200 response with another body: any JSON value, or bytes as they are."""

    body: Any
    content_type: str = JSON

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
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

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
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

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        if response.status == 200:
            response.body = self.change(response.body)
            response.transforms.append(self.change)
        return response


@dataclass(frozen=True)
class Reset:
    """The connection is reset.

    By default before anything is sent, else after a number of bytes of the body, or after a number
    of whole lines and half of the next line.
    """

    after_bytes: int | None = None
    after_lines: int | None = None

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        before = self.after_bytes is None and self.after_lines is None
        whole = _without_stream(response)
        kept = b"" if before else _cut(whole.body, self.after_bytes, self.after_lines)
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

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        whole = _without_stream(response)
        kept = _cut(whole.body, self.after_bytes, self.after_lines)
        whole.content_length = None if self.chunked else len(whole.body) + 1
        whole.body, whole.ending, whole.chunked = kept, "close", self.chunked
        return whole


@dataclass(frozen=True)
class BrokenChunk:
    """Chunked framing that is garbage after the first chunk."""

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        whole = _without_stream(response)
        head = (
            b"HTTP/1.1 200 OK\r\n"
            b"content-type: application/x-ndjson\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        first_chunk = b"%x\r\n" % len(whole.body) + whole.body + b"\r\n"
        whole.raw = head + first_chunk + b"this is no chunk size\r\n"
        return whole


@dataclass(frozen=True)
class CutLine:
    """A complete response whose body ends in the middle of a line, followed by `text`.

    By default in the middle of the last line, else in the middle of the one after `after_lines`
    whole lines.
    """

    after_lines: int | None = None
    text: str = ""

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        whole = _without_stream(response)
        whole.body = _cut(whole.body, None, self.after_lines) + self.text.encode()
        return whole


@dataclass(frozen=True)
class ErrorText(CutLine):
    """Error text in the middle of a 200 response.

    This is what a web framework sends when the publisher fails midway.
    """

    text: str = "Internal server error"


@dataclass(frozen=True)
class NoFinalNewline:
    r"""A complete response whose last line has no ``\n``."""

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        whole = _without_stream(response)
        whole.body = whole.body.removesuffix(b"\n")
        return whole


@dataclass(frozen=True)
class NoCheckpoint:
    """Events and no cursor. The first `keep` checkpoints stay."""

    keep: int = 0

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        seen = 0

        def drop(lines: bytes) -> bytes:
            nonlocal seen
            kept = []
            for line, command in _lines(lines):
                seen += "cursor" in command
                if "cursor" not in command or seen <= self.keep:
                    kept.append(line)
            return b"".join(kept)

        return Rewrite(drop)(response, request, publisher)


@dataclass(frozen=True)
class SameCheckpoint:
    """Events, with the cursor of the request as their only cursor."""

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        asked = request.cursor

        def repeat(lines: bytes) -> bytes:
            return b"".join(
                orjson.dumps({**command, "cursor": asked}) + b"\n" if "cursor" in command else line
                for line, command in _lines(lines)
            )

        return Rewrite(repeat)(response, request, publisher)


@dataclass(frozen=True)
class EmptyPage:
    """A page without events.

    Its cursor differs from the one of the request and stands for the same position. With
    ``moving=False`` it is the cursor of the request.
    """

    moving: bool = True

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        if response.status != 200 or request.cursor is None or request.partition is None:
            return response
        cursor = (
            publisher.another_cursor(request.partition, request.cursor)
            if self.moving
            else request.cursor
        )
        lead = {"partition": request.partition} if publisher.dialect == "v1" else {}
        response.body, response.stream = orjson.dumps({**lead, "cursor": cursor}) + b"\n", None
        return response


@dataclass(frozen=True)
class EndlessLine:
    """A line that never ends, after the usual lines of the page."""

    piece: int = 65536

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        whole = _without_stream(response)
        whole.body += _event_start(publisher) + b'{"endless":"'

        def more() -> Iterator[bytes]:
            while True:
                yield b"x" * self.piece

        whole.endless = more
        return whole


@dataclass(frozen=True)
class EndlessRun:
    """Events without end and without a checkpoint: those of the page, again and again."""

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        whole = _without_stream(response)
        events = b"".join(line for line, value in _lines(whole.body) if "cursor" not in value)
        lines = events or _event_start(publisher) + b'{"endless":true}}\n'
        whole.body = lines

        def more() -> Iterator[bytes]:
            while True:
                yield lines * max(1, 65536 // len(lines))

        whole.endless = more
        return whole


@dataclass(frozen=True)
class UnknownCommands:
    """Lines that are neither events nor checkpoints, before each line of the response."""

    commands: tuple[Any, ...] = (
        {"command": "partitions-changed"},
        {"resync": True, "partition": 0},
        {},
    )

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        inserted = b"".join(orjson.dumps(command) + b"\n" for command in self.commands)

        def insert(lines: bytes) -> bytes:
            return b"".join(inserted + line for line, _ in _lines(lines))

        return Rewrite(insert)(response, request, publisher)


@dataclass(frozen=True)
class ExtraFields:
    """Unknown fields before and after the known ones.

    They are in every line, or in discovery and each of its partitions.
    """

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        if request.kind == "discovery":
            return Edit(_with_extras)(response, request, publisher)
        return Rewrite(_with_extra_fields)(response, request, publisher)


@dataclass(frozen=True)
class Delay:
    """The response is sent `seconds` late."""

    seconds: float

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
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

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        silent = self.after_bytes is None and self.after_lines is None
        whole = _without_stream(response)
        whole.body = b"" if silent else _cut(whole.body, self.after_bytes, self.after_lines)
        whole.ending, whole.send_head, whole.chunked = "hang", not silent, True
        return whole


@dataclass(frozen=True)
class Trickle:
    """The body in small pieces, `interval` seconds apart."""

    piece: int = 1
    interval: float = 0.0

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        response.piece_size, response.interval, response.chunked = self.piece, self.interval, True
        return response


@dataclass(frozen=True)
class Gzip:
    """The body is compressed, although nobody asked for it."""

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        whole = _without_stream(response)
        whole.body = gzip.compress(whole.body)
        whole.headers = {**whole.headers, "content-encoding": "gzip"}
        return whole


@dataclass(frozen=True)
class Both:
    """Several faults at once, applied one after the other: ``Both((Delay(0.5), ErrorText()))``."""

    faults: tuple[Fault, ...]

    def __call__(self, response: Response, request: Request, publisher: Publisher, /) -> Response:
        for fault in self.faults:
            response = fault(response, request, publisher)
        return response


def _without_stream(response: Response) -> Response:
    """Return the response with the first lines of its stream as its whole body."""
    if response.stream is not None:
        response.body += response.stream.next_lines()[0]
        response.stream = None
    return response


def _lines(body: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Give each line, with its line end, and the object that it holds."""
    for line in body.split(b"\n")[:-1]:
        yield line + b"\n", orjson.loads(line)


def _event_start(publisher: Publisher) -> bytes:
    return b'{"event":' if publisher.dialect == "v2-draft" else b'{"data":'


def _cut(body: bytes, after_bytes: int | None, after_lines: int | None) -> bytes:
    if after_bytes is not None:
        return body[:after_bytes]
    lines = body.split(b"\n")[:-1]
    if not lines:
        return body
    whole = len(lines) - 1 if after_lines is None else min(after_lines, len(lines) - 1)
    return (
        b"".join(line + b"\n" for line in lines[:whole])
        + lines[whole][: max(1, len(lines[whole]) // 2)]
    )


def _with_extras(found: dict[str, Any]) -> dict[str, Any]:
    partitions = [
        {"x-rack": [1, {"a": None}], **partition, "weight": 0.5}
        for partition in found["partitions"]
    ]
    return {"x-build": {"n": 1}, **found, "partitions": partitions, "maxLag": None}


def _with_extra_fields(lines: bytes) -> bytes:
    # Not decoded, so that payloads stay as they are byte for byte.
    return b"".join(
        b'{"x-before":[1,{"data":2}],' + line[1:-1] + b',"x-behind":{"cursor":null}}\n'
        for line in lines.split(b"\n")[:-1]
    )
