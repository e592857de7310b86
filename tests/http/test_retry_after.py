"""The Retry-After header."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.http.transport import retry_after


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("-3", 0.0),
        ("-0", 0.0),
        ("1" + "0" * 30, 1e30),
        ("9" * 400, None),
        ("-inf", None),
        ("Sat, 31 Dec 99999 23:59:59 GMT", None),
        ("Wed, 99 Oct 2015 07:28:00 GMT", None),
        ("0x10", None),
        ("7, 9", None),
        ("\0", None),
        ("soon", None),
        ("inf", None),
        ("nan", None),
        ("", None),
        (None, None),
    ],
)
def test_r14_retry_after_in_seconds(value: str | None, seconds: float | None) -> None:
    assert retry_after(value) == seconds


def test_r14_retry_after_as_a_date() -> None:
    later = datetime.now(UTC) + timedelta(days=1)
    seconds = retry_after(format_datetime(later, usegmt=True))
    assert seconds is not None
    assert 80_000 < seconds <= 86_400


def test_r14_retry_after_as_a_date_is_relative_to_the_servers_clock() -> None:
    assert retry_after("Wed, 21 Oct 2015 07:28:10 GMT", "Wed, 21 Oct 2015 07:28:00 GMT") == 10.0


def test_r14_retry_after_in_the_past_is_zero_seconds() -> None:
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


@pytest.mark.parametrize(
    "date",
    [
        "Wed, 21 Oct 2015 07:28:10 GMT",
        "Wednesday, 21-Oct-15 07:28:10 GMT",
        "Wed Oct 21 07:28:10 2015",
        "Wed, 21 Oct 2015 09:28:10 +0200",
    ],
)
def test_r14_retry_after_in_every_format_of_a_date(date: str) -> None:
    assert retry_after(date, "Wed, 21 Oct 2015 07:28:00 GMT") == 10.0


@given(st.text() | st.from_regex(r"\A[A-Z][a-z]{2}, \d+ Oct \d+ \d+:\d+:\d+ GMT\Z"))
def test_r14_no_retry_after_raises_or_is_negative(value: str) -> None:
    seconds = retry_after(value)
    assert seconds is None or seconds >= 0
