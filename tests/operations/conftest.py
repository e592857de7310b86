"""The stores that operations are tested with, each empty and open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from feedapi_client import FeedKey, Journal, MemoryCursorStore, SQLiteCursorStore
from feedapi_client.stores import AdministrableStore, SQLAlchemyCursorStore
from feedapi_client.testing import Publisher


@pytest.fixture(params=["memory", "sqlite", "sqlalchemy"])
async def store(
    request: pytest.FixtureRequest, anyio_backend: str, tmp_path: Path
) -> AsyncIterator[AdministrableStore]:
    if request.param == "memory":
        yield MemoryCursorStore()
    elif request.param == "sqlite":
        async with SQLiteCursorStore(tmp_path / "cursors.db", journal=Journal()) as file:
            yield file
    else:
        if anyio_backend == "trio":
            pytest.skip("the driver runs on asyncio only")
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'sql.db'}")
        database = SQLAlchemyCursorStore(engine, journal=Journal())
        await database.create_tables()
        yield database
        await engine.dispose()


@pytest.fixture
def publisher(feedapi_publisher: Publisher) -> Publisher:
    return feedapi_publisher


@pytest.fixture
def key(publisher: Publisher) -> FeedKey:
    return FeedKey(str(publisher.url))
