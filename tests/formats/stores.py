"""The golden files of cursor stores and quarantines: what they hold, how they are made and loaded.

A file is what a database holds, as statements that make it again. Times, and numbers that are drawn
by lot, are set to fixed values before it is made.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from feedapi_client import FeedKey, Position
from feedapi_client.quarantine import QuarantinedEvent
from feedapi_client.stores import Journal, Lease
from tests.positions import counted

GOLDEN = Path(__file__).parent / "golden" / "1"
"""The files of the newest formats. Each folder beside it has those of an earlier version."""
FOREVER = Journal(keep=None)
ORDERS = FeedKey("https://shop.test/orders?tenant=7", "billing", {"filter-kind": "new"})
PAYMENTS = FeedKey.named("payments")
POSITIONS = {
    ORDERS: {
        0: counted("cursor-2", 2),
        7: Position("end of 7", "drained"),
        8: Position("moved on", "superseded"),
    },
    PAYMENTS: {32767: Position("_first")},
}
SAVED_AT = datetime(2025, 11, 25, tzinfo=UTC)
"""When what is stored now was saved. The journal begins an hour before."""
BEFORE = {0: Position("cursor-1"), **{p: POSITIONS[ORDERS][p] for p in (7, 8)}}
"""The positions of `ORDERS` half an hour before `SAVED_AT`."""
INSTANCE = "host-1-4711-cafe"
OPTIONS = "follow=1 ordered=1 partitions=all lineage=4f53cda18c2b version=1.0.0"
QUARANTINED = QuarantinedEvent(
    id="0644000000000000000000abcdef",
    feed=ORDERS,
    partition=7,
    cursor="end of 7",
    index=3,
    raw=b'{"order": "\xc3\xa4\xff", "lone": "\\ud800"}',
    headers={"h": "v"},
    error_type="ValueError",
    error="no such order: '7'\nsecond line",
    time=SAVED_AT,
)
_HOUR = 3_600_000_000
_SAVED = int(SAVED_AT.timestamp()) * 1_000_000
_FIRST = _SAVED - _HOUR
_FUTURE = 4_102_444_800_000_000  # 2100
TABLES = (
    "feedapi_format",
    "feedapi_cursors",
    "feedapi_cursors_journal",
    "feedapi_cursors_done",
    "feedapi_cursors_instances",
    "feedapi_cursors_leases",
    "feedapi_quarantine",
)
_FIXED = (
    f"UPDATE feedapi_cursors SET saved_at = {_FIRST}",
    f"UPDATE feedapi_cursors SET saved_at = {_SAVED} WHERE revision > 1",
    (
        f"UPDATE feedapi_cursors_journal SET saved_at = {_FIRST}, replaced_at = {_SAVED} "
        "WHERE revision > 0"
    ),
    (
        f"UPDATE feedapi_cursors_journal SET saved_at = {_FIRST}, replaced_at = {_FIRST} "
        "WHERE revision = 0"
    ),
    f"UPDATE feedapi_cursors_instances SET joined_at = {_FIRST}",
    f"UPDATE feedapi_cursors_instances SET expires_at = {_FUTURE}, changes = 1",
    f"UPDATE feedapi_cursors_leases SET changed_at = {_FIRST}",
)


async def write(store: Any, quarantine: Any = None) -> None:
    """Write what the golden files hold, with a journal where the store can have one."""
    first = {partition: Position(each.cursor, each.status) for partition, each in BEFORE.items()}
    await store.save(ORDERS, first)
    await store.save(ORDERS, {0: POSITIONS[ORDERS][0]})
    await store.save(PAYMENTS, POSITIONS[PAYMENTS])
    await store.beat(ORDERS, INSTANCE, 30.0, OPTIONS)
    await store.put(ORDERS, INSTANCE, [Lease(partition, INSTANCE, 1) for partition in (0, 7, 8)])
    await store.put(ORDERS, INSTANCE, [Lease(7, INSTANCE, 1, ended=True), Lease(8, None, 1)])
    if quarantine is not None:
        await quarantine.add([QUARANTINED])


async def check_store(store: Any) -> None:
    """Check that a store reads what `write` has written, and writes on."""
    assert await store.feeds() == sorted([ORDERS, PAYMENTS], key=str)
    for key, positions in POSITIONS.items():
        assert await store.load(key) == positions
    (instance,), leases = await store.look(ORDERS)
    assert (instance.name, instance.options, instance.alive) == (INSTANCE, OPTIONS, True)
    found = {p: (each.owner, each.epoch, each.ended) for p, each in leases.items()}
    assert found == {0: (INSTANCE, 1, False), 7: (INSTANCE, 1, True), 8: (None, 1, False)}
    assert await store.put(ORDERS, INSTANCE, [Lease(8, INSTANCE, 2)]) == {8}
    third = (await store.load(ORDERS))[0].advance("cursor-3")
    await store.save(ORDERS, {0: third})
    assert (await store.load(ORDERS))[0] == third


async def check_journal(store: Any) -> None:
    """Check that a store reads the journal that `write` has written."""
    half_an_hour_before = datetime.fromtimestamp((_SAVED - _HOUR // 2) / 1e6, UTC)
    found = await store.positions_at(ORDERS, half_an_hour_before)
    assert found == BEFORE


async def check_quarantine(store: Any) -> None:
    """Check that a quarantine reads what `write` has written."""
    await store.prepare()
    assert await store.page(ORDERS) == [QUARANTINED]
    assert await store.remove([QUARANTINED.id]) == 1


# SQL


@dataclass(frozen=True)
class SQLDatabase:
    """A kind of database, and how it says what it holds.

    Arguments:
        execute: executes a statement and returns the rows.
        schema: returns the statement that creates a table.
        blob: a literal of these bytes.
        text: a literal of this text.
    """

    execute: Callable[[str], Sequence[Sequence[Any]]]
    schema: Callable[[str], str]
    blob: Callable[[bytes], str]
    text: Callable[[str], str] = lambda text: "'" + text.replace("'", "''") + "'"

    def dump(self, tables: Iterable[str] = TABLES) -> str:
        """Return the statements that make the tables again, with fixed times."""
        for statement in _FIXED:
            self.execute(statement)
        return "".join(self._dump(table) for table in tables)

    def _dump(self, table: str) -> str:
        rows = self.execute(f"SELECT * FROM {table} ORDER BY 1, 2")
        inserts = [
            f"INSERT INTO {table} VALUES ({', '.join(map(self._literal, row))});\n" for row in rows
        ]
        return "".join([f"{self.schema(table)};\n", *inserts])

    def _literal(self, value: object) -> str:
        match value:
            case None:
                return "NULL"
            case bytes() | memoryview():
                return self.blob(bytes(value))
            case str():
                return self.text(value)
            case _:
                return str(value)

    def load(self, statements: str) -> None:
        """Execute the statements of a dump."""
        for statement in statements.split(";\n"):
            if statement:
                self.execute(statement)

    def clear(self) -> None:
        """Drop the tables."""
        for table in TABLES:
            self.execute(f"DROP TABLE IF EXISTS {table}")


def sqlite_database(connection: sqlite3.Connection) -> SQLDatabase:
    """Return the database of a connection, which has to be in autocommit mode."""

    def schema(table: str) -> str:
        select = "SELECT sql FROM sqlite_master WHERE name = ?"
        ((text,),) = connection.execute(select, (table,)).fetchall()
        return re.sub(r"\s+", " ", text).replace("( ", "(").replace(" )", ")")

    return SQLDatabase(
        lambda sql: connection.execute(sql).fetchall(), schema, lambda data: f"X'{data.hex()}'"
    )


def postgres_database(connection: Any) -> SQLDatabase:
    """Return the database of a psycopg connection in autocommit mode."""
    columns = """
        SELECT attname, format_type(atttypid, atttypmod), attnotnull FROM pg_attribute
        WHERE attrelid = '{}'::regclass AND attnum > 0 ORDER BY attnum
    """
    keys = """
        SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = '{}'::regclass
        AND contype = 'p'
    """

    def execute(sql: str) -> list[Any]:
        done = connection.execute(sql)
        return list(done.fetchall()) if done.description else []

    def schema(table: str) -> str:
        parts = [
            f"{name} {kind}{' NOT NULL' if required else ''}"
            for name, kind, required in execute(columns.format(table))
        ]
        parts += [key for (key,) in execute(keys.format(table))]
        return f"CREATE TABLE {table} ({', '.join(parts)})"

    # As an escape string: a dump has no line that ends within a literal.
    return SQLDatabase(
        execute, schema, lambda data: f"'\\x{data.hex()}'", lambda text: "E" + _escaped(text)
    )


def mariadb_database(connection: Any) -> SQLDatabase:
    """Return the database of a PyMySQL connection in autocommit mode."""
    columns = """
        SELECT COLUMN_NAME, COLUMN_TYPE, IS_NULLABLE, COLLATION_NAME, COLUMN_KEY = 'PRI'
        FROM information_schema.COLUMNS
        WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = '{}' ORDER BY ORDINAL_POSITION
    """

    def execute(sql: str) -> list[Any]:
        with connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    def schema(table: str) -> str:
        parts, key = [], []
        for name, kind, nullable, collation, primary in execute(columns.format(table)):
            collate = f" COLLATE {collation}" if collation else ""
            parts.append(f"{name} {kind}{collate}{'' if nullable == 'YES' else ' NOT NULL'}")
            key += [name] if primary else []
        return (
            f"CREATE TABLE {table} ({', '.join(parts)}, PRIMARY KEY ({', '.join(key)})) "
            "ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin"
        )

    return SQLDatabase(execute, schema, lambda data: f"X'{data.hex()}'", _escaped)


def _escaped(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "''").replace("\n", "\\n") + "'"


# Redis


def dump_redis(client: Any) -> str:
    """Return the commands that make the keys again, one a line, with fixed times."""
    lines = []
    for key in sorted(client.keys()):
        fields = sorted(client.hgetall(key).items())
        pairs = [text for name, value in fields for text in (name, _with_fixed_times(key, value))]
        lines.append(json.dumps(["HSET", key, *pairs]) + "\n")
    return "".join(lines)


def load_redis(client: Any, commands: str) -> None:
    """Execute the commands of a dump."""
    for line in commands.splitlines():
        client.execute_command(*json.loads(line))


def _with_fixed_times(key: str, value: str) -> str:
    if key.endswith(":instances"):
        return re.sub(r"^\d+ \d+ \d+ ", f"{_FIRST} {_FUTURE} 1 ", value)
    if key.endswith(":leases"):
        return re.sub(r"^(\d+ \d) \d+ ", rf"\1 {_FIRST} ", value)
    return value
