"""Effects and cursors in a SQL server, through any driver of SQLAlchemy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from feedapi_client.stores.sql import SQLAlchemyCursorStore
from tests.crash.application import Row

_METADATA = sa.MetaData()
_EFFECTS = sa.Table(
    "effects",
    _METADATA,
    sa.Column("at", sa.BigInteger, primary_key=True, autoincrement=True),
    sa.Column("partition_id", sa.Integer, nullable=False),
    sa.Column("entity", sa.String(100), nullable=False),
    sa.Column("n", sa.Integer, nullable=False),
    sa.Column("writer", sa.Integer, nullable=False),
    mysql_engine="InnoDB",
)


class SQLApplication:
    """See `tests.crash.application.Application`. `url` is SQLAlchemy's."""

    def __init__(self, url: str) -> None:
        self.engine = create_async_engine(url, pool_pre_ping=True)
        self.store = SQLAlchemyCursorStore(self.engine)
        self.transaction = self.engine.begin

    @classmethod
    async def create(cls, url: str) -> None:
        """Create the tables, empty."""
        application = cls(url)
        async with application.engine.begin() as connection:
            await connection.run_sync(_METADATA.create_all)
        await application.store.create_tables()
        store = application.store
        async with application.engine.begin() as connection:
            tables = (store.table, store.done_table, store.instance_table, store.lease_table)
            for table in (_EFFECTS, *tables):
                await connection.execute(sa.delete(table))
        await application.aclose()

    async def write(self, transaction: Any, rows: Sequence[Row]) -> None:
        """Insert effects."""
        columns = {"partition": "partition_id"}
        values = [
            {columns.get(name, name): value for name, value in row._asdict().items()}
            for row in rows
        ]
        await transaction.execute(sa.insert(_EFFECTS), values)

    async def effects(self) -> list[tuple[str, int]]:
        """Return entity and number of each effect, in the order of insertion."""
        query = sa.select(_EFFECTS.c.entity, _EFFECTS.c.n).order_by(_EFFECTS.c.at)
        async with self.engine.connect() as connection:
            return [(entity, n) for entity, n in await connection.execute(query)]

    async def count(self) -> int:
        """Return the number of different effects."""
        return len(Counter(await self.effects()))

    async def aclose(self) -> None:
        """Close connections."""
        await self.engine.dispose()
