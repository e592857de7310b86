"""A feed of dialect v2-token with one partition, whose answers a fault spoils."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import orjson

from tests.faults.responses import whole
from tests.faults.server import Request, Script

Operation = Literal["entry", "running", "fetch", "last"]
"""What a fault spoils: the first discovery of a consumer, a later one, a fetch from a cursor, a
fetch from ``_last``."""
OPERATIONS: tuple[Operation, ...] = ("entry", "running", "fetch", "last")

EVENTS = tuple(range(7))
NEW_EVENTS = tuple(range(100, 103))
"""Of partition 1, which only a discovery after the fault lists."""
LAST = 5
"""How many events are older than the place that ``_last`` stands for."""
PAGE = 3
Spoil = Callable[[bytes], Script]
"""The healthy body in, what is sent instead out."""


@dataclass
class FaultyFeed:
    """The feed. `spoil` answers `times` requests of the operation; None: all of them."""

    operation: Operation
    spoil: Spoil
    times: int | None = 2
    counts: Counter[str] = field(default_factory=Counter)
    spoiled: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, request: Request) -> Script:
        """Answer a request."""
        with self._lock:
            kind = self._kind(request)
            self.counts[kind] += 1
            body = self._body(kind, request)
            if self._spoils(kind):
                self.spoiled += 1
                return self.spoil(body)
        return whole(body)

    @property
    def healed(self) -> bool:
        """Whether no more request will be spoiled."""
        return self.times is not None and self.spoiled >= self.times

    def _kind(self, request: Request) -> str:
        if not request.path.endswith("/events"):
            return "discovery"
        return "last" if request.query.get("cursor") == "_last" else "fetch"

    def _spoils(self, kind: str) -> bool:
        operation = "discovery" if self.operation in ("entry", "running") else self.operation
        if kind != operation or self.healed:
            return False
        # Who fetches has entered. An answer alone may have come too late, and be asked for again.
        return self.operation != "running" or self.counts["fetch"] > 0

    def _body(self, kind: str, request: Request) -> bytes:
        if kind == "discovery":
            return self._discovery()
        if kind == "last":
            return lines({"note": "☃"}, {"cursor": f"c{LAST}"})
        first, events = (100, NEW_EVENTS) if request.query["partition"] == "1" else (0, EVENTS)
        cursor = request.query["cursor"]
        return page(events, 0 if cursor == "_first" else int(cursor[1:]) - first, cursor)

    def _discovery(self) -> bytes:
        ids = ("0", "1") if self.operation == "running" and self.healed else ("0",)
        listed = [{"id": id} for id in ids]
        return orjson.dumps({"token": "t", "partitions": listed, "note": "☃"})


def lines(*values: object) -> bytes:
    """Return values as JSON, one a line."""
    return b"".join(orjson.dumps(value) + b"\n" for value in values)


def page(events: Sequence[int], start: int, asked: str) -> bytes:
    """Return a page with checkpoints after its first and its last event."""
    shown = events[start : start + PAGE]
    if not shown:
        return lines({"note": "☃"}, {"cursor": asked})
    values: list[object] = [{"data": {"n": shown[0], "text": "☃"}}, {"cursor": f"c{shown[0] + 1}"}]
    values += [{"data": {"n": n, "text": "☃"}} for n in shown[1:]]
    return lines(*values, {"cursor": f"c{shown[-1] + 1}"})
