"""A discovery and a page as they were sent, read without the tolerance that a consumer needs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from feedapi_client.cli.doctor.prober import Answer
from feedapi_client.errors import FeedError
from feedapi_client.model import FIRST, LAST, FeedInfo, without_lone_surrogates
from feedapi_client.protocol.dialects import DIALECTS, Dialect
from feedapi_client.protocol.negotiation import negotiate
from feedapi_client.protocol.text import are_valid

_PAYLOAD_KEYS = {dialect.payload_key for dialect in DIALECTS.values()}


def _object(text: bytes | bytearray) -> dict[str, Any] | None:
    with suppress(ValueError):
        value = orjson.loads(without_lone_surrogates(bytes(text)))
        return value if isinstance(value, dict) else None
    return None


@dataclass(slots=True, eq=False)
class Discovery(Answer):
    """A response to the argument-less GET: as JSON, and what a consumer makes of it."""

    document: dict[str, Any] | None = field(init=False, default=None)
    info: FeedInfo | None = field(init=False, default=None)
    refusal: FeedError | None = field(init=False, default=None)

    def read(self, feed: str, count: int | None) -> Discovery:
        if self.problem is None:
            self.document = _object(self.body) if self.status == 200 else None
            try:
                self.info = negotiate(self.status, bytes(self.body), feed=feed, v1_partitions=count)
            except FeedError as error:
                self.refusal = error
        return self

    @property
    def entries(self) -> list[dict[str, Any]]:
        listed = (self.document or {}).get("partitions")
        return [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []


@dataclass(slots=True, eq=False)
class Page(Answer):
    """A response to a fetch: the payloads, and each cursor with the number of events before it.

    `events` are the payloads written in one way, to be compared. `faults` are checks, what they
    say, and words of the publisher that this ends with. It `echoes` where its only cursor is the
    special one of the request, and no event came.
    """

    payloads: list[Any] = field(init=False, default_factory=list)
    events: list[bytes] = field(init=False, default_factory=list)
    checkpoints: list[tuple[str, int]] = field(init=False, default_factory=list)
    faults: list[tuple[str, str, str]] = field(init=False, default_factory=list)
    echoes: bool = field(init=False, default=False)

    def read(self, dialect: Dialect) -> Page:
        """Read the lines of a response; of one that is not whole, the complete ones."""
        if self.status // 100 != 2:
            return self
        *lines, rest = self.body.split(b"\n")
        if self.problem is None and not self.cut:
            lines.append(rest)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                found = self._read_line(line, dialect)
                self.faults += [(id, f"line {number} {text}", said) for id, text, said in found]
        cursors = {cursor for cursor, _ in self.checkpoints}
        self.echoes = cursors == {self.asked} <= {FIRST, LAST} and not self.payloads
        if self.echoes:
            self.checkpoints = []
        elif special := cursors & {FIRST, LAST}:
            self.faults.append(("line-sound", f"a cursor is {special.pop()}", ""))
        return self

    def _read_line(self, line: bytearray, dialect: Dialect) -> list[tuple[str, str, str]]:
        value, key, faults = _object(line), dialect.payload_key, list[tuple[str, str, str]]()
        if value is None:
            return [("line-sound", "is no JSON object", "")]
        if isinstance(value.get("partitions"), list):
            return [("page-meaning", "is a discovery document", "")]
        for name in list(value):
            if (lower := name.lower()) in (key, "cursor") and lower not in value:
                value[lower] = value[name]
                faults.append(("payload-key", f"has {name!r} in place of {lower!r}", ""))
        known = {key, "cursor"} & value.keys()
        for name in set() if known else _PAYLOAD_KEYS & value.keys():
            value[key] = value[name]
            faults.append(("payload-key", f"has an event under {name!r} in place of {key!r}", ""))
        if key in value:
            self.payloads.append(value[key])
            self.events.append(orjson.dumps(value[key], option=orjson.OPT_SORT_KEYS))
            if not isinstance(value[key], (dict, str)):
                text = f"has a payload of the type {type(value[key]).__name__}"
                faults.append(("line-sound", text, ""))
        if "cursor" in value:
            cursor, text = value["cursor"], "has a cursor that can't be sent back: "
            if isinstance(cursor, str):
                self.checkpoints.append((cursor, len(self.payloads)))
            if not (isinstance(cursor, str) and are_valid(cursor)):  # R18
                faults.append(("line-sound", text, ascii(cursor)[:80]))
        if known and dialect.names_partition and str(value.get("partition")) != str(self.partition):
            faults.append(("line-sound", f"does not name partition {self.partition}", ""))
        return faults

    @property
    def cursor(self) -> str | None:
        return self.checkpoints[-1][0] if self.checkpoints else None

    @property
    def closed_events(self) -> list[bytes]:
        return self.events[: self.checkpoints[-1][1]] if self.checkpoints else []

    @property
    def whole(self) -> bool:
        return self.ok and not self.cut and not self.faults

    @property
    def at_end(self) -> bool:
        return self.whole and not self.payloads and self.cursor in (None, self.asked)

    @property
    def moved_to(self) -> str | None:
        """Where the next request goes on; None where this page does not say it."""
        cursor, stays = self.cursor, (self.asked, FIRST, LAST)
        on = self.ok and cursor is not None and cursor not in stays and are_valid(cursor)
        return cursor if on else None
