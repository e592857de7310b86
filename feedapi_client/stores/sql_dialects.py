"""What the SQL databases do in their own way. They have the names that SQLAlchemy gives them."""

from __future__ import annotations

from collections.abc import Iterable

CLOCKS = {
    # now() is the time at which the transaction began.
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)",
    # NOW() is in the time zone of the session; without (6) there are no fractions.
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    "mariadb": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    # SQLite 3.40 does not know unixepoch('subsec'), and gives NULL: a lease that never expires.
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
}
"""The clock of each database, in microseconds since 1970 UTC."""
MYSQL = ("mysql", "mariadb")
SKIPS_LOCKED = ("postgresql", *MYSQL)
"""Databases that lock the rows of a SELECT, and can pass by those that another transaction holds.

SQLite has one writer at a time.
"""


def typed(dialect: str, kind: str) -> str:
    """Return a parameter of a type, where one of another type would find no index."""
    return f"CAST(? AS {kind})" if dialect == "postgresql" else "?"


def feed_condition(dialect: str) -> str:
    """Return the condition for the rows of a feed, whose `FeedKey.id` is the parameter."""
    return f"feed_id = {typed(dialect, 'CHAR(64)')}"


def listed(numbers: Iterable[int]) -> str:
    """Return numbers as a list of SQL."""
    return ", ".join(str(int(number)) for number in numbers)


def milliseconds(seconds: float) -> str:
    """Return a length of time as PostgreSQL's settings take it."""
    return f"{max(1, round(seconds * 1000))}ms"
