"""The lines of one response, read without the tolerance that a consumer needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from feedapi_client.cli.doctor.probe_messages import ProbeResponse
from feedapi_client.model import FIRST, LAST, DialectName, without_lone_surrogates
from feedapi_client.protocol import text
from feedapi_client.protocol.dialects import DIALECTS

_PAYLOAD_KEYS = {dialect.payload_key for dialect in DIALECTS.values()}


@dataclass(frozen=True, slots=True)
class LineFault:
    """Something wrong with one line. `kind` is the id of the check that reports it."""

    kind: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A cursor in a page, and how many events of the page come before it."""

    cursor: str
    events_before: int


@dataclass(slots=True)
class WirePage:
    """What one response of a partition holds."""

    answer: ProbeResponse
    payloads: list[Any] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    faults: list[LineFault] = field(default_factory=list)
    lines: int = 0
    longest_line: int = 0
    final_newline: bool = True
    meaningless: int = 0
    """Lines that are neither an event nor a cursor."""
    echoes: bool = False
    """Whether its only cursor is the special one of the request, and no event came (R3)."""

    @property
    def asked(self) -> str:
        """The cursor of the request."""
        return self.answer.question.cursor or ""

    @property
    def cursor(self) -> str | None:
        """The last cursor."""
        return self.checkpoints[-1].cursor if self.checkpoints else None

    def events(self) -> list[bytes]:
        """Its payloads, written in one way, to be compared."""
        return [orjson.dumps(each, option=orjson.OPT_SORT_KEYS) for each in self.payloads]

    @property
    def whole(self) -> bool:
        """Whether all that the publisher sent was read, without a fault."""
        return self.answer.ok and not self.answer.cut and not self.faults

    @property
    def at_end(self) -> bool:
        """Whether it says that nothing comes behind the cursor asked with."""
        return self.whole and not self.payloads and self.cursor in (None, self.asked)

    @property
    def moved_to(self) -> str | None:
        """Where the next request goes on; None where this page does not say it."""
        usable = self.answer.ok and self.cursor not in (None, self.asked, FIRST, LAST)
        return self.cursor if usable else None


def read_page(answer: ProbeResponse, dialect: DialectName) -> WirePage:
    """Read the lines of a response. Of one that was cut, only the complete ones."""
    page = WirePage(answer)
    if answer.status is None or not 200 <= answer.status < 300:
        return page
    *lines, rest = answer.body.split(b"\n")
    complete = answer.problem is None and not answer.cut
    if rest and complete:
        page.final_newline = False
        lines.append(rest)
    page.longest_line = max(map(len, (*lines, rest)), default=0)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            page.lines += 1
            page.faults += _read_line(page, number, line, dialect)
    special = [each for each in page.faults if each.kind == "cursor-special"]
    if special and not page.payloads and {each.cursor for each in page.checkpoints} == {page.asked}:
        page.faults = [each for each in page.faults if each not in special]
        page.checkpoints, page.echoes = [], True
    return page


def _read_line(
    page: WirePage, number: int, line: bytes, dialect: DialectName
) -> Iterator[LineFault]:
    try:
        value = orjson.loads(without_lone_surrogates(line))
    except ValueError:
        yield LineFault("line-json", number, "is not JSON")
        return
    if not isinstance(value, dict):
        yield LineFault("line-json", number, "is JSON, but no object")
        return
    key = DIALECTS[dialect].payload_key
    if isinstance(value.get("partitions"), list):
        yield LineFault("page-discovery", number, "is a discovery document")
        return
    yield from _other_case(number, value, key)
    if key in value:
        page.payloads.append(value[key])
        if not isinstance(value[key], (dict, str)):
            kind = type(value[key]).__name__
            yield LineFault("payload-type", number, f"has a payload of the type {kind}")
    elif "cursor" not in value and (others := _PAYLOAD_KEYS & value.keys()):
        other = others.pop()
        page.payloads.append(value[other])
        yield LineFault("payload-key", number, f"has an event under {other!r} in place of {key!r}")
    elif "cursor" not in value:
        page.meaningless += 1
    if "cursor" in value:
        yield from _read_cursor(page, number, value["cursor"])
    if dialect == "v1" and {key, "cursor"} & value.keys():
        asked = page.answer.question.partition
        if str(value.get("partition")) != str(asked):
            yield LineFault("line-partition", number, f"does not name partition {asked}")


def _other_case(number: int, value: dict[str, Any], key: str) -> Iterator[LineFault]:
    """Read keys in another case as if they were in the right one."""
    for name in list(value):
        lower = name.lower()
        if lower != name and lower in (key, "cursor") and lower not in value:
            value[lower] = value[name]
            yield LineFault("key-case", number, f"has {name!r} in place of {lower!r}")


def _read_cursor(page: WirePage, number: int, cursor: object) -> Iterator[LineFault]:
    if not isinstance(cursor, str):
        yield LineFault("cursor-text", number, f"has a cursor of the type {type(cursor).__name__}")
        return
    page.checkpoints.append(Checkpoint(cursor, len(page.payloads)))
    if not text.are_valid(cursor):
        yield LineFault("cursor-text", number, f"has a cursor that is {text.problem(cursor)}")
    elif cursor in (FIRST, LAST):
        yield LineFault("cursor-special", number, f"has the special cursor {cursor}")
