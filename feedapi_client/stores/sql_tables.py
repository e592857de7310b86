"""The tables of cursors and of their journal in a SQL database. Needs the extra ``sql``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import sqlalchemy as sa
    from sqlalchemy.dialects import mssql, mysql
except ImportError as error:
    raise ImportError(
        "SQLAlchemyCursorStore needs SQLAlchemy: pip install 'feedapi-client[sql]'"
    ) from error

TABLE_OPTIONS: dict[str, Any] = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


def cursor_table(name: str, metadata: sa.MetaData, schema: str | None = None) -> sa.Table:
    """Return the table of positions: one row for each partition of each `FeedKey`.

    `feed_id` is `FeedKey.id`. `feed_url`, `consumer` and `filters` (JSON) are the parts of the
    key, to be read by people. `saved_at` is in microseconds since 1970 UTC.
    """
    return sa.Table(
        name,
        metadata,
        sa.Column("feed_id", sa.CHAR(64), primary_key=True),
        sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("feed_cursor", long_text(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("saved_at", sa.BigInteger, nullable=False),
        sa.Column("feed_url", long_text(), nullable=False),
        sa.Column("consumer", long_text(), nullable=False),
        sa.Column("filters", long_text(), nullable=False),
        schema=schema,
        **TABLE_OPTIONS,
    )


def journal_table(name: str, metadata: sa.MetaData, schema: str | None = None) -> sa.Table:
    """Return the table of replaced positions, see `feedapi_client.stores.journal`.

    Times are in microseconds since 1970 UTC.
    """
    return sa.Table(
        name,
        metadata,
        sa.Column("feed_id", sa.CHAR(64), primary_key=True),
        sa.Column("replaced_at", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("revision", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("feed_cursor", long_text(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("saved_at", sa.BigInteger, nullable=False),
        schema=schema,
        **TABLE_OPTIONS,
    )


def instance_table(name: str, metadata: sa.MetaData, schema: str | None = None) -> sa.Table:
    """Return the table of instances that share a feed, one row a process.

    Times are in microseconds since 1970 UTC, by the database's clock.
    """
    return sa.Table(
        name,
        metadata,
        sa.Column("feed_id", sa.CHAR(64), primary_key=True),
        sa.Column("instance", sa.Unicode(200), primary_key=True),
        sa.Column("joined_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.Column("changes", sa.BigInteger, nullable=False),
        schema=schema,
        **TABLE_OPTIONS,
    )


def lease_table(name: str, metadata: sa.MetaData, schema: str | None = None) -> sa.Table:
    """Return the table of leases: one row for each partition that was ever claimed.

    Times as in `instance_table`.
    """
    return sa.Table(
        name,
        metadata,
        sa.Column("feed_id", sa.CHAR(64), primary_key=True),
        sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("owner", sa.Unicode(200), nullable=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("ended", sa.Integer, nullable=False),
        sa.Column("changed_at", sa.BigInteger, nullable=False),
        schema=schema,
        **TABLE_OPTIONS,
    )


def long_text() -> sa.types.TypeEngine[str]:
    """Return the type of a text of any length."""
    # MySQL's TEXT ends at 64 KiB; SQL Server's NTEXT can't be compared.
    return (
        sa.UnicodeText()
        .with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
        .with_variant(mssql.NVARCHAR(None), "mssql")
    )


def table_in(
    metadata: sa.MetaData,
    make: Callable[[str, sa.MetaData, str | None], sa.Table],
    name: str,
    schema: str | None,
) -> sa.Table:
    """Return the table, also if another store has put it into the same metadata before."""
    found = metadata.tables.get(f"{schema}.{name}" if schema else name)
    return make(name, metadata, schema) if found is None else found
