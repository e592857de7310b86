"""Times as people write them."""

from __future__ import annotations

import time as clock
from datetime import UTC, datetime, timedelta

import pytest

from feedapi_client.cli.options import time as parse_time

NOW = datetime(2031, 5, 4, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("2 hours ago", timedelta(hours=2)),
        ("1 hour ago", timedelta(hours=1)),
        ("an hour ago", timedelta(hours=1)),
        ("90 min ago", timedelta(minutes=90)),
        ("90min ago", timedelta(minutes=90)),
        ("1h30m ago", timedelta(minutes=90)),
        ("1 day, 6 hours and 30 seconds ago", timedelta(days=1, hours=6, seconds=30)),
        ("1.5 days ago", timedelta(hours=36)),
        ("2 Weeks Ago", timedelta(weeks=2)),
        ("now", timedelta(0)),
    ],
)
def test_a_duration_ago(text: str, ago: timedelta) -> None:
    assert parse_time(text, NOW) == NOW - ago


def test_iso_times() -> None:
    assert parse_time("2031-05-04T10:30:00Z", NOW) == datetime(2031, 5, 4, 10, 30, tzinfo=UTC)
    assert parse_time("2031-05-04T10:30:00+02:00", NOW) == datetime(2031, 5, 4, 8, 30, tzinfo=UTC)


def test_a_time_without_a_zone_is_local() -> None:
    assert parse_time("2031-05-04 10:30", NOW) == datetime(2031, 5, 4, 10, 30).astimezone()


def test_a_time_of_today_is_local() -> None:
    local = NOW.astimezone()
    assert parse_time("10:30", NOW) == local.replace(hour=10, minute=30)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "ago",
        "2 ago",
        "2 parsecs ago",
        "2 hours",
        "hours 2 ago",
        "25:00",
        "2031-13-01",
        "999999999999 weeks ago",
    ],
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"time|range|unit"):
        parse_time(text, NOW)


@pytest.mark.parametrize(("day", "hour"), [("2026-10-25", 13), ("2027-03-28", 12)])
def test_a_time_of_today_is_local_also_when_the_clocks_changed_at_night(
    day: str, hour: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    clock.tzset()
    try:
        now = datetime.fromisoformat(f"{day}T{hour}:30+00:00")
        assert parse_time("1:30", now) == parse_time(f"{day}T01:30", now)
    finally:
        monkeypatch.undo()
        clock.tzset()
