"""Where cursors go, and what the application's role may do there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import UpdateBase

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.quarantine.quarantine_store import (
    PostgresQuarantineStore,
    SQLAlchemyQuarantineStore,
)
from feedapi_client.stores import Journal, PostgresCursorStore
from feedapi_client.stores.sql import SQLAlchemyCursorStore
from feedapi_client.testing.contracts import advanced, opening
from tests.servers import Postgres

pytestmark = pytest.mark.anyio
FEED = FeedKey("https://service.test/feed")


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def by_statement(writer: Any, reader: Any, _: sa.Table) -> dict[str, Any]:
    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **more: Any) -> Any:
            engine: Any = writer if isinstance(clause, UpdateBase) else reader
            return engine.sync_engine if isinstance(engine, AsyncEngine) else engine

    return {"class": Routing}


def by_table(writer: Any, reader: Any, table: sa.Table) -> dict[str, Any]:
    return {"bind": reader, "binds": {table: writer}}


@pytest.mark.parametrize("route", [by_statement, by_table])
@pytest.mark.parametrize("kind", [Session, AsyncSession])
async def test_r05_a_session_of_several_engines_saves_the_cursor_where_it_writes(
    tmp_path: Path, route: Any, kind: type[Any]
) -> None:
    address = f"sqlite{'+aiosqlite' if kind is AsyncSession else ''}:///{tmp_path}"
    create = create_async_engine if kind is AsyncSession else sa.create_engine
    writer, reader = create(f"{address}/writer.db"), create(f"{address}/reader.db")
    store = SQLAlchemyCursorStore(writer)
    await store.create_tables()
    await store.save(FEED, opening())
    options = route(writer, reader, store.table)
    made = options.pop("class", Session)
    session = (
        AsyncSession(sync_session_class=made, **options)
        if kind is AsyncSession
        else made(**options)
    )
    for commit in (False, True):
        await store.save(FEED, advanced(opening()), transaction=session)
        done = session.commit() if commit else session.rollback()
        if done is not None:
            await done
        assert await store.load(FEED) == (advanced(opening()) if commit else opening())
    closed = session.close()
    if closed is not None:
        await closed
    for engine in (writer, reader):
        disposed = engine.dispose()
        if disposed is not None:
            await disposed


@pytest.mark.slow
async def test_the_schema_of_the_metadata_is_the_schema_of_the_tables(postgres: Postgres) -> None:
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS app CASCADE")
        connection.execute("CREATE SCHEMA app")
        engine = create_async_engine(postgres.url("psycopg"))
        metadata = sa.MetaData(schema="app")
        stores = [
            SQLAlchemyCursorStore(engine, metadata=metadata, journal=Journal()) for _ in range(2)
        ]
        quarantines = [SQLAlchemyQuarantineStore(engine, metadata=metadata) for _ in range(2)]
        async with engine.begin() as migration:
            await migration.run_sync(metadata.create_all)
        await stores[0].save(FEED, opening())
        assert await stores[1].load(FEED) == opening()
        assert await quarantines[1].page() == []
        await engine.dispose()
        connection.execute("DROP SCHEMA app CASCADE")


@pytest.mark.slow
async def test_tables_that_exist_need_no_right_to_create(postgres: Postgres) -> None:
    with psycopg.connect(postgres.dsn, autocommit=True) as owner:
        owner.execute("DROP SCHEMA IF EXISTS app CASCADE")
        owner.execute("CREATE SCHEMA app")
        async with PostgresCursorStore(postgres.dsn, schema="app", journal=Journal()) as store:
            await store.create_tables()
            await PostgresQuarantineStore(store.database, schema="app").create_tables()
            owner.execute("CREATE ROLE limited LOGIN")
            owner.execute("GRANT USAGE ON SCHEMA app TO limited")
            owner.execute("GRANT ALL ON ALL TABLES IN SCHEMA app TO limited")
            try:
                await _as_limited(postgres, owner)
            finally:
                owner.execute("DROP SCHEMA app CASCADE")
                owner.execute("DROP ROLE limited")


async def _as_limited(postgres: Postgres, owner: psycopg.Connection[Any]) -> None:
    limited = psycopg.conninfo.make_conninfo(postgres.dsn, user="limited")
    async with PostgresCursorStore(limited, schema="app", journal=Journal()) as store:
        await store.create_tables()
        await PostgresQuarantineStore(store.database, schema="app").create_tables()
        await store.save(FEED, opening())
        assert await store.load(FEED) == opening()
        owner.execute("DROP TABLE app.feedapi_cursors_journal")
        with pytest.raises(StoreError, match="permission"):
            await store.create_tables()
