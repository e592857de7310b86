"""The Retry-After header."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.http.transport import retry_after

WEDNESDAY = "Wed, 21 Oct 2015 07:28:00 GMT"


@pytest.mark.parametrize(
    ("value", "date", "seconds"),
    [
        ("7", None, 7.0),
        ("0", None, 0.0),
        ("1.5", None, 1.5),
        ("-3", None, 0.0),
        ("-0", None, 0.0),
        ("1" + "0" * 30, None, 1e30),
        ("9" * 400, None, None),
        ("-inf", None, None),
        ("Sat, 31 Dec 99999 23:59:59 GMT", None, None),
        ("Wed, 99 Oct 2015 07:28:00 GMT", None, None),
        ("0x10", None, None),
        ("7, 9", None, None),
        ("\0", None, None),
        ("soon", None, None),
        ("inf", None, None),
        ("nan", None, None),
        ("", None, None),
        (None, None, None),
        # A date is relative to the server's clock.
        (WEDNESDAY, None, 0.0),
        ("Wed, 21 Oct 2015 07:28:10 GMT", WEDNESDAY, 10.0),
        ("Wednesday, 21-Oct-15 07:28:10 GMT", WEDNESDAY, 10.0),
        ("Wed Oct 21 07:28:10 2015", WEDNESDAY, 10.0),
        ("Wed, 21 Oct 2015 09:28:10 +0200", WEDNESDAY, 10.0),
    ],
)
def test_r14_retry_after(value: str | None, date: str | None, seconds: float | None) -> None:
    assert retry_after(value, date) == seconds


def test_r14_retry_after_as_a_date() -> None:
    later = datetime.now(UTC) + timedelta(days=1)
    seconds = retry_after(format_datetime(later, usegmt=True))
    assert seconds is not None
    assert 80_000 < seconds <= 86_400


@given(st.text() | st.from_regex(r"\A[A-Z][a-z]{2}, \d+ Oct \d+ \d+:\d+:\d+ GMT\Z"))
def test_r14_no_retry_after_raises_or_is_negative(value: str) -> None:
    seconds = retry_after(value)
    assert seconds is None or seconds >= 0
