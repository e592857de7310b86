"""SQLAlchemyCursorStore passes the contract on real servers, and keeps cursors in the caller's own transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine

from feedapi_client.stores.sql import SQLAlchemyCursorStore
from feedapi_client.testing.store_contract import AdministrableStoreContract
from tests.servers import MariaDB, Postgres

pytestmark = pytest.mark.anyio


class SQLContract(AdministrableStoreContract):
    supports_transactions = True
    supports_second_handle = True
    supports_failure_injection = True

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
        async with engine.begin() as connection:
            await connection.run_sync(store.table.metadata.drop_all)
        await store.create_tables()
        yield store
        await engine.dispose()

    @asynccontextmanager
    async def second_handle(self, store: SQLAlchemyCursorStore) -> AsyncIterator[SQLAlchemyCursorStore]:
        engine = create_async_engine(store.engine.url)
        yield SQLAlchemyCursorStore(engine)
        await engine.dispose()

    async def begin(self, store: SQLAlchemyCursorStore) -> Any:
        return await store.engine.connect()

    async def commit(self, transaction: Any) -> None:
        await transaction.commit()
        await transaction.close()

    async def rollback(self, transaction: Any) -> None:
        await transaction.rollback()
        await transaction.close()

    @asynccontextmanager
    async def failing(self, store: SQLAlchemyCursorStore) -> AsyncIterator[None]:
        await self._execute(store.engine, "ALTER TABLE feedapi_cursors ADD CONSTRAINT fire CHECK (partition_id <> 5 OR revision < 0) NOT VALID")
        yield
        await self._execute(store.engine, "ALTER TABLE feedapi_cursors DROP CONSTRAINT fire")

    async def _execute(self, engine: AsyncEngine, *statements: str) -> None:
        async with engine.begin() as connection:
            for statement in statements:
                await connection.execute(sa.text(statement))


class TestPostgresWithPsycopg(SQLContract):
    @pytest.fixture
    def url(self, postgres: Postgres) -> str:
        return postgres.url("psycopg")


class TestPostgresWithAsyncpg(SQLContract):
    @pytest.fixture
    def url(self, postgres: Postgres) -> str:
        return postgres.url("asyncpg")


class TestPostgresWithSession(SQLContract):
    """`transaction` is an AsyncSession."""

    @pytest.fixture
    def url(self, postgres: Postgres) -> str:
        return postgres.url("psycopg")

    async def begin(self, store: SQLAlchemyCursorStore) -> AsyncSession:
        return AsyncSession(store.engine)


class TestSQLiteWithAiosqlite(SQLContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite+aiosqlite:///{tmp_path}/cursors.db"

    @asynccontextmanager
    async def failing(self, store: SQLAlchemyCursorStore) -> AsyncIterator[None]:
        trigger = "CREATE TRIGGER fail_{0} BEFORE {0} ON feedapi_cursors WHEN NEW.partition_id = 5 BEGIN SELECT RAISE(FAIL, 'disk on fire'); END"
        await self._execute(store.engine, trigger.format("INSERT"), trigger.format("UPDATE"))
        yield
        await self._execute(store.engine, "DROP TRIGGER fail_INSERT", "DROP TRIGGER fail_UPDATE")


class TestMariaDBWithAsyncmy(SQLContract):
    @pytest.fixture
    def url(self, mariadb: MariaDB) -> str:
        return mariadb.url("asyncmy")

    @asynccontextmanager
    async def failing(self, store: SQLAlchemyCursorStore) -> AsyncIterator[None]:
        trigger = "CREATE TRIGGER fail_{0} BEFORE {0} ON feedapi_cursors FOR EACH ROW IF NEW.partition_id = 5 THEN SIGNAL SQLSTATE '45000'; END IF"
        await self._execute(store.engine, trigger.format("INSERT"), trigger.format("UPDATE"))
        yield
        await self._execute(store.engine, "DROP TRIGGER fail_INSERT", "DROP TRIGGER fail_UPDATE")
