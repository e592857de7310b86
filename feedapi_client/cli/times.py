"""Read times as people write them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_SECONDS = {
    "s sec second": 1,
    "m min minute": 60,
    "h hr hour": 3600,
    "d day": 86400,
    "w week": 604800,
}
_UNITS = {unit: seconds for units, seconds in _SECONDS.items() for unit in units.split()}
_UNIT = re.compile(r"(\d+(?:\.\d+)?|\ban?\b)\s*([a-z]+?)s?(?=[\s,\d]|$)", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?")
EXAMPLES = (
    "'2 hours ago', '90 min ago', '1 day 6 hours ago', 14:30, "
    "2031-05-04T14:30 (local time), 2031-05-04T12:30Z"
)


def parse_time(text: str, now: datetime | None = None) -> datetime:
    """Return the time that the text stands for, with a time zone.

    The text is an ISO 8601 time, a time of today, a duration followed by "ago", or "now". Without
    a time zone it is local time. Raises ValueError for any other text, and for a time that is no
    date of the years 1 to 9999 everywhere on earth.
    """
    try:
        return _parse(text.strip(), now or datetime.now(UTC))
    except (OverflowError, OSError):  # OSError by the system's local time
        raise ValueError(f"{text!r} is out of range") from None


def _parse(text: str, now: datetime) -> datetime:
    if text.lower() == "now":
        return now
    if text.lower().endswith("ago"):
        return now - _duration(text[:-3], text)
    try:
        if (clock := _CLOCK.fullmatch(text)) is not None:
            hour, minute, second = int(clock[1]), int(clock[2]), int(clock[3] or 0)
            return now.astimezone().replace(hour=hour, minute=minute, second=second, microsecond=0)
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise ValueError(f"{text!r} is no time: use for example {EXAMPLES}") from None


def _duration(text: str, whole: str) -> timedelta:
    seconds = 0.0
    for number, unit in _UNIT.findall(text):
        if unit.lower() not in _UNITS:
            raise ValueError(f"{whole!r}: {unit!r} is no unit of time")
        seconds += (1.0 if number.lower() in ("a", "an") else float(number)) * _UNITS[unit.lower()]
    rest = re.sub(r"\band\b|,", " ", _UNIT.sub(" ", text))
    if rest.strip() or not seconds:
        raise ValueError(f"{whole!r} is no time: use for example {EXAMPLES}")
    return timedelta(seconds=seconds)
