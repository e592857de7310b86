"""The Retry-After header."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from feedapi_client.http.retry_after import retry_after


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("-3", 0.0),
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
    later = datetime.now(UTC) + timedelta(seconds=60)
    assert 55 < (retry_after(format_datetime(later, usegmt=True)) or 0) <= 60


def test_r14_retry_after_as_a_date_goes_by_the_server_s_clock() -> None:
    assert retry_after("Wed, 21 Oct 2015 07:28:10 GMT", "Wed, 21 Oct 2015 07:28:00 GMT") == 10.0


def test_r14_retry_after_in_the_past_is_now() -> None:
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
