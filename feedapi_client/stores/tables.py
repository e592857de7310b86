"""The tables of the SQL stores, declared once, and the versions of what they hold.

``feedapi_format`` has a row for each table of cursors, which counts for its journal, instances and
leases, too, and of quarantined events. Without a row the version is 1.
"""

# ruff: noqa: S608 - the statements are made of quoted names

from __future__ import annotations

from collections.abc import Callable, Mapping

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.stores.scripts import Query, Script, is_missing_table

CURSORS = "feedapi_cursors"
QUARANTINE = "feedapi_quarantine"
FORMAT_TABLE = "feedapi_format"
STORE_FORMAT = 1
"""The version of cursors, journal, instances and leases, in every kind of store."""
FORMATS = {CURSORS: STORE_FORMAT, QUARANTINE: 1}
"""The newest version of what a table holds. The others belong to that of cursors."""

_DECLARED = {
    CURSORS: """feed_id CHAR(64), partition_id INTEGER, feed_cursor TEXT, status VARCHAR(16),
        revision BIGINT, saved_at BIGINT, feed_url TEXT, consumer TEXT, filters TEXT;
        feed_id, partition_id""",
    "feedapi_cursors_journal": """feed_id CHAR(64), replaced_at BIGINT, partition_id INTEGER,
        revision BIGINT, feed_cursor TEXT, status VARCHAR(16), saved_at BIGINT;
        feed_id, replaced_at, partition_id, revision""",
    "feedapi_cursors_done": """feed_id CHAR(64), partition_id INTEGER, event_id VARCHAR(64),
        claim BIGINT; feed_id, partition_id, event_id""",
    "feedapi_cursors_instances": """feed_id CHAR(64), instance VARCHAR(200), joined_at BIGINT,
        expires_at BIGINT, changes BIGINT, options VARCHAR(200); feed_id, instance""",
    "feedapi_cursors_leases": """feed_id CHAR(64), partition_id INTEGER, owner VARCHAR(200) NULL,
        epoch BIGINT, ended INTEGER, changed_at BIGINT; feed_id, partition_id""",
    QUARANTINE: """id VARCHAR(32), feed_id CHAR(64), feed_url TEXT, consumer TEXT, filters TEXT,
        partition_id INTEGER, feed_cursor TEXT, event_index INTEGER, payload BLOB, headers TEXT,
        error_type TEXT, error TEXT, quarantined_at BIGINT; id""",
    FORMAT_TABLE: "name VARCHAR(200), version INTEGER; name",
}
_TYPES = {
    "sqlite": {},
    "postgresql": {"BLOB": "BYTEA"},
    # TEXT and BLOB of MySQL end at 64 KiB.
    "mysql": {"TEXT": "LONGTEXT", "BLOB": "LONGBLOB"},
}
# Names that differ in case are different names, whatever the database's default.
_MYSQL = " ENGINE=InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"


def _table(declared: str) -> tuple[dict[str, str], list[str]]:
    columns, _, key = declared.partition(";")
    return dict(each.split(maxsplit=1) for each in columns.split(",")), key.replace(",", "").split()


TABLES = {name: _table(declared) for name, declared in _DECLARED.items()}
"""The columns of each table with their types, and those of its primary key.

Times are in microseconds since 1970 UTC. What may be NULL says so.
"""


def create_table(table: str, dialect: str, name: str | None = None) -> str:
    dialect = "mysql" if dialect == "mariadb" else dialect
    columns, key = TABLES[table]
    lines = []
    for column, declared in columns.items():
        kind = declared.removesuffix(" NULL")
        null = "" if kind != declared else " NOT NULL"
        primary = " PRIMARY KEY" if key == [column] else ""
        lines.append(f"{column} {_TYPES[dialect].get(kind, kind)}{null}{primary}")
    if len(key) > 1:
        lines.append(f"PRIMARY KEY ({', '.join(key)})")
    options = _MYSQL if dialect == "mysql" else ""
    return f"CREATE TABLE {name or table} ({', '.join(lines)}){options}"


def exists(table: str, dialect: str) -> Script[bool]:
    if dialect == "postgresql":  # where an error would end the transaction
        rows = yield Query("SELECT to_regclass(CAST(? AS TEXT)) IS NOT NULL", (table,))
        return bool(rows[0][0])
    try:
        yield Query(f"SELECT 1 FROM {table} WHERE 1 = 0")
    except Exception as error:
        if not is_missing_table(error):
            raise
        return False
    return True


def create_missing(
    tables: Mapping[str, str], dialect: str, quoted: Callable[[str], str]
) -> Script[None]:
    """Create tables, by their names in `TABLES`, and note their formats. Raise for newer ones."""
    for table, name in {**tables, FORMAT_TABLE: FORMAT_TABLE}.items():
        if not (yield from exists(quoted(name), dialect)):
            yield Query(create_table(table, dialect, quoted(name)))
    formats = quoted(FORMAT_TABLE)
    for table in tables.keys() & FORMATS.keys():
        if not (yield from _check_noted(formats, tables[table], FORMATS[table])):
            note = f"INSERT INTO {formats} (name, version) VALUES (?, ?)"
            yield Query(note, (tables[table], FORMATS[table]))


def check_formats(
    tables: Mapping[str, str], dialect: str, quoted: Callable[[str], str]
) -> Script[None]:
    formats = quoted(FORMAT_TABLE)
    if (yield from exists(formats, dialect)):
        for table in tables.keys() & FORMATS.keys():
            yield from _check_noted(formats, tables[table], FORMATS[table])


def _check_noted(formats: str, name: str, newest: int) -> Script[bool]:
    rows = yield Query(f"SELECT version FROM {formats} WHERE name = ?", (name,))
    check_format(f"the table {name}", rows[0][0] if rows else None, newest)
    return bool(rows)


def check_format(what: str, found: int | None, newest: int, feed: FeedKey | None = None) -> None:
    """Raise `StoreError` if a newer version of this package wrote what is `found`. None is 1."""
    if found is not None and found > newest:
        raise StoreError(
            f"a newer version of feedapi-client wrote {what} (format {found}, this one reads up "
            f"to {newest}): update feedapi-client here",
            feed=None if feed is None else feed.url,
        )
