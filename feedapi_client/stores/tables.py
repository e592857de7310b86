"""The tables of the SQL stores, declared once."""

from __future__ import annotations

from feedapi_client.stores.scripts import Query, Script
from feedapi_client.stores.stored_format import FORMAT_TABLE

_FEED = "CHAR(64) NOT NULL"
_NUMBER = "INTEGER NOT NULL"
_LARGE = "BIGINT NOT NULL"
_TEXT = "{text} NOT NULL"
_NAME = "VARCHAR(200) NOT NULL"
_STATUS = "VARCHAR(16) NOT NULL"

TABLES: dict[str, tuple[dict[str, str], str]] = {
    "feedapi_cursors": (
        {
            "feed_id": _FEED,
            "partition_id": _NUMBER,
            "feed_cursor": _TEXT,
            "status": _STATUS,
            "revision": _LARGE,
            "saved_at": _LARGE,
            "feed_url": _TEXT,
            "consumer": _TEXT,
            "filters": _TEXT,
        },
        "feed_id, partition_id",
    ),
    "feedapi_cursors_journal": (
        {
            "feed_id": _FEED,
            "replaced_at": _LARGE,
            "partition_id": _NUMBER,
            "revision": _LARGE,
            "feed_cursor": _TEXT,
            "status": _STATUS,
            "saved_at": _LARGE,
        },
        "feed_id, replaced_at, partition_id, revision",
    ),
    "feedapi_cursors_done": (
        {
            "feed_id": _FEED,
            "partition_id": _NUMBER,
            "event_id": "VARCHAR(64) NOT NULL",
            "claim": _LARGE,
        },
        "feed_id, partition_id, event_id",
    ),
    "feedapi_cursors_instances": (
        {
            "feed_id": _FEED,
            "instance": _NAME,
            "joined_at": _LARGE,
            "expires_at": _LARGE,
            "changes": _LARGE,
            "options": _NAME,
        },
        "feed_id, instance",
    ),
    "feedapi_cursors_leases": (
        {
            "feed_id": _FEED,
            "partition_id": _NUMBER,
            "owner": "VARCHAR(200)",
            "epoch": _LARGE,
            "ended": _NUMBER,
            "changed_at": _LARGE,
        },
        "feed_id, partition_id",
    ),
    "feedapi_quarantine": (
        {
            "id": "VARCHAR(32) NOT NULL",
            "feed_id": _FEED,
            "feed_url": _TEXT,
            "consumer": _TEXT,
            "filters": _TEXT,
            "partition_id": _NUMBER,
            "feed_cursor": _TEXT,
            "event_index": _NUMBER,
            "payload": "{bytes} NOT NULL",
            "headers": _TEXT,
            "error_type": _TEXT,
            "error": _TEXT,
            "quarantined_at": _LARGE,
        },
        "id",
    ),
}
"""The columns of each table, and its primary key. Times are in microseconds since 1970 UTC."""
FORMATS = {FORMAT_TABLE: ({"name": _NAME, "version": _NUMBER}, "name")}
"""The table that notes the formats of others, in the same way. Django has none."""

_TYPES = {
    "sqlite": {"text": "TEXT", "bytes": "BLOB"},
    "postgresql": {"text": "TEXT", "bytes": "BYTEA"},
    # TEXT and BLOB of MySQL end at 64 KiB.
    "mysql": {"text": "LONGTEXT", "bytes": "LONGBLOB"},
}
# Names that differ in case are different names, whatever the database's default.
_MYSQL = " ENGINE=InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"


def create_table(table: str, dialect: str, *, unless: str | None = None) -> str:
    """Return the statement that creates a table.

    Arguments:
        unless: its name, quoted, where it is created unless it is there.
    """
    columns, key = (TABLES | FORMATS)[table]
    lines = [
        f"{column} {kind.format_map(_TYPES[dialect])}{' PRIMARY KEY' * (column == key)}"
        for column, kind in columns.items()
    ]
    lines += [] if key in columns else [f"PRIMARY KEY ({key})"]
    options = _MYSQL if dialect == "mysql" else ""
    name = table if unless is None else f"IF NOT EXISTS {unless}"
    return f"CREATE TABLE {name} ({', '.join(lines)}){options}"


def create_missing(*tables: str) -> Script[None]:
    """Create tables in a SQLite file, unless they are there."""
    for table in tables:
        yield Query(create_table(table, "sqlite", unless=table))
