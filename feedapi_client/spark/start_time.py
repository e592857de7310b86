"""Start at a time: ``startingTimestamp``, ``eventTime`` and what reads them. Imports no Spark.

FeedAPI has no search by time. A partition is therefore read from its first event, and everything
before the first event at or after the time is dropped where it is fetched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson

from feedapi_client.errors import ProtocolError
from feedapi_client.model import Event
from feedapi_client.protocol.decoder import CheckpointedEvents

MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1}
"""Microseconds of each unit of a time that is a number."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NUMBER = re.compile(r"-?\d+")
_MEMBER = r"[^.\[\]'\"$\s]+"
_PATH = re.compile(rf"(?:\$\.)?{_MEMBER}(?:\.{_MEMBER})*")


def parse_timestamp(value: str) -> int:
    """Return microseconds since 1970 of option ``startingTimestamp``. Raises `ValueError`."""
    found = microseconds(value.strip(), "ms")
    if found is None:
        raise ValueError(
            "must be milliseconds since 1970, or a time such as 2026-11-01T00:00:00Z; without an "
            "offset it is UTC"
        )
    return found


def parse_path(value: str) -> tuple[str, ...]:
    """Return the member names of option ``eventTime``, outermost first. Raises `ValueError`."""
    if not _PATH.fullmatch(value.strip()):
        raise ValueError("must be the path of a member of the payload, such as $.meta.createdAt")
    return tuple(value.strip().removeprefix("$.").split("."))


def microseconds(value: Any, unit: str) -> int | None:
    """Return microseconds since 1970 of a time in JSON; None where it is none.

    A time is a number, or text: ISO 8601 (UTC where there is no offset), or digits, which are a
    number.
    """
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value):
            return _of_text(value)
        value = int(value) if len(value) < 40 else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return math.floor(value * MICROSECONDS[unit])


def _of_text(value: str) -> int | None:
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        return None
    time = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    return (time - _EPOCH) // timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTime:
    """Where a read starts that starts at a time.

    Arguments:
        at: microseconds since 1970.
        path: names of the members of a payload that lead to the event's time.
        unit: of times that are numbers.
        skip_missing: whether events before the start may lack a time. They are dropped then;
            otherwise the first of them is an error.
    """

    at: int
    path: tuple[str, ...]
    unit: str = "ms"
    skip_missing: bool = False

    def time_of(self, event: Event) -> int | None:
        """Return the time of the event; None where it has none that can be read."""
        try:
            found = orjson.loads(memoryview(event._payload))
        except ValueError:
            return None
        for name in self.path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return microseconds(found, self.unit)

    def rest_of(
        self, batch: CheckpointedEvents, *, feed: str, partition: int
    ) -> CheckpointedEvents | None:
        """Return the batch from its first event at or after the time; None when it has none.

        Raises:
            ProtocolError: an event before that one has no time.
        """
        for number, event in enumerate(batch.events):
            time = self.time_of(event)
            if time is None and not self.skip_missing:
                raise self._missing(feed, partition)
            if time is not None and time >= self.at:
                return CheckpointedEvents(batch.events[number:], batch.cursor, batch.size)
        return None

    def _missing(self, feed: str, partition: int) -> ProtocolError:
        path = ".".join(("$", *self.path))
        return ProtocolError(
            f"an event before the start has no time at {path} (a number, or ISO 8601 text), so "
            "that nothing says whether to read it. Correct option eventTime, or drop such events "
            "up to the first one at or after startingTimestamp with missingEventTime=skip",
            feed=feed,
            partition=partition,
        )


def start_time(values: Mapping[str, Any], problems: list[str]) -> StartTime | None:
    """Return the start of the parsed options; None where there is none. Adds to `problems`."""
    if "starting_timestamp" not in values:
        problems += [
            f"option {name} needs startingTimestamp"
            for key, name in _NEED_TIMESTAMP.items()
            if key in values
        ]
        return None
    if values.get("start", "first") != "first":
        problems.append("options startingTimestamp and startingCursors exclude each other")
    if "event_time" not in values:
        problems.append(
            "option startingTimestamp needs eventTime: where the time of an event stands in its "
            "payload"
        )
        return None
    return StartTime(
        at=values["starting_timestamp"],
        path=values["event_time"],
        unit=values.get("event_time_unit", "ms"),
        skip_missing=values.get("missing_event_time", "error") == "skip",
    )


_NEED_TIMESTAMP = {
    "event_time": "eventTime",
    "event_time_unit": "eventTimeUnit",
    "missing_event_time": "missingEventTime",
}
