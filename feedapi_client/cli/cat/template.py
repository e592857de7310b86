"""``feedapi cat --format``: events by a template with %-verbs, as kcat and rpk have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import typer

from feedapi_client.model import Batch, Event

_PART = re.compile(r"%(?P<verb>.)|\\(?P<escape>.)|(?P<text>[^%\\]+)|(?P<odd>[%\\])", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}

VERBS = {
    "p": "partition",
    "s": "payload, as sent",
    "S": "bytes of the payload",
    "k": "key: the field of --key",
    "K": "bytes of the key",
    "h": "headers as JSON (v1)",
    "c": "cursor of the checkpoint behind the event",
    "i": "number of the event in this run, from 1",
    "%": "a percent sign",
}
"""What each verb stands for."""


@dataclass(slots=True)
class _Line:
    batch: Batch
    event: Event
    key: bytes
    number: int


_WRITE: dict[str, Callable[[_Line], bytes]] = {
    "p": lambda line: b"%d" % line.batch.partition,
    "s": lambda line: line.event.raw,
    "S": lambda line: b"%d" % len(line.event.raw),
    "k": lambda line: line.key,
    "K": lambda line: b"%d" % len(line.key),
    "h": lambda line: orjson.dumps(line.event.headers or {}),
    "c": lambda line: line.batch.cursor.encode(),
    "i": lambda line: b"%d" % line.number,
    "%": lambda _: b"%",
}


class TemplateFormat:
    """Formats events by a template. Writes nothing between them that the template does not hold.

    Arguments:
        template: text with the verbs of `VERBS`, and with the escapes of newline, tab and NUL.
        key: the field of the payload that `%k` stands for; dots lead into nested objects.

    Raises `typer.BadParameter` for an unknown verb, and for `%k` without a key.
    """

    def __init__(self, template: str, key: str | None = None) -> None:
        self._parts = [_part(found) for found in _PART.finditer(template)]
        self._path = key.split(".") if key else []
        self._number = 0
        verbs = {found["verb"] for found in _PART.finditer(template)}
        self._has_key = bool(verbs & {"k", "K"})
        if self._has_key and not key:
            raise typer.BadParameter("--format: %k needs --key FIELD, the field that holds the key")

    def format(self, batch: Batch, events: Sequence[Event]) -> bytes:
        """Return what is printed for `events`, which are the first ones of the batch, or all."""
        return b"".join([self._event(batch, event) for event in events])

    def _event(self, batch: Batch, event: Event) -> bytes:
        self._number += 1
        key = key_of(event, self._path) if self._has_key else b""
        line = _Line(batch, event, key, self._number)
        return b"".join([part if isinstance(part, bytes) else part(line) for part in self._parts])


def key_of(event: Event, path: Sequence[str]) -> bytes:
    """Return a field of a payload: text as it is, other values as JSON, nothing for no field."""
    value: Any = orjson.loads(event.raw)
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        return b""
    return value.encode() if isinstance(value, str) else orjson.dumps(value)


def _part(found: re.Match[str]) -> bytes | Callable[[_Line], bytes]:
    if (verb := found["verb"]) is not None:
        if verb not in _WRITE:
            known = ", ".join(f"%{each} {meaning}" for each, meaning in VERBS.items())
            raise typer.BadParameter(f"--format: there is no verb %{verb}; there are: {known}")
        return _WRITE[verb]
    if (escape := found["escape"]) is not None:
        if escape not in _ESCAPES:
            raise typer.BadParameter(f"--format: there is no escape \\{escape}")
        return _ESCAPES[escape].encode()
    if found["odd"]:
        raise typer.BadParameter(f"--format: {found['odd']} at the end: double it")
    return found["text"].encode()
