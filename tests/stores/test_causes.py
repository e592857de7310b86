"""Errors of stores and of the transport name their cause, and quote no other library."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from feedapi_client import (
    FeedConsumer,
    FeedError,
    FeedUnavailableError,
    HostError,
    PostgresCursorStore,
    RedisCursorStore,
    RetryPolicy,
    SQLAlchemyCursorStore,
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


def store_at(place: str) -> Any:
    if place.startswith("redis"):
        return RedisCursorStore(place)
    if "+" in place:
        return SQLAlchemyCursorStore(create_async_engine(place))
    return PostgresCursorStore(place, timeout=5)


async def told(place: str) -> str:
    """What the error says with which a store at this place fails."""
    async with store_at(place) as store:
        error = await entered(store=store)
        assert isinstance(error, StoreError)
        assert "hunter2" not in f"{error} {store!r}"
    if "+" in place:
        await store.engine.dispose()
    return error.message


@pytest.mark.slow
@asyncio_only
@pytest.mark.parametrize(
    "place",
    [
        "postgresql://app:hunter2@{}/db",
        "postgresql+psycopg://app:hunter2@{}/db",
        "postgresql+asyncpg://app:hunter2@{}/db",
        "mysql+asyncmy://app:hunter2@{}/db",
        "redis://:hunter2@{}/0",
    ],
)
async def test_r19_a_database_that_is_not_there_is_told_without_its_password(place: str) -> None:
    closed, unknown = (
        "the connection was refused: does the server run, and at this port?",
        "the host is unknown",
    )
    if "+" not in place and not place.startswith("redis"):
        closed = unknown = "did not answer within 5 s"  # a pool does not say why
    assert closed in await told(place.format(CLOSED))
    assert unknown in await told(place.format("nosuchhost.invalid:1"))


@asyncio_only
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_what_postgresql_refuses_is_told(postgres: Postgres, driver: str) -> None:
    url = postgres.url(driver)
    assert "there is no such database" in await told(url.replace("/postgres?", "/nosuchdb?"))
    wrong = await told(url.replace("postgres@", "nosuchuser@"))
    assert "the user or the password is refused" in wrong


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
