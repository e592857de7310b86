"""Scripts: generators that yield statements and receive the rows found, or their number.

What the databases do in their own way is a `Dialect`; they have the names that SQLAlchemy gives
them. Parameters are `?`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Named = TypeVar("Named", int, str)

_NAMED_PER_STATEMENT = 490
_CACHED = 64
_QUOTED_OR_PLACEHOLDER = re.compile(r"""\?|"[^"]*"|'[^']*'|`[^`]*`|\[[^\]]*\]""")


class Query(NamedTuple):
    sql: str
    parameters: Sequence[Any] = ()


class CountedChange(NamedTuple):
    sql: str
    parameters: Sequence[Any] = ()


Step = Query | CountedChange
Script = Generator[Any, Any, T]


def in_parts(named: Iterable[Named], size: int = _NAMED_PER_STATEMENT) -> Iterator[list[Named]]:
    """Yield as many identities, or partitions, at a time as one statement names, in their order."""
    ordered = sorted(named)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


@lru_cache(_CACHED)
def with_placeholders(sql: str, style: str) -> str:
    """Replace each `?` by `style` (numbered if it is `$`), but not in quoted names and texts."""
    numbers = count(1)

    def placeholder() -> str:
        return f"${next(numbers)}" if style == "$" else style

    return _QUOTED_OR_PLACEHOLDER.sub(
        lambda found: placeholder() if found[0] == "?" else found[0], sql
    )


async def run_steps_async(script: Script[T], execute: Callable[[Any], Awaitable[Any]]) -> T:
    """An error of a statement is raised within the script."""
    try:
        step = next(script)
        while True:
            try:
                rows = await execute(step)
            except Exception as error:  # noqa: BLE001 - the script cleans up and raises it again
                step = script.throw(error)
            else:
                step = script.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result


def run_steps(script: Script[T], execute: Callable[[Any], Any]) -> T:
    async def answer(step: Any) -> Any:
        return execute(step)

    try:
        run_steps_async(script, answer).send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("nothing is waited for")


def run_on_cursors(
    script: Script[T],
    cursor_of: Callable[[], Any],
    style: str = "?",
    receive: Callable[[], None] | None = None,
) -> T:
    """`receive` is called after each statement, where its result may not be there yet."""
    cursor = cursor_of()

    def execute(step: Step) -> Any:
        # Without parameters a % is none of a placeholder.
        given = (step.parameters,) if step.parameters else ()
        cursor.execute(with_placeholders(step.sql, style), *given)
        if receive is not None:
            receive()
        if isinstance(step, CountedChange):
            return cursor.rowcount
        return cursor.fetchall() if cursor.description else []

    try:
        return run_steps(script, execute)
    finally:
        cursor.close()


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
