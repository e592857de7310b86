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
from feedapi_client.operations import OperationError, parse_export, upgrade
from feedapi_client.quarantine import SQLiteQuarantineStore
from feedapi_client.quarantine.postgres_quarantine import PostgresQuarantineStore
from feedapi_client.stores import (
    PostgresCursorStore,
    RedisCursorStore,
    SQLiteCursorStore,
)
from feedapi_client.stores.stored_format import FirstFormatKey
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


def test_the_key_of_version_0_1_0_is_what_that_version_computed() -> None:
    key = FeedKey("https://shop.test/orders?tenant=7", "billing", {"filter-kind": "new"})
    # sha256 of "https://shop.test/orders?sha256=ceb45873bb50898c\0billing\0filter-kind\0new"
    assert FirstFormatKey.of(key).id == (
        "7b56dea5237b60bc6077e6e7fd65047d77473855d74e03dd869bd9f5e68c72a1"
    )


async def start(store: Any, publisher: Publisher, name: str = "app") -> int:
    """Read the feed to its end, and return the number of events."""
    async with FeedConsumer(
        f"{publisher.url}", store=store, name=name, start="first", follow=False
    ) as consumer:
        return len([event async for event in consumer])


async def test_a_consumer_does_not_begin_anew_beside_positions_of_version_0_1_0(
    store: Any, publisher: Publisher
) -> None:
    assert publisher.url is not None
    key = FeedKey(publisher.url, "app")
    await store.save(FirstFormatKey.of(key), {0: Position(publisher.end_cursor(0))})
    with pytest.raises(StoreError, match=r"holds 1 positions .*'app'.*'feedapi cursors upgrade'"):
        await start(store, publisher)
    assert await start(store, publisher, "other") == 3
    (upgraded,) = await upgrade(store)
    assert (upgraded.key, set(upgraded.positions)) == (key, {0})
    assert await start(store, publisher) == 0


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


async def test_what_was_stored_under_a_query_is_upgraded_too(
    publisher: Publisher, tmp_path: Path
) -> None:
    key, path = key_of(publisher), tmp_path / "cursors.db"
    async with SQLiteCursorStore(path) as store:
        await store.save(FirstFormatKey.of(key), {0: Position("c"), 1: Position("d", "drained")})
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(
                "UPDATE feedapi_cursors SET feed_url = replace(feed_url, '#sha256=', '?sha256=')"
            )
        assert await store.feeds() == [key]
        (upgraded,) = await upgrade(store)
        assert upgraded.key == key
        assert await store.load(key) == upgraded.positions
        assert {p: each.cursor for p, each in upgraded.positions.items()} == {0: "c", 1: "d"}
        assert await upgrade(store) == []


async def test_an_upgrade_does_not_choose_between_two_histories(
    store: Any, publisher: Publisher
) -> None:
    key = key_of(publisher)
    await store.save(FirstFormatKey.of(key), {0: Position("former")})
    await store.save(key, {0: Position("anew")})
    with pytest.raises(OperationError, match=r"has begun anew .* 'feedapi cursors reset', then"):
        await upgrade(store, [key])
    assert (await store.load(key))[0].cursor == "anew"
    assert (await store.load(FirstFormatKey.of(key)))[0].cursor == "former"
