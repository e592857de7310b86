"""What every version wrote into a store is read, and a newer format is refused with advice.

The golden files are written by ``python -m tests.formats``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from feedapi_client import FeedConsumer, FeedKey, Position, StoreError
from feedapi_client.operations import parse_export
from feedapi_client.quarantine import SQLiteQuarantineStore
from feedapi_client.quarantine.quarantine_store import PostgresQuarantineStore
from feedapi_client.stores import (
    PostgresCursorStore,
    RedisCursorStore,
    SQLiteCursorStore,
)
from feedapi_client.testing import Publisher
from tests.formats import made
from tests.formats.stores import (
    FOREVER,
    GOLDEN,
    POSITIONS,
    check_journal,
    check_quarantine,
    check_store,
    load_redis,
    mariadb_database,
    postgres_database,
    sqlite_database,
)
from tests.servers import MariaDB, Postgres, Redis

pytestmark = pytest.mark.anyio

VERSIONS = sorted(folder.name for folder in GOLDEN.parent.iterdir())
REWRITE = "a format changed: see docs/pages/formats.md, and then run python -m tests.formats"


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest) -> Path:
    """The folder of the files of one version."""
    return GOLDEN.parent / str(request.param)


SERVERS = ("psycopg", "postgresql", "mariadb", "redis")
MEDIA = ("sqlite3", "sqlite", *(pytest.param(each, marks=pytest.mark.slow) for each in SERVERS))
"""Stores of ours on their own driver, and on SQLAlchemy under the name of the database."""


@asynccontextmanager
async def loaded(
    medium: str, folder: Path, request: pytest.FixtureRequest, tmp_path: Path, change: str = ""
) -> AsyncIterator[tuple[Any, Any]]:
    """Give cursors and quarantine on what a golden file holds, after one more statement."""
    if medium == "redis":
        server: Redis = request.getfixturevalue("redis_server")
        text = (folder / "redis.jsonl").read_text()
        if change == _NEXT:
            text = text.replace(r"\"format\":1", r"\"format\":2")
        with closing(made.open_redis(server)) as client:
            load_redis(client, text)
        async with RedisCursorStore(server.url) as store:
            yield store, None
        return
    path = tmp_path / "cursors.db"
    with ExitStack() as stack:
        if medium.startswith("sqlite"):
            file = stack.enter_context(closing(sqlite3.connect(path, isolation_level=None)))
            database, url, name = sqlite_database(file), f"sqlite:///{path}", "sqlite.sql"
        elif medium == "mariadb":
            maria: MariaDB = request.getfixturevalue("mariadb")
            connection = stack.enter_context(closing(made.open_mariadb(maria)))
            database, url, name = mariadb_database(connection), maria.url("pymysql"), "mariadb.sql"
        else:
            postgres: Postgres = request.getfixturevalue("postgres")
            connection = stack.enter_context(closing(made.open_postgres(postgres)))
            database, url, name = postgres_database(connection), postgres.url(), "postgresql.sql"
        database.load((folder / name).read_text())
        stack.callback(database.clear)
        if change:
            database.execute(change)
        if medium == "sqlite3":
            async with SQLiteCursorStore(path, journal=FOREVER) as store:
                yield store, SQLiteQuarantineStore(path)
        elif medium == "psycopg":
            async with PostgresCursorStore(postgres.dsn, journal=FOREVER) as pooled:
                yield pooled, PostgresQuarantineStore(pooled.database)
        else:
            async with made.sqlalchemy_stores(url) as stores:
                yield stores


# Every version is read


@pytest.mark.parametrize("change", ["", "DROP TABLE feedapi_format"], ids=["", "of the first"])
@pytest.mark.parametrize("medium", MEDIA)
async def test_what_every_version_wrote_is_read(
    medium: str, change: str, golden: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Tables without a noted format have the first one."""
    async with loaded(medium, golden, request, tmp_path, change) as (store, quarantine):
        if quarantine is not None:
            await check_journal(store)
            await check_quarantine(quarantine)
        await check_store(store)


def test_an_export_of_every_version_is_read(golden: Path) -> None:
    found = parse_export((golden / "export.json").read_bytes())
    assert {key: dict(each) for key, each in found.items()} == {
        key: {p: Position(each.cursor, each.status) for p, each in positions.items()}
        for key, positions in POSITIONS.items()
    }


# The newest golden files are what is written


@pytest.mark.parametrize(
    ("name", "make", "place"),
    [
        ("sqlite.sql", made.sqlite, "tmp_path"),
        pytest.param("postgresql.sql", made.postgres, "postgres", marks=pytest.mark.slow),
        pytest.param("mariadb.sql", made.mariadb, "mariadb", marks=pytest.mark.slow),
        pytest.param("redis.jsonl", made.redis_commands, "redis_server", marks=pytest.mark.slow),
    ],
)
async def test_a_golden_file_is_what_is_written(
    name: str, make: Any, place: str, request: pytest.FixtureRequest
) -> None:
    assert await make(request.getfixturevalue(place)) == (GOLDEN / name).read_text(), REWRITE


async def test_sqlalchemy_writes_the_same_into_postgresql(postgres: Postgres) -> None:
    with closing(made.open_postgres(postgres)) as connection:
        database = postgres_database(connection)
        await made.write_by_sqlalchemy(postgres.url())
        assert database.dump() == (GOLDEN / "postgresql.sql").read_text()
        database.clear()


def test_the_golden_export_is_what_is_written() -> None:
    assert made.export() == (GOLDEN / "export.json").read_text(), REWRITE


# A newer format is refused

NEWER = r"a newer version of feedapi-client wrote .* \(format {}.*\): update feedapi-client here"
_NEXT = "UPDATE feedapi_format SET version = 2"


@pytest.mark.parametrize("medium", MEDIA)
async def test_a_newer_format_is_refused_with_advice(
    medium: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    newer = pytest.raises(StoreError, match=NEWER.format(2))
    async with loaded(medium, GOLDEN, request, tmp_path, _NEXT) as (store, quarantine):
        for key in POSITIONS:
            with newer:
                await store.load(key)
        if quarantine is not None:
            with newer:
                await quarantine.prepare()
        for each in (store, quarantine):
            if hasattr(each, "create_tables"):
                with newer:
                    await each.create_tables()


def test_a_newer_export_is_refused_with_advice() -> None:
    text = (GOLDEN / "export.json").read_text().replace("feedapi-cursors/1", "feedapi-cursors/2")
    with pytest.raises(ValueError, match=NEWER.format("feedapi-cursors/2")):
        parse_export(text.encode())


# A key of another format is never taken for nothing


async def test_a_consumer_does_not_begin_anew_beside_an_unknown_key(
    feedapi_publisher: Publisher, tmp_path: Path
) -> None:
    url, path = str(feedapi_publisher.url), tmp_path / "cursors.db"
    async with SQLiteCursorStore(path) as store:
        await store.save(FeedKey(url, "app"), {0: Position("c")})
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE feedapi_cursors SET feed_id = 'of another version'")
        with pytest.raises(StoreError, match="under a key that this version does not know"):
            async with FeedConsumer(url, store=store, name="app", start="first", follow=False):
                pass
