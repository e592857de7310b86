"""Errors of stores and of the transport name their cause, and quote no other library."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from feedapi_client import (
    FeedConsumer,
    FeedError,
    FeedUnavailableError,
    HostError,
    RedisCursorStore,
    RetryPolicy,
    SQLAlchemyCursorStore,
    SQLiteCursorStore,
    StoreError,
)
from feedapi_client.causes import causes, network_problem, store_problem
from feedapi_client.testing import Publisher
from tests.servers import Postgres
from tests.testing.virtual_time import asgi_client

pytestmark = pytest.mark.anyio
asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"])
AT_ONCE = RetryPolicy(give_up_after=0)
CLOSED = "127.0.0.1:9"  # "discard": nobody listens


async def entered(**options: Any) -> FeedError:
    """The error with which entering a consumer fails."""
    with pytest.raises(FeedError) as caught:
        async with (
            asgi_client(Publisher(1)) as http,
            FeedConsumer("http://feed/feed", http=http, **options),
        ):
            pass
    return caught.value


def sql_engine(url: str) -> Any:
    from sqlalchemy.ext.asyncio import create_async_engine

    return create_async_engine(url)


async def sql_error(url: str) -> str:
    engine = sql_engine(url)
    try:
        error = await entered(store=SQLAlchemyCursorStore(engine))
    finally:
        await engine.dispose()
    assert isinstance(error, StoreError)
    assert "hunter2" not in str(error)
    return error.message


@asyncio_only
@pytest.mark.parametrize("driver", ["postgresql+psycopg", "postgresql+asyncpg", "mysql+asyncmy"])
async def test_a_database_that_is_not_there_is_told(driver: str) -> None:
    refused = await sql_error(f"{driver}://app:hunter2@{CLOSED}/db")
    assert "the connection was refused: does the server run, and at this port?" in refused
    unknown = await sql_error(f"{driver}://app:hunter2@nosuchhost.invalid/db")
    assert "the host is unknown" in unknown


@asyncio_only
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_what_postgresql_refuses_is_told(postgres: Postgres, driver: str) -> None:
    url = postgres.url(driver)
    assert "there is no such database" in await sql_error(url.replace("/postgres?", "/nosuchdb?"))
    wrong = await sql_error(url.replace("postgres@", "nosuchuser@"))
    assert "the user or the password is refused" in wrong


@asyncio_only
async def test_a_redis_that_is_not_there_is_told() -> None:
    import redis.asyncio

    for address, told in ((CLOSED, "was refused"), ("nosuchhost.invalid:1", "host is unknown")):
        client = redis.asyncio.Redis.from_url(f"redis://:hunter2@{address}")
        error = await entered(store=RedisCursorStore(client))
        await client.aclose()
        assert isinstance(error, StoreError)
        assert told in error.message
        assert "hunter2" not in error.message


async def test_a_sqlite_file_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database, but a text that is long enough to be read")
    error = await entered(store=SQLiteCursorStore(tmp_path / "notes.txt"))
    assert error.message.endswith("file is not a database")
    error = await entered(store=SQLiteCursorStore(tmp_path / "missing" / "cursors.db"))
    assert "unable to open database file: there is no folder" in error.message


async def test_a_feed_that_is_not_there_is_told() -> None:
    with pytest.raises(FeedUnavailableError, match="ConnectError: the connection was refused"):
        async with FeedConsumer(f"http://{CLOSED}/feed", retry=AT_ONCE):
            pass
    with pytest.raises(HostError, match="its host, or the proxy's, is unknown"):
        async with FeedConsumer("http://nosuchhost.invalid/feed", retry=AT_ONCE):
            pass


class PgError(Exception):
    def __init__(self, sqlstate: str) -> None:
        super().__init__("a text that quotes hunter2")
        self.sqlstate = sqlstate


class SQLiteError(sqlite3.OperationalError):
    def __init__(self, name: str) -> None:
        super().__init__("a text that quotes hunter2")
        self.sqlite_errorname = name


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (PgError("28P01"), "the user or the password is refused"),
        (PgError("42P01"), "a table is missing"),
        (PgError("99999"), None),
        (Exception(1045, "Access denied for user"), "the user or the password is refused"),
        (Exception(1049, "Unknown database"), "there is no such database"),
        (Exception("WRONGPASS invalid username"), "the user or the password is refused"),
        (sqlite3.OperationalError("no such table: t"), "a table is missing"),
        (SQLiteError("SQLITE_FULL"), "the disk is full"),
        (SQLiteError("SQLITE_IOERR_READ"), "the disk has an error"),
        (TimeoutError(), "it timed out"),
        (ExceptionGroup("all", [ConnectionResetError(104, "x")]), "the connection was reset"),
        (ValueError("anything else: hunter2"), None),
    ],
)
def test_problems_are_told_in_words_of_ours(error: Exception, problem: str | None) -> None:
    assert store_problem(error) == problem


def test_a_chain_of_causes_may_be_a_circle() -> None:
    first, second = ValueError(1), ValueError(2)
    first.__cause__, second.__cause__ = second, first
    assert set(causes(first)) == {first, second}
    assert network_problem(first) is None


def test_the_error_below_sqlalchemys_is_looked_at() -> None:
    outer = ValueError("outer")
    outer.orig = PgError("3D000")  # type: ignore[attr-defined]
    assert store_problem(outer) == "there is no such database"
