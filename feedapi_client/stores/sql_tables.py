"""The tables of cursors and of their journal in a SQL database. Needs the extra ``sql``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import sqlalchemy as sa
    from sqlalchemy.dialects import mysql
except ImportError as error:
    raise ImportError(
        "SQLAlchemyCursorStore needs SQLAlchemy: pip install 'feedapi-client[sql]'"
    ) from error

from feedapi_client.stores.stored_format import FORMAT_TABLE, check_format

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


def done_table(name: str, metadata: sa.MetaData, schema: str | None = None) -> sa.Table:
    """Return the table of what is done ahead of the cursor, see `feedapi_client.stores.done`.

    One row for each event, and one without an event for the claim of each partition.
    """
    return sa.Table(
        name,
        metadata,
        sa.Column("feed_id", sa.CHAR(64), primary_key=True),
        sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("event_id", sa.String(64), primary_key=True),
        sa.Column("claim", sa.BigInteger, nullable=False),
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
        sa.Column("options", sa.String(200), nullable=False),
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


def format_table(metadata: sa.MetaData, schema: str | None = None) -> sa.Table:
    """Return the table that notes the formats of other tables, by their names."""
    return table_in(metadata, _format_table, FORMAT_TABLE, schema)


def _format_table(name: str, metadata: sa.MetaData, schema: str | None) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        sa.Column("name", sa.Unicode(200), primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        schema=schema,
        **TABLE_OPTIONS,
    )


def note_format(connection: sa.Connection, table: sa.Table, name: str, newest: int) -> None:
    """Note the format of a table where it is not noted yet, and check it.

    Arguments:
        table: the `format_table`, which exists.
        name: of the table whose format it is.
        newest: the newest version of it that can be read.

    Raises:
        StoreError: a newer version of this package wrote the table.
    """
    noted = connection.execute(sa.select(table.c.version).where(table.c.name == name)).scalar()
    check_format(f"the table {name}", noted, newest)
    if noted is None:
        connection.execute(sa.insert(table).values(name=name, version=newest))


def check_noted_format(connection: sa.Connection, table: sa.Table, name: str, newest: int) -> None:
    """Check the format of a table as `note_format` does, and note nothing."""
    if sa.inspect(connection).has_table(table.name, schema=table.schema):
        noted = connection.execute(sa.select(table.c.version).where(table.c.name == name)).scalar()
        check_format(f"the table {name}", noted, newest)


def long_text() -> sa.types.TypeEngine[str]:
    """Return the type of a text of any length."""
    # MySQL's TEXT ends at 64 KiB.
    return sa.UnicodeText().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


def table_in(
    metadata: sa.MetaData,
    make: Callable[[str, sa.MetaData, str | None], sa.Table],
    name: str,
    schema: str | None,
) -> sa.Table:
    """Return the table, also if another store has put it into the same metadata before."""
    found = metadata.tables.get(f"{schema}.{name}" if schema else name)
    return make(name, metadata, schema) if found is None else found
