"""Faults in the lines of a response: events, checkpoints and what does not belong there."""

# ruff: noqa: ARG002, D102 - all faults have the one signature, which `Fault` documents

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from feedapi_client.testing.publisher.faults.response_faults import (
    Edit,
    Rewrite,
    page_without_events,
)
from feedapi_client.testing.publisher.requests import Request
from feedapi_client.testing.publisher.responses import (
    Response,
    cut,
    parse_lines,
    without_stream,
)

if TYPE_CHECKING:
    from feedapi_client.testing.publisher.feed import Feed


@dataclass(frozen=True)
class CutLine:
    """A complete response whose body ends in the middle of a line, followed by `text`.

    By default in the middle of the last line, else in the middle of the one after `after_lines`
    whole lines.
    """

    after_lines: int | None = None
    text: str = ""

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        whole = without_stream(response)
        whole.body = cut(whole.body, None, self.after_lines) + self.text.encode()
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

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        whole = without_stream(response)
        whole.body = whole.body.removesuffix(b"\n")
        return whole


@dataclass(frozen=True)
class NoCheckpoint:
    """Events and no cursor. The first `keep` checkpoints stay."""

    keep: int = 0

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        seen = 0

        def drop(lines: bytes) -> bytes:
            nonlocal seen
            kept = []
            for line, command in parse_lines(lines):
                seen += "cursor" in command
                if "cursor" not in command or seen <= self.keep:
                    kept.append(line)
            return b"".join(kept)

        return Rewrite(drop)(response, request, publisher)


@dataclass(frozen=True)
class SameCheckpoint:
    """Events, with the cursor of the request as their only cursor."""

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        asked = request.cursor

        def repeat(lines: bytes) -> bytes:
            return b"".join(
                orjson.dumps({**command, "cursor": asked}) + b"\n" if "cursor" in command else line
                for line, command in parse_lines(lines)
            )

        return Rewrite(repeat)(response, request, publisher)


@dataclass(frozen=True)
class EmptyPage:
    """A page without events.

    Its cursor differs from the one of the request and stands for the same position. With
    ``moving=False`` it is the cursor of the request.
    """

    moving: bool = True

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        if response.status != 200 or request.cursor is None or request.partition is None:
            return response
        cursor = (
            publisher.another_cursor(request.partition, request.cursor)
            if self.moving
            else request.cursor
        )
        return page_without_events(publisher, request.partition, cursor)


@dataclass(frozen=True)
class EndlessLine:
    """A line that never ends, after the usual lines of the page."""

    piece: int = 65536

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        whole = without_stream(response)
        whole.body += _event_start(publisher) + b'{"endless":"'

        def more() -> Iterator[bytes]:
            while True:
                yield b"x" * self.piece

        whole.endless = more
        return whole


@dataclass(frozen=True)
class EndlessRun:
    """Events without end and without a checkpoint: those of the page, again and again."""

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        whole = without_stream(response)
        events = b"".join(line for line, value in parse_lines(whole.body) if "cursor" not in value)
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

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        inserted = b"".join(orjson.dumps(command) + b"\n" for command in self.commands)

        def insert(lines: bytes) -> bytes:
            return b"".join(inserted + line for line, _ in parse_lines(lines))

        return Rewrite(insert)(response, request, publisher)


@dataclass(frozen=True)
class ExtraFields:
    """Unknown fields before and after the known ones.

    They are in every line, or in discovery and each of its partitions.
    """

    def __call__(self, response: Response, request: Request, publisher: Feed, /) -> Response:
        if request.kind == "discovery":
            return Edit(_with_extras)(response, request, publisher)
        return Rewrite(_with_extra_fields)(response, request, publisher)


def _event_start(publisher: Feed) -> bytes:
    return b'{"event":' if publisher.dialect == "v2-draft" else b'{"data":'


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
