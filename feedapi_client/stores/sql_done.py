"""What is done ahead of the cursor, in a SQL database through SQLAlchemy. Needs the extra ``sql``.

The table and the order of the statements are those of `feedapi_client.stores.done_statements`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import IntegrityError

from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import check_predecessor
from feedapi_client.stores.done import DoneEvent, already_done, check_done_format, claimed_anew
from feedapi_client.stores.done_statements import in_parts, new_claim
from feedapi_client.stores.sql_connection import AnyConnection
from feedapi_client.stores.sql_tables import TABLE_OPTIONS


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


class SQLDone:
    """Works on the table, on connections that have a transaction.

    Arguments:
        table, cursors: the tables of done events and of positions.
    """

    def __init__(self, table: sa.Table, cursors: sa.Table) -> None:
        self._table = table
        self._cursors = cursors

    async def claim(
        self, connection: AnyConnection, feed: FeedKey, partitions: Sequence[int], revision: int
    ) -> int:
        """See `DoneScripts.claim`."""
        await self._check_revision(connection, feed, partitions[0], revision)
        number, columns = new_claim(), self._table.c
        for partition in sorted(set(partitions)):
            found = await connection.execute(
                sa.update(self._table)
                .where(*self._of(feed, partition), columns.event_id == "")
                .values(claim=number)
            )
            if not found.rowcount:
                row = {"feed_id": feed.id, "partition_id": partition, "event_id": ""}
                await connection.execute(sa.insert(self._table).values(**row, claim=number))
        return number

    async def load(
        self, connection: AnyConnection, feed: FeedKey, partitions: Sequence[int], revision: int
    ) -> dict[str, int]:
        """See `DoneScripts.load`."""
        done: dict[str, int] = {}
        columns = self._table.c
        for partition in dict.fromkeys(partitions):
            query = sa.select(columns.event_id)
            query = query.where(*self._of(feed, partition), columns.event_id != "")
            for row in await connection.execute(query):
                done.setdefault(row[0], partition)
        check_done_format(feed, done)
        # After the rows: as long as this revision was stored, none of them was forgotten.
        await self._check_revision(connection, feed, partitions[0], revision)
        return done

    async def _check_revision(
        self, connection: AnyConnection, feed: FeedKey, partition: int, revision: int
    ) -> None:
        cursors = self._cursors.c
        query = sa.select(cursors.revision).where(
            cursors.feed_id == feed.id, cursors.partition_id == partition
        )
        stored = (await connection.execute(query)).scalar_one_or_none()
        check_predecessor(feed, partition, Position("", revision=revision + 1), stored)

    async def done(self, connection: AnyConnection, feed: FeedKey, event: DoneEvent) -> None:
        """See `DoneScripts.done`."""
        columns = self._table.c
        claim = sa.select(columns.claim).where(
            *self._of(feed, event.partition), columns.event_id == ""
        )
        # SQL Server has no FOR SHARE: there a hint keeps the lock until the transaction ends.
        held = claim.with_for_update(read=True).with_hint(
            self._table, "WITH (REPEATABLEREAD)", "mssql"
        )
        if (await connection.execute(held)).scalar_one_or_none() != event.claim:
            raise claimed_anew(feed, event.partition)
        row = {
            "feed_id": feed.id,
            "partition_id": event.partition,
            "event_id": event.id,
            "claim": event.claim,
        }
        if connection.dialect.name == "postgresql":
            # For an error of a statement it would end the transaction.
            insert = postgresql.insert(self._table).values(**row).on_conflict_do_nothing()
            added = await connection.execute(insert.returning(columns.event_id))
            if added.first() is None:
                raise already_done(feed, event.partition)
            return
        try:
            await connection.execute(sa.insert(self._table).values(**row))
        except IntegrityError as error:
            raise already_done(feed, event.partition) from error

    async def is_done(self, connection: AnyConnection, feed: FeedKey, event: DoneEvent) -> bool:
        """See `DoneScripts.is_done`."""
        query = sa.select(self._table.c.claim).where(
            *self._of(feed, event.partition), self._table.c.event_id == event.id
        )
        return (await connection.execute(query)).first() is not None

    async def forget(
        self, connection: AnyConnection, feed: FeedKey, passed: Mapping[int, Collection[str]]
    ) -> None:
        """See `DoneScripts.forget`."""
        for partition, ids in sorted(passed.items()):
            for some in in_parts(ids):
                named = self._table.c.event_id.in_(some)
                passing = sa.delete(self._table).where(*self._of(feed, partition), named)
                await connection.execute(passing)

    async def delete(
        self, connection: AnyConnection, feed: FeedKey, partitions: Collection[int] | None
    ) -> None:
        """See `DoneScripts.delete`."""
        columns = self._table.c
        everything = sa.delete(self._table).where(columns.feed_id == feed.id)
        if partitions is None:
            await connection.execute(everything)
            return
        for some in in_parts(partitions):
            await connection.execute(everything.where(columns.partition_id.in_(some)))

    async def move(self, connection: AnyConnection, old: FeedKey, new: FeedKey) -> None:
        """See `DoneScripts.move`."""
        await self.delete(connection, new, None)
        moved = sa.update(self._table).where(self._table.c.feed_id == old.id)
        await connection.execute(moved.values(feed_id=new.id))

    def _of(self, feed: FeedKey, partition: int) -> list[sa.ColumnElement[bool]]:
        columns = self._table.c
        return [columns.feed_id == feed.id, columns.partition_id == partition]
