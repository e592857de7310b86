"""The SQL statements of `SQLAlchemyCursorStore`, for every database that SQLAlchemy supports.

The statements of a save are `update_positions`, `insert_positions` and, with a journal,
`archive_positions`. Nothing here executes a statement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from feedapi_client.model import FeedKey, Position

# SQL Server takes 2,100 parameters a statement. Here are at most three for each row.
_ROWS_PER_STATEMENT = 500

Condition = list[sa.ColumnElement[bool]]
Time = int | sa.ColumnElement[int]
"""A time by the database's clock, in microseconds since 1970 UTC, or what computes it there."""


class DatabaseTime(FunctionElement[int]):
    """The database's clock, in microseconds since 1970 UTC."""

    inherit_cache = True
    type = sa.BigInteger()


@compiles(DatabaseTime, "postgresql")
def _postgresql(*_: object, **__: object) -> str:
    # now() is the time at which the transaction began.
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)"


@compiles(DatabaseTime, "mysql")
@compiles(DatabaseTime, "mariadb")
def _mysql(*_: object, **__: object) -> str:
    # NOW() is in the time zone of the session; without (6) there are no fractions.
    return "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"


@compiles(DatabaseTime, "sqlite")
def _sqlite(*_: object, **__: object) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)"


@compiles(DatabaseTime, "mssql")
def _mssql(*_: object, **__: object) -> str:
    return "DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME())"


def in_chunks(positions: Mapping[int, Position]) -> Iterator[dict[int, Position]]:
    """Yield as many positions as one statement takes, in the order of the partitions.

    All transactions lock rows in this order, which prevents deadlocks.
    """
    items: Sequence[tuple[int, Position]] = sorted(positions.items())
    for start in range(0, len(items), _ROWS_PER_STATEMENT):
        yield dict(items[start : start + _ROWS_PER_STATEMENT])


class CursorStatements:
    """Builds statements on the table of positions, and on the journal's if there is one."""

    def __init__(self, table: sa.Table, journal: sa.Table | None) -> None:
        self.table = table
        self.journal = journal

    def select_positions(
        self,
        feed: FeedKey,
        *,
        lock: bool = False,
        skip_locked: bool = False,
        partitions: Iterable[int] | None = None,
    ) -> sa.Executable:
        """Select partition, cursor, status and revision.

        `lock` locks the rows for a change, with `skip_locked` those that nobody else has locked.
        """
        columns = self.table.c
        query = sa.select(
            columns.partition_id, columns.feed_cursor, columns.status, columns.revision
        ).where(columns.feed_id == feed.id)
        if partitions is not None:
            query = query.where(columns.partition_id.in_(list(partitions)))
        # In the order of the partitions, see `in_chunks`.
        if not lock:
            return query
        return query.order_by(columns.partition_id).with_for_update(skip_locked=skip_locked)

    def lock_positions(self, matching: Condition) -> sa.Executable:
        """Lock the matching rows that nobody else has locked, and select their partitions."""
        query = sa.select(self.table.c.partition_id).where(*matching)
        return query.order_by(self.table.c.partition_id).with_for_update(skip_locked=True)

    def select_feeds(self) -> sa.Executable:
        """Select URL, consumer's name and filters (JSON) of every feed."""
        columns = self.table.c
        return sa.select(columns.feed_url, columns.consumer, columns.filters).distinct()

    def matching(self, feed: FeedKey, revisions: Mapping[int, int]) -> Condition:
        """Return the condition for the rows of these partitions that have these revisions."""
        columns = self.table.c
        return [
            columns.feed_id == feed.id,
            columns.partition_id.in_(list(revisions)),
            columns.revision == self._by_partition("revision", revisions),
        ]

    def update_positions(
        self, matching: Condition, positions: Mapping[int, Position], at: Time
    ) -> sa.Update:
        """Set the matching rows to these positions."""
        cursors = {partition: new.cursor for partition, new in positions.items()}
        statuses = {partition: new.status for partition, new in positions.items()}
        return (
            sa.update(self.table)
            .where(*matching)
            .values(
                feed_cursor=self._by_partition("feed_cursor", cursors),
                status=self._by_partition("status", statuses),
                revision=self.table.c.revision + 1,
                saved_at=at,
            )
        )

    def insert_positions(
        self, feed: FeedKey, positions: Mapping[int, Position], at: Time
    ) -> tuple[sa.Insert, list[dict[str, Any]]]:
        """Return the statement that inserts these positions, and its rows."""
        key = {
            "feed_id": feed.id,
            "feed_url": feed.url,
            "consumer": feed.name,
            "filters": orjson.dumps(feed.filters).decode(),
        }
        rows = [
            {
                **key,
                "partition_id": partition,
                "feed_cursor": new.cursor,
                "status": new.status,
                "revision": new.revision,
            }
            for partition, new in sorted(positions.items())
        ]
        return sa.insert(self.table).values(saved_at=at), rows

    def delete_positions(self, matching: Condition) -> sa.Delete:
        """Delete the matching rows."""
        return sa.delete(self.table).where(*matching)

    def change_nothing(self) -> sa.Delete:
        """Delete no row."""
        return sa.delete(self.table).where(sa.false())

    def archive_positions(self, matching: Condition, at: int) -> sa.Insert | None:
        """Copy the matching rows into the journal, as replaced at `at`; None without a journal."""
        if self.journal is None:
            return None
        columns = self.table.c
        copied = ("feed_id", "partition_id", "revision", "feed_cursor", "status", "saved_at")
        replaced = sa.select(
            sa.literal(at, sa.BigInteger), *(columns[name] for name in copied)
        ).where(*matching)
        # Locked as the UPDATE that follows will lock them: two consumers that both had read them
        # could only deadlock.
        return sa.insert(self.journal).from_select(
            ["replaced_at", *copied], replaced.with_for_update()
        )

    def prune_journal(self, feed: FeedKey, before: int) -> sa.Delete | None:
        """Delete what was replaced before a time; None without a journal."""
        if self.journal is None:
            return None
        columns = self.journal.c
        return sa.delete(self.journal).where(
            columns.feed_id == feed.id, columns.replaced_at < before
        )

    def select_covering(self, feed: FeedKey, at: int) -> list[sa.Executable]:
        """Select the `CoveringRow`s: positions that were the current ones at a time."""
        selects: list[sa.Executable] = []
        for table in self._tables_of_history():
            columns = table.c
            covering = [columns.feed_id == feed.id, columns.saved_at <= at]
            if table is self.journal:
                covering.append(columns.replaced_at > at)
            selects.append(
                sa.select(
                    columns.partition_id,
                    columns.feed_cursor,
                    columns.status,
                    columns.revision,
                    columns.saved_at,
                ).where(*covering)
            )
        return selects

    def select_later(self, feed: FeedKey, at: int) -> list[sa.Executable]:
        """Select the `LaterRow`s: the earliest saves of each partition after a time."""
        selects: list[sa.Executable] = []
        for table in self._tables_of_history():
            columns = table.c
            first_revision = sa.case((columns.revision == 1, columns.saved_at))
            selects.append(
                sa.select(
                    columns.partition_id,
                    sa.func.min(columns.saved_at),
                    sa.func.min(first_revision),
                )
                .where(columns.feed_id == feed.id, columns.saved_at > at)
                .group_by(columns.partition_id)
            )
        return selects

    def _tables_of_history(self) -> list[sa.Table]:
        return [self.table] if self.journal is None else [self.journal, self.table]

    def _by_partition(self, name: str, values: Mapping[int, Any]) -> sa.ColumnElement[Any]:
        """Return an expression for column `name`: the value that belongs to a row's partition."""
        type_ = self.table.c[name].type
        if len(set(values.values())) == 1:
            return sa.literal(next(iter(values.values())), type_)
        # Text, because building 500 comparisons of columns takes longer than the database needs
        # for them. All identifiers and numbers in it are the store's own.
        branches = " ".join(
            f"WHEN {int(partition)} THEN :{name}{partition}" for partition in values
        )
        parameters = [
            sa.bindparam(f"{name}{partition}", value, type_) for partition, value in values.items()
        ]
        return sa.type_coerce(
            sa.text(f"CASE partition_id {branches} END").bindparams(*parameters), type_
        )
