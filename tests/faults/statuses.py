"""Statuses, redirects and Retry-After, as data."""

from __future__ import annotations

from tests.faults.feed import Spoil
from tests.faults.outcomes import (
    EMPTY,
    HARMLESS,
    OF_GATEWAY,
    REDIRECTED,
    REFUSED,
    UNAUTHORIZED,
    UNAVAILABLE,
    Fault,
    Outcomes,
)
from tests.faults.responses import head, whole
from tests.faults.server import Script

_EVERY_2XX = Outcomes("NegotiationError", "delivered", "delivered", "page", (1, 3))
_BODY = b"a message of the publisher"


def _status(status: int) -> Script:
    if status in (204, 205, 304):
        length = ["Content-Length: 0"] if status == 205 else []
        return [head(*length, status=f"{status} Status")]
    return whole(_BODY, status=f"{status} Status")


def _row(status: int, outcomes: Outcomes) -> Fault:
    return Fault("status", str(status), lambda _: _status(status), outcomes)


def _content(status: int) -> Fault:
    return Fault(
        "status",
        f"{status} with the content",
        lambda body: whole(body, status=f"{status} Status"),
        _EVERY_2XX,
    )


STATUSES = (
    *(_content(status) for status in (201, 202, 203, 206, 226)),
    *(_row(status, EMPTY) for status in (204, 205)),
    *(_row(status, OF_GATEWAY) for status in (300, 304, 305)),
    *(_row(status, UNAUTHORIZED) for status in (401, 403)),
    *(_row(status, REFUSED) for status in (400, 404, 409, 410)),
    *(_row(status, UNAVAILABLE) for status in (408, 425, 429)),
    *(_row(status, OF_GATEWAY) for status in (402, 405, 406, 407, 411, 418, 421, 422, 451, 499)),
    *(_row(status, UNAVAILABLE) for status in (500, 501, 502, 503, 504, 507, 520, 599, 999)),
)


def _redirect(location: str, status: int = 302) -> Spoil:
    return lambda _: whole(b"", f"Location: {location}", status=f"{status} Found")


_LOCATIONS = {
    "another host": "http://other.invalid/feed",
    "another port": "http://127.0.0.1:9/feed",
    "another scheme": "https://127.0.0.1/feed",
    "ftp": "ftp://127.0.0.1/feed",
    "javascript": "javascript:alert(1)",
    "no host": "http:///feed",
    "a port out of range": "http://127.0.0.1:99999/feed",
    "a port that is no number": "http://127.0.0.1:port/feed",
    "an unclosed bracket": "http://[::1/feed",
    "a host that IDNA refuses": "http://\xb2.invalid/feed",
    "a label of 64 characters": f"http://{'a' * 64}.invalid/feed",
    "a NUL, percent-encoded": "http://%00/feed",
    "credentials for another host": "http://user:secret@other.invalid/feed",
    "bytes that are no UTF-8": "http://\xff\xfe/feed",
    "70,000 characters": "http://other.invalid/" + "x" * 70_000,
}

REDIRECTS = (
    Fault("redirect", "to the same place, twice", _redirect("#again"), HARMLESS),
    *(
        Fault(
            "redirect",
            f"{status} to another host",
            _redirect("//other.invalid/", status),
            REDIRECTED,
        )
        for status in (301, 303, 307, 308)
    ),
    *(
        Fault("redirect", name, _redirect(location), REDIRECTED)
        for name, location in _LOCATIONS.items()
    ),
    Fault("redirect", "no Location", lambda _: whole(b"", status="302 Found"), OF_GATEWAY),
    Fault("redirect", "to itself, without an end", _redirect("#again"), REDIRECTED),
)


def _later(value: str) -> Fault:
    return Fault(
        "Retry-After",
        value if len(value) < 40 else f"{value[0]}, {len(value)} times",
        lambda _: whole(b"", f"Retry-After: {value}", status="503 Busy"),
        UNAVAILABLE,
    )


RETRY_AFTER = tuple(
    _later(value)
    for value in (
        "0",
        "-1",
        "-1e300",
        "nan",
        "inf",
        "1e-9",
        "soon",
        "",
        "Thu, 01 Jan 1970 00:00:00 GMT",
        "Mon, 99 Foo 2026 99:99:99 GMT",
        "9" * 400,
        "0, 0",
    )
)
