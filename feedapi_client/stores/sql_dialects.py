"""What the SQL databases do in their own way. They have the names that SQLAlchemy gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Dialect(NamedTuple):
    """What a statement has to know of a database.

    Attributes:
        clock: the time, in microseconds since 1970 UTC.
        lock, share: what a SELECT ends with to lock its rows. Empty where there is one writer.
        upsert, new: what an INSERT ends with to replace rows, and the value of a column there.
        stored: names the rows that are there; empty where their columns are known by themselves.
        shown, bound: what shows the longest wait for a row lock, and the statement that sets it.
        ends: whether an error of a statement ends the transaction.
        skips: whether an UPDATE can pass by a row that another transaction holds.
    """

    clock: str
    upsert: str
    new: str
    stored: str = ""
    lock: str = ""
    share: str = ""
    shown: str = ""
    bound: str = ""
    ends: bool = False
    skips: bool = False

    def replacing(
        self, key: Iterable[str], columns: Sequence[str], above: tuple[str, int] | None = None
    ) -> str:
        """Return what an INSERT ends with to replace these columns of the rows it finds.

        Arguments:
            above: a column, the last one, that has to be so much above the stored one. A row of
                which it is not stays as it is.
        """
        new = {column: self.new.format(column) for column in columns}
        where = ""
        if above is not None:
            name, step = above
            found = f"{self.stored.removeprefix('AS ')}.{name}" if self.stored else name
            where = f"{found} = {new[name]} - {step}"
        if where and not self.stored:
            # From left to right: the last one decides about those before.
            new = {column: f"IF({where}, {value}, {column})" for column, value in new.items()}
            where = ""
        changes = ", ".join(f"{column} = {value}" for column, value in new.items())
        return f"{self.upsert.format(', '.join(key))} {changes}{where and f' WHERE {where}'}"


_ON_CONFLICT = "ON CONFLICT ({}) DO UPDATE SET"
_MYSQL = Dialect(
    # NOW() is in the time zone of the session; without (6) there are no fractions.
    clock="TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    upsert="ON DUPLICATE KEY UPDATE",
    new="VALUES({})",
    lock=" FOR UPDATE",
    share=" LOCK IN SHARE MODE",
    shown="@@SESSION.innodb_lock_wait_timeout",
    bound="SET SESSION innodb_lock_wait_timeout = {}",
)
DIALECTS = {
    "postgresql": Dialect(
        # now() is the time at which the transaction began.
        clock="CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)",
        upsert=_ON_CONFLICT,
        new="excluded.{}",
        stored="AS stored",
        lock=" FOR UPDATE",
        share=" FOR SHARE",
        shown="current_setting('lock_timeout')",
        bound="SELECT set_config('lock_timeout', '{}', true)",
        ends=True,
        skips=True,
    ),
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "sqlite": Dialect(
        # SQLite 3.40 does not know unixepoch('subsec'), and gives NULL: a lease that never expires.
        clock="CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
        upsert=_ON_CONFLICT,
        new="excluded.{}",
        stored="AS stored",
    ),
}
MYSQL = ("mysql", "mariadb")
# Serialization failures and deadlocks: SQLSTATEs of PostgreSQL, numbers of MySQL and MariaDB.
_CONFLICTS = ("40001", "40P01", 1213, 1020)
# The time to wait for a row lock is over.
_LOCK_TIMEOUTS = ("55P03", 1205)
# The table is not there. SQLite has one code for all errors of a statement.
_MISSING_TABLES = ("42P01", 1146)


def typed(dialect: str, kind: str) -> str:
    """Return a parameter of a type, where one of another type would find no index."""
    return f"CAST(? AS {kind})" if dialect == "postgresql" else "?"


def feed_condition(dialect: str) -> str:
    """Return the condition for the rows of a feed, whose `FeedKey.id` is the parameter."""
    return f"feed_id = {typed(dialect, 'CHAR(64)')}"


def listed(numbers: Iterable[int]) -> str:
    return ", ".join(str(int(number)) for number in numbers)


def milliseconds(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def lock_wait(dialect: str, seconds: float) -> str:
    return milliseconds(seconds) if dialect == "postgresql" else str(max(1, round(seconds)))


def is_conflict(error: Exception) -> bool:
    return is_integrity_error(error) or any(code in _CONFLICTS for code in _codes(error))


def is_integrity_error(error: Exception) -> bool:
    named = any(kind.__name__ == "IntegrityError" for kind in type(error).__mro__)
    return named or any(str(code).startswith("23") for code in _codes(error)[:2])


def is_lock_timeout(error: Exception) -> bool:
    return any(code in _LOCK_TIMEOUTS for code in _codes(error))


def is_missing_table(error: Exception) -> bool:
    codes = _codes(error)
    return any(code in _MISSING_TABLES or "no such table" in str(code) for code in codes)


def _codes(error: Exception) -> tuple[object, ...]:
    # SQLAlchemy has the driver's error as `orig`, Django as the cause.
    cause = getattr(error, "orig", None) or error
    states = (getattr(each, "sqlstate", None) for each in (cause, cause.__cause__))
    return (*states, *getattr(cause, "args", ())[:1])
