"""The contract of a store of leases, for SQL databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from feedapi_client.stores.sql import SQLAlchemyCursorStore
from feedapi_client.testing.contracts import LeaseStoreContract
from tests.servers import MariaDB, Postgres


class SQL(LeaseStoreContract):
    supports_second_handle = True

    @pytest.fixture(params=["asyncio"])
    def anyio_backend(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    async def store(self, url: str) -> AsyncIterator[SQLAlchemyCursorStore]:
        engine = create_async_engine(url)
        store = SQLAlchemyCursorStore(engine)
        await store.create_tables()
        async with engine.begin() as connection:
            for table in (store.instance_table, store.lease_table):
                await connection.execute(text(f"DELETE FROM {table.name}"))
        yield store
        await _leave_all(store)
        await engine.dispose()

    @asynccontextmanager
    async def second_handle(
        self, store: SQLAlchemyCursorStore
    ) -> AsyncIterator[SQLAlchemyCursorStore]:
        engine: AsyncEngine = create_async_engine(store.engine.url)
        second = SQLAlchemyCursorStore(engine)
        yield second
        await _leave_all(second)
        await engine.dispose()


async def _leave_all(store: SQLAlchemyCursorStore) -> None:
    """Give the connection back."""
    for feed, instance in list(store._joined):
        await store.leave(feed, instance)


class TestPostgreSQL(SQL):
    @pytest.fixture(params=["psycopg", "asyncpg"])
    def url(self, postgres: Postgres, request: pytest.FixtureRequest) -> str:
        return postgres.url(request.param)


class TestMariaDB(SQL):
    @pytest.fixture
    def url(self, mariadb: MariaDB) -> str:
        return mariadb.url()


class TestSQLiteThroughSQLAlchemy(SQL):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite+aiosqlite:///{tmp_path}/cursors.db"
