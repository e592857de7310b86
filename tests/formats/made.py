"""All golden files, as this version writes them: by name, their text."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import redis
from sqlalchemy import create_engine

from feedapi_client.operations import FeedPositions, export_positions
from feedapi_client.quarantine import SQLiteQuarantineStore
from feedapi_client.quarantine.quarantine_store import (
    PostgresQuarantineStore,
    SQLAlchemyQuarantineStore,
)
from feedapi_client.stores import (
    PostgresCursorStore,
    RedisCursorStore,
    SQLAlchemyCursorStore,
    SQLiteCursorStore,
)
from tests.formats import spark
from tests.formats.stores import (
    FOREVER,
    POSITIONS,
    dump_redis,
    mariadb_database,
    postgres_database,
    sqlite_database,
    write,
)
from tests.servers import MariaDB, Postgres, Redis


def open_postgres(server: Postgres) -> Any:
    """Return a connection in autocommit mode to a database without tables of ours."""
    return _emptied(psycopg.connect(server.dsn, autocommit=True), postgres_database)


def open_mariadb(server: MariaDB) -> Any:
    """Do as `open_postgres`."""
    connection = pymysql.connect(
        unix_socket=server.socket,
        user="root",
        database="test",
        charset="utf8mb4",
        autocommit=True,
    )
    return _emptied(connection, mariadb_database)


def open_redis(server: Redis) -> Any:
    """Return a client of an empty database."""
    client = redis.Redis.from_url(server.url, decode_responses=True)
    client.flushall()
    return client


def _emptied(connection: Any, database: Any) -> Any:
    database(connection).clear()
    return connection


async def sqlite(folder: Path) -> str:
    """Return the file ``sqlite.sql``."""
    path = folder / "golden.db"
    async with SQLiteCursorStore(path, journal=FOREVER) as store:
        quarantine = SQLiteQuarantineStore(path)
        await quarantine.prepare()
        await write(store, quarantine)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return sqlite_database(connection).dump()


async def postgres(server: Postgres) -> str:
    """Return the file ``postgresql.sql``."""
    with closing(open_postgres(server)) as connection:
        async with PostgresCursorStore(server.dsn, journal=FOREVER) as store:
            quarantine = PostgresQuarantineStore(store.database)
            await store.create_tables()
            await quarantine.create_tables()
            await write(store, quarantine)
        return postgres_database(connection).dump()


async def mariadb(server: MariaDB) -> str:
    """Return the file ``mariadb.sql``."""
    with closing(open_mariadb(server)) as connection:
        await write_by_sqlalchemy(server.url("pymysql"))
        return mariadb_database(connection).dump()


async def write_by_sqlalchemy(url: str) -> None:
    """Write what the golden files hold with the stores of SQLAlchemy."""
    async with sqlalchemy_stores(url) as (store, quarantine):
        await store.create_tables()
        await quarantine.create_tables()
        await write(store, quarantine)


@asynccontextmanager
async def sqlalchemy_stores(url: str) -> AsyncIterator[tuple[Any, Any]]:
    """Give the stores of SQLAlchemy in a database, for which a synchronous driver is used."""
    engine = create_engine(url)
    try:
        async with SQLAlchemyCursorStore(engine, journal=FOREVER) as store:
            yield store, SQLAlchemyQuarantineStore(engine)
    finally:
        engine.dispose()


async def redis_commands(server: Redis) -> str:
    """Return the file ``redis.jsonl``."""
    with closing(open_redis(server)) as client:
        async with RedisCursorStore(server.url) as store:
            await write(store)
        return dump_redis(client)


def export() -> str:
    """Return the file ``export.json``."""
    feeds = [FeedPositions(key, positions) for key, positions in POSITIONS.items()]
    return export_positions(feeds).decode() + "\n"


def spark_files() -> dict[str, str]:
    """Return the files of Spark."""
    made: dict[str, Any] = {**spark.staged_objects(), "small": spark.small_objects()}
    return {
        f"spark-{name}.json": json.dumps(each, indent=1, ensure_ascii=True) + "\n"
        for name, each in made.items()
    }
