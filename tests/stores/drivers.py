"""Every store on every driver, as an application has it, for the contracts and what is beside them.

A test or contract `with_drivers` runs for each of them, on the event loops that it runs on; the
fixture `app` opens the application.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import isawaitable
from pathlib import Path
from typing import Any

import anyio
import asyncpg  # type: ignore[import-untyped]
import psycopg
import pytest
import redis
import redis.asyncio
import sqlalchemy as sa
from asgiref.sync import sync_to_async
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from feedapi_client.stores import (
    Journal,
    MemoryCursorStore,
    PostgresCursorStore,
    RedisCursorStore,
    SQLAlchemyCursorStore,
    SQLiteCursorStore,
)
from tests.django import databases
from tests.django.databases import File
from tests.postgres_pools import opened

TABLES = [f"feedapi_cursors{each}" for each in ("", "_journal", "_done", "_instances", "_leases")]
METADATA = sa.MetaData()
"""Of all contracts, so that an engine compiles each statement once."""
_PATIENT: dict[str, Any] = {"timeout": 300}
"""A save of all partitions is a contract's, and the machine may be slow."""
ASYNCIO, BOTH = ("asyncio",), ("asyncio", "trio")


@dataclass(frozen=True)
class Driver:
    """A store with the library below it.

    Attributes:
        kind: what opens a handle: a pool of `tests.postgres_pools`, a drivername of SQLAlchemy, or
            the name of a store.
        server: the fixture of the server; "file" and "memory" for SQLite's.
        loops: the event loops that it runs on.
        transaction: what the application passes, if it is not the usual connection.
    """

    name: str
    kind: str
    server: str
    loops: Sequence[str] = ASYNCIO
    transaction: str = ""


def _sqlalchemy(drivername: str, server: str, *transactions: str) -> list[Driver]:
    return [
        Driver(f"SQLAlchemy {drivername} {each}".rstrip(), drivername, server, transaction=each)
        for each in ("", *transactions)
    ]


MEMORY = Driver("memory", "memory", "memory", BOTH)
FILES = [
    Driver("sqlite3", "sqlite", "file", BOTH),
    *_sqlalchemy("sqlite+aiosqlite", "file", "session"),
    *_sqlalchemy("sqlite", "file", "session"),
]
POSTGRES = [
    Driver("psycopg", "psycopg", "postgres"),
    Driver("psycopg, rows of the caller", "a DSN", "postgres", transaction="rows"),
    Driver("psycopg in threads", "psycopg in threads", "postgres", BOTH),
    Driver("asyncpg", "asyncpg", "postgres"),
]
SERVED = [
    *POSTGRES,
    *_sqlalchemy("postgresql+psycopg", "postgres", "session", "synchronous", "synchronous session"),
    *_sqlalchemy("postgresql+asyncpg", "postgres"),
    *_sqlalchemy("mysql+asyncmy", "mariadb"),
    *_sqlalchemy("mysql+pymysql", "mariadb", "session"),
]
REDIS = [
    Driver("Redis", "redis", "redis_server"),
    Driver("Redis, decoded", "redis, decoded", "redis_server"),
]
DJANGO = [Driver(f"Django {each}", "django", each) for each in ("file", "postgres", "mariadb")]
CONNECTED = [each for each in SERVED if not each.transaction]
TRANSACTING = [*FILES, *SERVED]
# A session differs from a connection by how a transaction is handed over, and by nothing else.
SQL = [MEMORY, *(each for each in TRANSACTING if "session" not in each.transaction)]


def with_drivers(drivers: Sequence[Driver]) -> Any:
    """Run a test with each of the drivers."""
    cases = [
        pytest.param(
            driver,
            loop,
            id=f"{driver.name}-{loop}",
            marks=[] if driver.server in ("memory", "file") else pytest.mark.slow,
        )
        for driver in drivers
        for loop in driver.loops
    ]
    return pytest.mark.parametrize(("driver", "anyio_backend"), cases)


class App:
    """An application with one handle to its database: a pool, an engine, a client or a file."""

    def __init__(self, driver: Driver, place: Any, given: Any) -> None:
        self.driver, self.place, self.given = driver, place, given
        self._kind = driver.kind
        self._begun: dict[int, Any] = {}

    def store(self, **options: Any) -> Any:
        """Return a store on the handle."""
        if self._kind == "memory":
            return MemoryCursorStore()
        if self._kind == "django":
            from feedapi_client.django import DjangoCursorStore  # Django has its settings

            return DjangoCursorStore(self.given, **options)
        if self._kind.startswith("redis"):
            return RedisCursorStore(self.given, **{**_PATIENT, **options})
        if self._kind == "sqlite" and not self.is_sqlalchemy:
            return SQLiteCursorStore(self.given, **options)
        if self.is_sqlalchemy:
            return SQLAlchemyCursorStore(
                self.given, **{"metadata": METADATA, **_PATIENT, **options}
            )
        return PostgresCursorStore(self.given, **{**_PATIENT, **options})

    @property
    def is_sqlalchemy(self) -> bool:
        return self.driver.name.startswith("SQLAlchemy")

    @property
    def admin(self) -> sa.Engine:
        """An engine for what the application does not do."""
        return admin(self.place)

    def execute(self, *statements: str) -> list[Any]:
        """Execute statements beside the store, each in a transaction of its own."""
        rows: list[Any] = []
        for statement in statements:
            with self.admin.begin() as connection:
                result = connection.execute(sa.text(statement))
                rows = [tuple(row) for row in result] if result.returns_rows else []
        return rows

    async def begin(self) -> Any:
        """Begin a transaction as the application does, and return what `save` takes."""
        if self._kind == "django":
            return await sync_to_async(databases.begin)(self.given)
        if self.is_sqlalchemy:
            if "session" in self.driver.transaction:
                return (AsyncSession if isinstance(self.given, AsyncEngine) else Session)(
                    self.given
                )
            connected = self.given.connect()
            return await connected if isinstance(self.given, AsyncEngine) else connected
        if self.driver.server == "file":
            return sqlite3.connect(self.place.path)
        if self._kind == "psycopg in threads":
            return psycopg.connect(self.place.dsn)
        if self._kind == "asyncpg":
            connection = await asyncpg.connect(self.place.dsn)
            self._begun[id(connection)] = transaction = connection.transaction()
            await transaction.start()
            return connection
        if self.driver.transaction != "rows":
            return await psycopg.AsyncConnection.connect(self.place.dsn)
        rows = await psycopg.AsyncConnection.connect(
            self.place.dsn, autocommit=True, row_factory=dict_row
        )
        await rows.execute("BEGIN")
        return rows

    async def write(self, transaction: Any, *effects: int) -> None:
        """Write effects, by default one, in the application's transaction."""
        rows = ", ".join(f"({n})" for n in effects or (1,))
        statement: Any = f"INSERT INTO effects (n) VALUES {rows}"
        if self._kind == "django":
            await sync_to_async(databases.execute)(self.given, statement)
            return
        await awaited(transaction.execute(sa.text(statement) if self.is_sqlalchemy else statement))

    async def end(self, transaction: Any, *, commit: bool) -> None:
        """End a transaction, and release it."""
        if self._kind == "django":
            await sync_to_async(databases.end)(self.given, commit=commit)
            return
        ends = self._begun.pop(id(transaction), transaction)
        if not getattr(transaction, "closed", False):  # psycopg closes what was cancelled
            await awaited(ends.commit() if commit else ends.rollback())
        await awaited(transaction.close())

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """Give what `save` takes; commit at the end, or roll back after an error."""
        begun, whole = await self.begin(), False
        try:
            yield begun
            whole = True
        finally:
            await self.end(begun, commit=whole)


async def awaited(value: Any) -> None:
    if isawaitable(value):
        await value


@cache
def _engine(url: str) -> sa.Engine:
    return sa.create_engine(url, poolclass=sa.NullPool)


def admin(place: Any) -> sa.Engine:
    """Return an engine beside those of the application."""
    if isinstance(place, File):
        return _engine(f"sqlite:///{place.path}")
    return _engine(place.url() if hasattr(place, "dsn") else place.url("pymysql"))


@asynccontextmanager
async def handle(driver: Driver, place: Any) -> AsyncIterator[App]:
    """Open a handle of the driver."""
    if driver.kind == "django":
        registered = databases.registered(databases.settings_of(place))
        using = await sync_to_async(registered.__enter__)()
        yield App(driver, place, using)
        await sync_to_async(registered.__exit__)(None, None, None)
    elif driver.server == "memory" or (driver.kind == "sqlite" and "SQLA" not in driver.name):
        yield App(driver, place, None if driver.server == "memory" else place.path)
    elif driver.server == "redis_server":
        decodes = driver.kind.endswith("decoded")
        url = place.url
        async with redis.asyncio.Redis.from_url(url, decode_responses=decodes) as client:
            yield App(driver, place, client)
    elif "SQLA" not in driver.name:
        async with opened(driver.kind, place.dsn) as pool:
            yield App(driver, place, pool)
    else:
        with _disposed(driver, place) as engine:
            yield App(driver, place, engine)
            while not isinstance(engine, AsyncEngine) and engine.pool.checkedout():  # noqa: ASYNC110
                await anyio.sleep(0.01)  # a thread that nobody waits for any more rolls back
            await awaited(engine.dispose())


@contextmanager
def _disposed(driver: Driver, place: Any) -> Iterator[Any]:
    url = admin(place).url.set(drivername=driver.kind)
    synchronous = driver.kind in ("sqlite", "mysql+pymysql") or "synchronous" in driver.transaction
    yield sa.create_engine(url, pool_size=20) if synchronous else create_async_engine(url)


@asynccontextmanager
async def empty(driver: Driver, request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[App]:
    """Open a handle to empty tables, which on a server are those of the test before."""
    if driver.server in ("memory", "file"):
        place: Any = File(folder / "app.db")
    else:
        place = request.getfixturevalue(driver.server)
    if driver.kind == "django" and driver.server == "file":
        place.path.write_bytes(await sync_to_async(databases.migrated_file)())
    async with handle(driver, place) as app:
        if driver.server == "redis_server":
            with redis.Redis.from_url(place.url) as client:
                client.flushall()
        elif driver.server != "memory":
            clear = "TRUNCATE TABLE" if driver.server == "mariadb" else "DELETE FROM"
            try:
                app.execute(*(f"{clear} {table}" for table in TABLES))
            except sa.exc.DBAPIError:
                app.execute(*(f"DROP TABLE IF EXISTS {table}" for table in TABLES))
                if driver.kind == "django":
                    await sync_to_async(databases.migrate)(app.given)
                created = app.store(journal=Journal())
                if hasattr(created, "create_tables"):
                    await created.create_tables()
                await created.feeds()  # a file is made by its first use
                await created.aclose()
            app.execute("DROP TABLE IF EXISTS effects", "CREATE TABLE effects (n INTEGER)")
        yield app


async def leave_all(store: Any) -> None:
    """Let all instances of a store leave, which gives its connections back."""
    for feed, instance in list(getattr(store, "_joined", ())):
        await store.leave(feed, instance)


@contextmanager
def failing(app: App) -> Iterator[None]:
    """Let a save of the partitions 0 to 9 fail in the storage, after some of them."""
    server = app.driver.server
    if server == "redis_server":
        with redis.Redis.from_url(app.place.url) as client:
            client.config_set("maxmemory", 1)
            yield
            client.config_set("maxmemory", 0)
        return
    if server == "postgres":
        check = "CHECK (partition_id <> 5 OR revision < 0) NOT VALID"
        app.execute(f"ALTER TABLE feedapi_cursors ADD CONSTRAINT fire {check}")
        yield
        app.execute("ALTER TABLE feedapi_cursors DROP CONSTRAINT fire")
        return
    fails = {
        "file": "WHEN NEW.partition_id = 5 BEGIN SELECT RAISE(FAIL, 'disk on fire'); END",
        "mariadb": "FOR EACH ROW IF NEW.partition_id = 5 THEN SIGNAL SQLSTATE '45000'; END IF",
    }[server]
    for event in ("INSERT", "UPDATE"):
        app.execute(f"CREATE TRIGGER fail_{event} BEFORE {event} ON feedapi_cursors {fails}")
    yield
    app.execute("DROP TRIGGER fail_INSERT", "DROP TRIGGER fail_UPDATE")
