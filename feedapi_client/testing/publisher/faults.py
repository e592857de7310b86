"""What can go wrong at a publisher. Use it with `Publisher.fail`.

::

    publisher.fail(503, times=2)  # an error status, on fetch
    publisher.fail(Status(429, headers={"retry-after": "1"}), partition=3)
    publisher.fail(Replace({"partitions": [{"id": "70000"}]}), on="discovery", times=None)
    publisher.fail(Truncate(after_lines=7))  # the connection ends in the middle of line eight
    publisher.fail(Replace({"status": "down"}), on="any", seconds=0.6)  # a gateway, for a while
    publisher.fail(Lag(1.5, ahead="tail"), on="any", times=None, share=0.5)  # one of two replicas

Faults that break the connection or the framing (`Reset`, `Truncate`, `BrokenChunk`) need the
publisher on a port (`Publisher.serve`). All others also work through `Publisher.asgi`.

Any function ``(response, request, publisher) -> response`` is a fault too. It may change the
`Response` or return another one.
"""

# ruff: noqa: ARG002 - all faults have the one signature, which `Fault` documents

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, ClassVar, Literal

import orjson

from feedapi_client.model import FIRST, LAST
from feedapi_client.testing.publisher.answers import answer
from feedapi_client.testing.publisher.feed import Feed, decode_cursor
from feedapi_client.testing.publisher.messages import (
    JSON,
    NDJSON,
    TEXT,
    Ending,
    Request,
    Response,
    json_response,
)
from feedapi_client.testing.publisher.rules import Fault

# Another response


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
class Replace:
    """A 200 response with another body: any JSON value, or bytes as they are."""

    body: Any
    content_type: str = JSON

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        body = self.body if isinstance(self.body, bytes) else json_response(self.body).body
        return Response(200, {"content-type": self.content_type}, body)


@dataclass(frozen=True)
class Empty:
    """Status 200 and an empty body."""

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        return Response(200)


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
class Lag:
    """The answer of a replica that is `seconds` behind, in events and in topology.

    `ahead` says how it answers a cursor that is ahead of it:

    - ``echo``: with that cursor,
    - ``tail``: with the cursor of its own end,
    - ``silent``: without a line,
    - ``refused``: with status 400.
    """

    seconds: float
    ahead: Literal["echo", "tail", "silent", "refused"] = "echo"

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        then = publisher.clock() - self.seconds
        moment, cursor, partition = publisher.at(then), request.cursor, request.partition
        if response.status != 200 or self.ahead == "refused" or cursor in (None, FIRST, LAST):
            return answer(publisher, request, then)
        if partition in moment.closed and decode_cursor(cursor)[1] > moment.next_seq:
            tail = publisher.cursor(partition, publisher.logs[partition].end(moment.next_seq))
            answers = {"echo": cursor, "tail": tail, "silent": None}
            return _page_without_events(publisher, partition, answers[self.ahead])
        return answer(publisher, request, then)


@dataclass(frozen=True)
class EmptyPage:
    """A page without events.

    Its cursor differs from the one of the request and stands for the same position. With
    ``moving=False`` it is the cursor of the request.
    """

    moving: bool = True

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        cursor, partition = request.cursor, request.partition
        if response.status != 200 or cursor is None or partition is None:
            return response
        if self.moving:
            cursor = publisher.another_cursor(partition, cursor)
        return _page_without_events(publisher, partition, cursor)


def _page_without_events(publisher: Feed, partition: int, cursor: str | None) -> Response:
    lead = {"partition": partition} if publisher.dialect == "v1" else {}
    line = b"" if cursor is None else orjson.dumps({**lead, "cursor": cursor}) + b"\n"
    return Response(200, {"content-type": NDJSON}, line)


# Connection and timing


@dataclass(frozen=True)
class _Break:
    """The response ends early: before anything is sent, or at a place in its body."""

    after_bytes: int | None = None
    after_lines: int | None = None

    ending: ClassVar[Ending]

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        whole = response.whole()
        whole.send_head = self.after_bytes is not None or self.after_lines is not None
        whole.content_length, whole.ending = len(whole.body) + 1, self.ending
        cut = _cut(whole.body, self.after_lines, self.after_bytes)
        whole.body = cut if whole.send_head else b""
        return whole


@dataclass(frozen=True)
class Reset(_Break):
    """The connection is reset.

    By default before anything is sent, else after a number of bytes of the body, or after a number
    of whole lines and half of the next line.
    """

    ending = "reset"


@dataclass(frozen=True)
class Hang(_Break):
    """The connection stays open and nothing more is sent: places as of `Reset`."""

    ending = "hang"


@dataclass(frozen=True)
class Truncate:
    """The connection is closed in the middle of the body: places as of `Reset`.

    Content-Length, or chunked framing, promised more. By default it happens in the middle of the
    last line.
    """

    after_bytes: int | None = None
    after_lines: int | None = None
    chunked: bool = False

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        whole = response.whole()
        whole.content_length = None if self.chunked else len(whole.body) + 1
        whole.body, whole.ending = _cut(whole.body, self.after_lines, self.after_bytes), "close"
        return whole


@dataclass(frozen=True)
class BrokenChunk:
    """Chunked framing that is garbage after the first chunk."""

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        return replace(response.whole(), ending="garbage")


@dataclass(frozen=True)
class Delay:
    """The response is sent `seconds` late."""

    seconds: float

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        return replace(response, delay=self.seconds)


@dataclass(frozen=True)
class Trickle:
    """The body in small pieces, `interval` seconds apart."""

    piece: int = 1
    interval: float = 0.0

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        return replace(response, piece_size=self.piece, interval=self.interval)


@dataclass(frozen=True)
class Gzip:
    """The body is compressed, although the request did not allow it."""

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        whole = response.whole()
        headers = {**whole.headers, "content-encoding": "gzip"}
        return replace(whole, body=gzip.compress(whole.body), headers=headers)


@dataclass(frozen=True)
class Both:
    """Several faults at once, applied one after the other: ``Both((Delay(0.5), ErrorText()))``."""

    faults: tuple[Fault, ...]

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        for fault in self.faults:
            response = fault(response, request, publisher)
        return response


# Discovery


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
            response.body = json_response(value if changed is None else changed).body
        return response


# The body, and its lines


@dataclass(frozen=True)
class CutLine:
    """A complete response whose body ends in the middle of a line, followed by `text`.

    By default in the middle of the last line, else in the middle of the one after `after_lines`
    whole lines.
    """

    after_lines: int | None = None
    text: str = ""

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        whole = response.whole()
        return replace(whole, body=_cut(whole.body, self.after_lines) + self.text.encode())


@dataclass(frozen=True)
class ErrorText(CutLine):
    """Error text in the middle of a 200 response.

    This is what a web framework sends when the publisher fails midway.
    """

    text: str = "Internal server error"


@dataclass(frozen=True)
class NoFinalNewline:
    r"""A complete response whose last line has no ``\n``."""

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        whole = response.whole()
        return replace(whole, body=whole.body.removesuffix(b"\n"))


@dataclass(frozen=True)
class EndlessLine:
    """A line that never ends, after the usual lines of the page."""

    piece: int = 65536

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        whole = response.whole()
        whole.body += _event_start(publisher) + b'{"endless":"'
        whole.endless = b"x" * self.piece
        return whole


@dataclass(frozen=True)
class EndlessRun:
    """Events without end and without a checkpoint: those of the page, again and again."""

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        whole = NoCheckpoint()(response.whole(), request, publisher)
        whole.body = whole.body or _event_start(publisher) + b'{"endless":true}}\n'
        whole.endless = whole.body * max(1, 65536 // len(whole.body))
        return whole


def _event_start(publisher: Feed) -> bytes:
    return b'{"event":' if publisher.dialect == "v2-draft" else b'{"data":'


@dataclass(frozen=True)
class Rewrite:
    """A 200 response whose body, and the lines of its stream, went through a function."""

    change: Callable[[bytes], bytes]

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        if response.status != 200:
            return response
        response.body = self.change(response.body)
        if response.stream is not None:
            next_lines = response.stream.next_lines

            def changed() -> tuple[bytes, bool]:
                lines, ended = next_lines()
                return self.change(lines), ended

            response.stream.next_lines = changed
        return response


class _Lines:
    """Changes each line of a page, also of a streamed one."""

    def changing(self, request: Request) -> Callable[[bytes], bytes]:
        """Return what makes of each line, without its line end, what is sent in its place."""
        raise NotImplementedError

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        line = self.changing(request)

        def change(lines: bytes) -> bytes:
            return b"".join(line(each) for each in lines.split(b"\n")[:-1])

        return Rewrite(change)(response, request, publisher)


@dataclass(frozen=True)
class NoCheckpoint(_Lines):
    """Events and no cursor. The first `keep` checkpoints stay."""

    keep: int = 0

    def changing(self, request: Request) -> Callable[[bytes], bytes]:
        checkpoints = count(1)

        def kept(line: bytes) -> bytes:
            dropped = "cursor" in orjson.loads(line) and next(checkpoints) > self.keep
            return b"" if dropped else line + b"\n"

        return kept


@dataclass(frozen=True)
class SameCheckpoint(_Lines):
    """Events, with the cursor of the request as their only cursor."""

    def changing(self, request: Request) -> Callable[[bytes], bytes]:
        def same(line: bytes) -> bytes:
            command = orjson.loads(line)
            if "cursor" in command:
                line = orjson.dumps({**command, "cursor": request.cursor})
            return line + b"\n"

        return same


@dataclass(frozen=True)
class UnknownCommands(_Lines):
    """Lines that are neither events nor checkpoints, before each line of the response."""

    commands: tuple[Any, ...] = (
        {"command": "partitions-changed"},
        {"resync": True, "partition": 0},
        {},
    )

    def changing(self, request: Request) -> Callable[[bytes], bytes]:
        before = b"".join(orjson.dumps(each) + b"\n" for each in self.commands)
        return lambda line: before + line + b"\n"


@dataclass(frozen=True)
class ExtraFields(_Lines):
    """Unknown fields before and after the known ones.

    They are in every line, or in discovery and each of its partitions.
    """

    def changing(self, request: Request) -> Callable[[bytes], bytes]:
        # Not decoded, so that payloads stay as they are byte for byte.
        before, behind = b'{"x-before":[1,{"data":2}],', b',"x-behind":{"cursor":null}}\n'
        return lambda line: before + line[1:-1] + behind

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        if request.kind == "discovery":
            return Edit(_with_extras)(response, request, publisher)
        return super().__call__(response, request, publisher)


def _with_extras(found: dict[str, Any]) -> dict[str, Any]:
    partitions = [
        {"x-rack": [1, {"a": None}], **partition, "weight": 0.5}
        for partition in found["partitions"]
    ]
    return {"x-build": {"n": 1}, **found, "partitions": partitions, "maxLag": None}


def _cut(body: bytes, after_lines: int | None, after_bytes: int | None = None) -> bytes:
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
