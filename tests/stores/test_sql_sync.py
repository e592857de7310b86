"""`SQLAlchemyCursorStore` with synchronous engines, connections and sessions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FeedKey
from feedapi_client.stores import Journal, JournalledStore, LeaseStore
from feedapi_client.stores.sql import SQLAlchemyCursorStore
from feedapi_client.testing.contracts import (
    AdministrableStoreContract,
    DoneStoreContract,
    LeaseStoreContract,
    advanced,
    opening,
)
from feedapi_client.testing.contracts.transactions import TransactionTests
from tests.servers import MariaDB, Postgres
from tests.stores.journal_contract import AGING, JournalContract, Make

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
FEED = FeedKey("https://service.test/feed")
TABLES = ("", "_journal", "_done", "_instances", "_leases")
SERVERS = ("sqlite", "postgres", "mariadb")
METADATA = sa.MetaData()
"""Of all contracts, so that an engine compiles each statement once."""


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_engine(url: str) -> sa.Engine:
    engine = sa.create_engine(url, pool_size=20)
    if engine.dialect.name == "sqlite":  # it need not survive the end of the machine
        sa.event.listen(
            engine, "connect", lambda each, _: each.execute("PRAGMA synchronous=OFF").close()
        )
    return engine


def url_of(server: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if server == "sqlite":
        return f"sqlite:///{folder}/app.db"
    running: Postgres | MariaDB = request.getfixturevalue(server)
    return running.url() if isinstance(running, Postgres) else running.url("pymysql")


def execute(engine: sa.Engine, *statements: str) -> list[Any]:
    with engine.begin() as connection:
        for statement in statements:
            result = connection.execute(sa.text(statement))
        return list(result) if result.returns_rows else []


def drop(engine: sa.Engine) -> None:
    tables = [f"feedapi_cursors{suffix}" for suffix in TABLES]
    execute(engine, *(f"DROP TABLE IF EXISTS {table}" for table in (*tables, "effects")))


kept_engine = cache(open_engine)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


class Synchronous:
    """The fixture `engine` of a server, with empty tables.

    They are those of the test before, if there are such.
    """

    server: str

    @pytest.fixture
    async def engine(
        self, request: pytest.FixtureRequest, folder: Path
    ) -> AsyncIterator[sa.Engine]:
        engine = kept_engine(url_of(self.server, request, folder))
        clear = "TRUNCATE TABLE" if engine.dialect.name == "mysql" else "DELETE FROM"
        try:
            execute(engine, *(f"{clear} feedapi_cursors{suffix}" for suffix in TABLES))
        except DBAPIError:
            drop(engine)
            store = SQLAlchemyCursorStore(engine, metadata=METADATA, journal=Journal())
            await store.create_tables()
        yield engine
        engine.dispose()


class SyncStore(Synchronous):
    supports_transactions = True
    supports_second_handle = True
    supports_failure_injection = True

    @pytest.fixture
    async def store(self, engine: sa.Engine) -> SQLAlchemyCursorStore:
        return SQLAlchemyCursorStore(engine, metadata=METADATA)

    @asynccontextmanager
    async def second_handle(self, store: Any) -> AsyncIterator[SQLAlchemyCursorStore]:
        engine = open_engine(store.engine.url)
        yield SQLAlchemyCursorStore(engine)
        engine.dispose()

    async def begin(self, store: Any) -> Any:
        return store.engine.connect()

    async def commit(self, transaction: Any) -> None:
        transaction.commit()
        transaction.close()

    async def rollback(self, transaction: Any) -> None:
        transaction.rollback()
        transaction.close()

    @asynccontextmanager
    async def failing(self, store: Any) -> AsyncIterator[None]:
        event = "CREATE TRIGGER fail_{0} BEFORE {0} ON feedapi_cursors "
        trigger = {
            "sqlite": event + "WHEN NEW.partition_id = 5 BEGIN SELECT RAISE(FAIL, 'fire'); END",
            "mysql": event + "FOR EACH ROW IF NEW.partition_id = 5 "
            "THEN SIGNAL SQLSTATE '45000'; END IF",
        }.get(store.engine.dialect.name)
        if trigger is None:
            execute(
                store.engine,
                "ALTER TABLE feedapi_cursors ADD CONSTRAINT fire "
                "CHECK (partition_id <> 5 OR revision < 0) NOT VALID",
            )
            yield
            execute(store.engine, "ALTER TABLE feedapi_cursors DROP CONSTRAINT fire")
            return
        execute(store.engine, trigger.format("INSERT"), trigger.format("UPDATE"))
        yield
        execute(store.engine, "DROP TRIGGER fail_INSERT", "DROP TRIGGER fail_UPDATE")


class SyncContract(SyncStore, AdministrableStoreContract, DoneStoreContract):
    pass


class TestConnectionOfSQLite(SyncContract):
    server = "sqlite"


class TestConnectionOfPostgres(SyncContract):
    server = "postgres"


class TestConnectionOfMariaDB(SyncContract):
    server = "mariadb"


class TestSessionOfPostgres(SyncStore, TransactionTests):
    server = "postgres"

    async def begin(self, store: Any) -> Any:
        return Session(store.engine)


class SyncLeases(Synchronous, LeaseStoreContract):
    supports_second_handle = True

    @pytest.fixture
    async def store(self, engine: sa.Engine) -> AsyncIterator[LeaseStore]:
        store = SQLAlchemyCursorStore(engine, metadata=METADATA)
        yield store
        await leave_all(store)

    @asynccontextmanager
    async def second_handle(self, store: Any) -> AsyncIterator[LeaseStore]:
        second = SQLAlchemyCursorStore(store.engine)
        yield second
        await leave_all(second)


async def leave_all(store: SQLAlchemyCursorStore) -> None:
    for feed, instance in list(store._joined):  # gives the connections back
        await store.leave(feed, instance)


class TestLeasesOfSQLite(SyncLeases):
    server = "sqlite"


class TestLeasesOfPostgres(SyncLeases):
    server = "postgres"


class TestLeasesOfMariaDB(SyncLeases):
    server = "mariadb"


class SyncJournal(Synchronous, JournalContract):
    @pytest.fixture
    async def make(self, engine: sa.Engine) -> Make:
        async def make(journal: Journal | None) -> SQLAlchemyCursorStore:
            return SQLAlchemyCursorStore(engine, metadata=METADATA, journal=journal)

        return make

    async def journal_rows(self, store: JournalledStore) -> int:
        assert isinstance(store, SQLAlchemyCursorStore)
        assert isinstance(store.engine, sa.Engine)
        return int(execute(store.engine, "SELECT COUNT(*) FROM feedapi_cursors_journal")[0][0])

    async def age(self, store: JournalledStore, seconds: int) -> None:
        assert isinstance(store, SQLAlchemyCursorStore)
        assert isinstance(store.engine, sa.Engine)
        execute(store.engine, *(each.replace(":by", f"{seconds}000000") for each in AGING))


class TestJournalOfMariaDB(SyncJournal):
    """The drivers of the other servers are those of `test_sql`."""

    server = "mariadb"


# ---------------------------------------------------------------- the application's transaction


@pytest.fixture(params=SERVERS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    engine = open_engine(url_of(request.param, request, tmp_path))
    drop(engine)
    execute(engine, "CREATE TABLE effects (n INTEGER)")
    yield engine
    drop(engine)
    engine.dispose()


@pytest.fixture
async def store(engine: sa.Engine) -> SQLAlchemyCursorStore:
    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()
    return store


@pytest.mark.parametrize("open", [Session, sa.Engine.connect], ids=["session", "connection"])
async def test_r05_cursor_and_effect_stand_or_fall_together(
    store: SQLAlchemyCursorStore, engine: sa.Engine, open: Any
) -> None:
    for commit in (False, True):
        with open(engine) as transaction:
            transaction.execute(sa.text("INSERT INTO effects VALUES (1)"))
            await store.save(FEED, opening(range(3)), transaction=transaction)
            (transaction.commit if commit else transaction.rollback)()
        effects = [row[0] for row in execute(engine, "SELECT n FROM effects")]
        stored = await store.load(FEED)
        assert (effects, stored) == (([1], opening(range(3))) if commit else ([], {}))


async def test_r17_a_refused_save_leaves_a_session_that_can_even_commit(
    store: SQLAlchemyCursorStore, engine: sa.Engine
) -> None:
    await store.save(FEED, opening())
    with Session(engine) as session:
        session.execute(sa.text("INSERT INTO effects VALUES (1)"))
        with pytest.raises(FencedError):
            await store.save(FEED, opening(range(5)), transaction=session)
        session.commit()
    assert (len(execute(engine, "SELECT n FROM effects")), await store.load(FEED)) == (1, opening())


async def test_an_asynchronous_store_takes_a_synchronous_transaction_and_the_reverse(
    store: SQLAlchemyCursorStore, engine: sa.Engine
) -> None:
    drivers = {"sqlite": "aiosqlite", "postgresql": "asyncpg", "mysql": "asyncmy"}
    name = engine.dialect.name
    other = create_async_engine(engine.url.set(drivername=f"{name}+{drivers[name]}"))
    with Session(engine) as session:
        await SQLAlchemyCursorStore(other).save(FEED, opening(), transaction=session)
        session.commit()
    async with other.begin() as connection:
        await store.save(FEED, advanced(opening()), transaction=connection)
    await other.dispose()
    assert await store.load(FEED) == advanced(opening())


async def test_the_callers_connection_is_used_by_one_thread_at_a_time_beside_the_event_loop(
    store: SQLAlchemyCursorStore, engine: sa.Engine
) -> None:
    used: list[int] = []
    sa.event.listen(engine, "before_cursor_execute", lambda *_: used.append(threading.get_ident()))
    with Session(engine) as session:
        await store.save(FEED, opening(range(3)), transaction=session)
        session.commit()
    assert threading.get_ident() not in used
    assert used


async def test_handlers_that_take_all_threads_of_the_event_loop_can_commit(
    postgres: Postgres,
) -> None:
    """They wait for their save: it needs a thread beside theirs."""
    engine = open_engine(postgres.url())
    drop(engine)
    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()
    threads = anyio.to_thread.current_default_thread_limiter()
    before, threads.total_tokens = threads.total_tokens, 4
    barrier = threading.Barrier(4)

    def handle(partition: int) -> None:
        with Session(engine) as session:
            barrier.wait(60)
            save = partial(store.save, FEED, opening([partition]), transaction=session)
            anyio.from_thread.run(save)
            session.commit()

    with anyio.fail_after(100):
        async with anyio.create_task_group() as group:
            for partition in range(4):
                group.start_soon(anyio.to_thread.run_sync, handle, partition)
    threads.total_tokens = before
    assert await store.load(FEED) == opening(range(4))
    drop(engine)
    engine.dispose()


async def test_a_database_that_does_not_answer_is_a_store_error(postgres: Postgres) -> None:
    engine = open_engine(postgres.url())
    drop(engine)
    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()
    await store.save(FEED, opening())
    with engine.begin() as connection:
        connection.execute(sa.text("LOCK TABLE feedapi_cursors IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(StoreError, match=r"did not answer within 0\.3 s"):
            await SQLAlchemyCursorStore(engine, timeout=0.3).save(FEED, advanced(opening()))
    while engine.pool.checkedout():  # type: ignore[attr-defined]  # noqa: ASYNC110
        await anyio.sleep(0.01)  # the thread ends, and gives up the connection
    await store.save(FEED, {1: opening([1])[1]})
    assert (await store.load(FEED))[0] == opening()[0]
    drop(engine)
    engine.dispose()


async def test_native_cancellation_within_a_save_keeps_all_or_nothing(
    store: SQLAlchemyCursorStore, engine: sa.Engine
) -> None:
    expected = opening(range(100))
    await store.save(FEED, expected)
    for delay in (0, 0.001, 0.003, 0.01):
        with Session(engine) as session:
            later = advanced(expected)
            task = asyncio.create_task(store.save(FEED, later, transaction=session))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait([task])
            session.rollback()
        assert await store.load(FEED) == expected
