"""What every version wrote into a store is read, and a newer format is refused with advice.

The golden files are written by ``python -m tests.formats``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
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


@pytest.fixture
def postgres_connection(postgres: Postgres) -> Iterator[Any]:
    """A connection to a database without tables of ours."""
    with closing(made.open_postgres(postgres)) as connection:
        yield connection
        postgres_database(connection).clear()


@pytest.fixture
def mariadb_connection(mariadb: MariaDB) -> Iterator[Any]:
    """A connection to a database without tables of ours."""
    with closing(made.open_mariadb(mariadb)) as connection:
        yield connection
        mariadb_database(connection).clear()


async def check(store: Any, quarantine: Any) -> None:
    await check_journal(store)
    await check_store(store)
    await check_quarantine(quarantine)


# Every version is read


@pytest.mark.parametrize("library", ["sqlite3", "sqlalchemy"])
async def test_a_file_of_every_version_is_read(golden: Path, tmp_path: Path, library: str) -> None:
    path = tmp_path / "cursors.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        sqlite_database(connection).load((golden / "sqlite.sql").read_text())
    if library == "sqlalchemy":
        async with made.sqlalchemy_stores(f"sqlite:///{path}") as (store, quarantine):
            await check(store, quarantine)
    else:
        async with SQLiteCursorStore(path, journal=FOREVER) as file:
            await check(file, SQLiteQuarantineStore(path))


@pytest.mark.parametrize("library", ["psycopg", "sqlalchemy"])
async def test_a_postgresql_database_of_every_version_is_read(
    golden: Path, postgres: Postgres, postgres_connection: Any, library: str
) -> None:
    postgres_database(postgres_connection).load((golden / "postgresql.sql").read_text())
    if library == "sqlalchemy":
        async with made.sqlalchemy_stores(postgres.url()) as (store, quarantine):
            await check(store, quarantine)
    else:
        async with PostgresCursorStore(postgres.dsn, journal=FOREVER) as pooled:
            await check(pooled, PostgresQuarantineStore(pooled.database))


async def test_a_mariadb_database_of_every_version_is_read(
    golden: Path, mariadb: MariaDB, mariadb_connection: Any
) -> None:
    mariadb_database(mariadb_connection).load((golden / "mariadb.sql").read_text())
    async with made.sqlalchemy_stores(mariadb.url("pymysql")) as (store, quarantine):
        await check(store, quarantine)


async def test_keys_in_redis_of_every_version_are_read(golden: Path, redis_server: Redis) -> None:
    with closing(made.open_redis(redis_server)) as client:
        load_redis(client, (golden / "redis.jsonl").read_text())
    async with RedisCursorStore(redis_server.url) as store:
        await check_store(store)


def test_an_export_of_every_version_is_read(golden: Path) -> None:
    found = parse_export((golden / "export.json").read_bytes())
    assert {key: dict(each) for key, each in found.items()} == {
        key: {p: Position(each.cursor, each.status) for p, each in positions.items()}
        for key, positions in POSITIONS.items()
    }


# The newest golden files are what is written


async def test_the_golden_file_of_sqlite_is_what_is_written(tmp_path: Path) -> None:
    assert await made.sqlite(tmp_path) == (GOLDEN / "sqlite.sql").read_text(), REWRITE


async def test_the_golden_file_of_postgresql_is_what_is_written(postgres: Postgres) -> None:
    assert await made.postgres(postgres) == (GOLDEN / "postgresql.sql").read_text(), REWRITE


async def test_sqlalchemy_writes_the_same_into_postgresql(
    postgres: Postgres, postgres_connection: Any
) -> None:
    await made.write_by_sqlalchemy(postgres.url())
    written = postgres_database(postgres_connection).dump()
    assert written == (GOLDEN / "postgresql.sql").read_text()


async def test_the_golden_file_of_mariadb_is_what_is_written(mariadb: MariaDB) -> None:
    assert await made.mariadb(mariadb) == (GOLDEN / "mariadb.sql").read_text(), REWRITE


async def test_the_golden_file_of_redis_is_what_is_written(redis_server: Redis) -> None:
    assert await made.redis_commands(redis_server) == (GOLDEN / "redis.jsonl").read_text(), REWRITE


def test_the_golden_export_is_what_is_written() -> None:
    assert made.export() == (GOLDEN / "export.json").read_text(), REWRITE


# A newer format is refused

NEWER = r"a newer version of feedapi-client wrote .* \(format {}.*\): update feedapi-client here"
_NEXT = "UPDATE feedapi_format SET version = 2"


async def _check_refused(store: Any, quarantine: Any) -> None:
    for key in POSITIONS:
        with pytest.raises(StoreError, match=NEWER.format(2)):
            await store.load(key)
    with pytest.raises(StoreError, match=NEWER.format(2)):
        await quarantine.prepare()


@pytest.mark.parametrize("library", ["sqlite3", "sqlalchemy"])
async def test_a_newer_file_is_refused_with_advice(tmp_path: Path, library: str) -> None:
    path = tmp_path / "cursors.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        sqlite_database(connection).load((GOLDEN / "sqlite.sql").read_text())
        connection.execute(_NEXT)
    if library == "sqlalchemy":
        async with made.sqlalchemy_stores(f"sqlite:///{path}") as (store, quarantine):
            await _check_refused(store, quarantine)
            for each in (store, quarantine):
                with pytest.raises(StoreError, match=NEWER.format(2)):
                    await each.create_tables()
    else:
        async with SQLiteCursorStore(path) as file:
            await _check_refused(file, SQLiteQuarantineStore(path))


async def test_a_newer_postgresql_database_is_refused_with_advice(
    postgres: Postgres, postgres_connection: Any
) -> None:
    postgres_database(postgres_connection).load((GOLDEN / "postgresql.sql").read_text())
    postgres_connection.execute(_NEXT)
    async with PostgresCursorStore(postgres.dsn) as pooled:
        quarantine = PostgresQuarantineStore(pooled.database)
        await _check_refused(pooled, quarantine)
        for each in (pooled, quarantine):
            with pytest.raises(StoreError, match=NEWER.format(2)):
                await each.create_tables()


async def test_newer_keys_in_redis_are_refused_with_advice(redis_server: Redis) -> None:
    with closing(made.open_redis(redis_server)) as client:
        text = (GOLDEN / "redis.jsonl").read_text()
        load_redis(client, text.replace(r"\"format\":1", r"\"format\":2"))
    async with RedisCursorStore(redis_server.url) as store:
        for key in POSITIONS:
            with pytest.raises(StoreError, match=NEWER.format(2)):
                await store.load(key)


def test_a_newer_export_is_refused_with_advice() -> None:
    text = (GOLDEN / "export.json").read_text().replace("feedapi-cursors/1", "feedapi-cursors/2")
    with pytest.raises(ValueError, match=NEWER.format("feedapi-cursors/2")):
        parse_export(text.encode())


@pytest.mark.parametrize("library", ["sqlite3", "sqlalchemy"])
async def test_tables_without_a_noted_format_have_the_first_one(
    tmp_path: Path, library: str
) -> None:
    path = tmp_path / "cursors.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        sqlite_database(connection).load((GOLDEN / "sqlite.sql").read_text())
        connection.execute("DROP TABLE feedapi_format")
    if library == "sqlalchemy":
        async with made.sqlalchemy_stores(f"sqlite:///{path}") as (store, quarantine):
            await check(store, quarantine)
    else:
        async with SQLiteCursorStore(path, journal=FOREVER) as file:
            await check(file, SQLiteQuarantineStore(path))


# A key of another format is never taken for nothing


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=1)
    publisher.extend(0, [{"n": n} for n in range(3)])
    with publisher.serve():
        yield publisher


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        with closing(made.open_redis(server)):
            pass
        opened: Any = RedisCursorStore(server.url)
    else:
        opened = SQLiteCursorStore(tmp_path / "cursors.db")
    async with opened:
        yield opened


def key_of(publisher: Publisher, query: str = "?secret=1") -> FeedKey:
    return FeedKey(f"{publisher.url}{query}", "app", {"filter-a": "b"})


async def start(store: Any, publisher: Publisher, name: str = "app") -> int:
    """Read the feed to its end, and return the number of events."""
    async with FeedConsumer(
        f"{publisher.url}", store=store, name=name, start="first", follow=False
    ) as consumer:
        return len([event async for event in consumer])


async def test_a_consumer_does_not_begin_anew_beside_an_unknown_key(
    publisher: Publisher, tmp_path: Path
) -> None:
    assert publisher.url is not None
    path = tmp_path / "cursors.db"
    async with SQLiteCursorStore(path) as store:
        await store.save(FeedKey(publisher.url, "app"), {0: Position("c")})
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE feedapi_cursors SET feed_id = 'of another version'")
        with pytest.raises(StoreError, match="under a key that this version does not know"):
            await start(store, publisher)
