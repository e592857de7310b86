"""A discovery and a page as they were sent, read without the tolerance that a consumer needs."""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass(slots=True)
class Discovery:
    """A response to the argument-less GET: as JSON, and what a consumer makes of it."""

    answer: Answer
    document: dict[str, Any] | None = None
    info: FeedInfo | None = None
    refusal: FeedError | None = None

    @classmethod
    def read(cls, answer: Answer, feed: str, v1_partitions: int | None) -> Discovery:
        found = cls(answer)
        if answer.problem is None:
            found.document = _object(answer.body) if answer.status == 200 else None
            body, counted = bytes(answer.body), v1_partitions
            try:
                found.info = negotiate(answer.status, body, feed=feed, v1_partitions=counted)
            except FeedError as error:
                found.refusal = error
        return found

    @property
    def entries(self) -> list[dict[str, Any]]:
        listed = (self.document or {}).get("partitions")
        return [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []


@dataclass(slots=True)
class Page:
    """A response to a fetch: the payloads, and each cursor with the number of events before it."""

    answer: Answer
    payloads: list[Any] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)  # payloads written in one way, to be compared
    checkpoints: list[tuple[str, int]] = field(default_factory=list)
    faults: list[tuple[str, str, str]] = field(default_factory=list)
    """Checks, what they say, and words of the publisher that this ends with."""
    echoes: bool = False  # its only cursor is the special one of the request, and no event came

    @classmethod
    def read(cls, answer: Answer, dialect: Dialect) -> Page:
        """Read the lines of a response; of one that is not whole, the complete ones."""
        page = cls(answer)
        if answer.status // 100 != 2:
            return page
        *lines, rest = answer.body.split(b"\n")
        if answer.problem is None and not answer.cut:
            lines.append(rest)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                page._read_line(f"line {number}", line, dialect)
        cursors = {cursor for cursor, _ in page.checkpoints}
        page.echoes = cursors == {page.asked} <= {FIRST, LAST} and not page.payloads
        if page.echoes:
            page.checkpoints = []
        elif special := cursors & {FIRST, LAST}:
            page.faults.append(("line-sound", f"a cursor is {special.pop()}", ""))
        return page

    def _read_line(self, where: str, line: bytearray, dialect: Dialect) -> None:
        def fault(check: str, text: str, said: str = "") -> None:
            self.faults.append((check, f"{where} {text}", said))

        value, key, asked = _object(line), dialect.payload_key, self.answer.question.partition
        if value is None or isinstance(value.get("partitions"), list):
            discovery = ("page-meaning", "is a discovery document")
            fault(*(discovery if value else ("line-sound", "is no JSON object")))
            return
        for name in list(value):
            if (lower := name.lower()) in (key, "cursor") and lower not in value:
                value[lower] = value[name]
                fault("payload-key", f"has {name!r} in place of {lower!r}")
        known = {key, "cursor"} & value.keys()
        for name in set() if known else _PAYLOAD_KEYS & value.keys():
            value[key] = value[name]
            fault("payload-key", f"has an event under {name!r} in place of {key!r}")
        if key in value:
            self.payloads.append(value[key])
            self.events.append(orjson.dumps(value[key], option=orjson.OPT_SORT_KEYS))
            if not isinstance(value[key], (dict, str)):
                fault("line-sound", f"has a payload of the type {type(value[key]).__name__}")
        if "cursor" in value:
            self._read_cursor(value["cursor"], fault)
        if known and dialect.names_partition and str(value.get("partition")) != str(asked):
            fault("line-sound", f"does not name partition {asked}")

    def _read_cursor(self, cursor: object, fault: Callable[..., None]) -> None:
        if isinstance(cursor, str):
            self.checkpoints.append((cursor, len(self.payloads)))
        if not (isinstance(cursor, str) and are_valid(cursor)):  # R18
            fault("line-sound", "has a cursor that can't be sent back: ", ascii(cursor)[:80])

    @property
    def asked(self) -> str:
        return self.answer.question.cursor

    @property
    def cursor(self) -> str | None:
        return self.checkpoints[-1][0] if self.checkpoints else None

    @property
    def closed_events(self) -> list[bytes]:
        return self.events[: self.checkpoints[-1][1]] if self.checkpoints else []

    @property
    def whole(self) -> bool:
        return self.answer.ok and not self.answer.cut and not self.faults

    @property
    def at_end(self) -> bool:
        """Whether it says that nothing comes behind the cursor asked with."""
        return self.whole and not self.payloads and self.cursor in (None, self.asked)

    @property
    def moved_to(self) -> str | None:
        """Where the next request goes on; None where this page does not say it."""
        cursor, stays = self.cursor, (self.asked, FIRST, LAST)
        on = self.answer.ok and cursor is not None and cursor not in stays and are_valid(cursor)
        return cursor if on else None
