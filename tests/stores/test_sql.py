"""`SQLAlchemyCursorStore` on real servers: the contracts, and the caller's own transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import scoped_session, sessionmaker
from sqlalchemy.schema import CreateTable

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores import Journal, JournalledStore
from feedapi_client.stores.sql import SQLAlchemyCursorStore
from feedapi_client.testing.contracts import (
    AdministrableStoreContract,
    DoneStoreContract,
    advanced,
    opening,
)
from tests.positions import counted
from tests.servers import MariaDB, Postgres
from tests.stores.journal_contract import AGING, JournalContract, Make

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
FEED = FeedKey("https://service.test/feed")
TABLES = tuple(
    f"feedapi_cursors{suffix}" for suffix in ("", "_journal", "_done", "_instances", "_leases")
)
METADATA = sa.MetaData()
"""Of all contracts, so that an engine compiles each statement once."""


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_engine(url: str | sa.URL) -> AsyncEngine:
    """Create an engine; SQLite's does not wait for the disk."""
    engine = create_async_engine(url)
    if engine.dialect.name == "sqlite":
        sa.event.listen(
            engine.sync_engine,
            "connect",
            lambda connection, _: connection.execute("PRAGMA synchronous=OFF").close(),
        )
    return engine


kept_engine = cache(open_engine)


@asynccontextmanager
async def emptied(url: str) -> AsyncIterator[AsyncEngine]:
    """Give an engine, and empty tables, which are those of the test before if there are such."""
    engine = kept_engine(url)
    clear = "TRUNCATE TABLE" if engine.dialect.name == "mysql" else "DELETE FROM"
    try:
        await execute(engine, *(f"{clear} {table}" for table in TABLES))
    except DBAPIError:
        await drop_tables(engine)
        whole = SQLAlchemyCursorStore(engine, metadata=METADATA, journal=Journal())
        await whole.create_tables()
    yield engine
    await engine.dispose()  # each test has an event loop of its own


@pytest.fixture(scope="module")
def sqlite_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite+aiosqlite:///{tmp_path_factory.mktemp('kept')}/cursors.db"


async def drop_tables(engine: AsyncEngine) -> None:
    await execute(engine, *(f"DROP TABLE IF EXISTS {table}" for table in (*TABLES, "effects")))


async def execute(engine: AsyncEngine, *statements: str, **parameters: Any) -> None:
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(sa.text(statement), parameters)


class SQLContract(AdministrableStoreContract, DoneStoreContract):
    supports_transactions = True
    supports_second_handle = True
    supports_failure_injection = True

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    async def store(self, url: str) -> AsyncIterator[SQLAlchemyCursorStore]:
        async with emptied(url) as engine:
            yield SQLAlchemyCursorStore(engine, metadata=METADATA)

    @asynccontextmanager
    async def second_handle(
        self, store: SQLAlchemyCursorStore
    ) -> AsyncIterator[SQLAlchemyCursorStore]:
        engine = open_engine(store.engine.url)
        yield SQLAlchemyCursorStore(engine)
        await engine.dispose()

    async def begin(self, store: SQLAlchemyCursorStore) -> Any:
        return await store.engine.connect()

    async def commit(self, transaction: Any) -> None:
        await transaction.commit()
        await transaction.close()

    async def rollback(self, transaction: Any) -> None:
        await transaction.rollback()
        await transaction.close()

    @asynccontextmanager
    async def failing(self, store: SQLAlchemyCursorStore) -> AsyncIterator[None]:
        await execute(
            store.engine,
            "ALTER TABLE feedapi_cursors ADD CONSTRAINT fire "
            "CHECK (partition_id <> 5 OR revision < 0) NOT VALID",
        )
        yield
        await execute(store.engine, "ALTER TABLE feedapi_cursors DROP CONSTRAINT fire")


class TestPostgresWithPsycopg(SQLContract):
    @pytest.fixture
    def url(self, postgres: Postgres) -> str:
        return postgres.url("psycopg")


class TestPostgresWithAsyncpg(SQLContract):
    @pytest.fixture
    def url(self, postgres: Postgres) -> str:
        return postgres.url("asyncpg")

    async def test_r17_rows_are_locked_in_one_order_wherever_they_lie(
        self, store: SQLAlchemyCursorStore
    ) -> None:
        for partition in reversed(range(20)):
            await store.save(FEED, opening([partition]))
        # PostgreSQL reads rows as they lie where a table is large.
        database = "ALTER DATABASE postgres {} enable_indexscan{}"
        await execute(store.engine, database.format("SET", " = off"))
        await store.engine.dispose()
        blocked = sa.text(
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
            "AND query LIKE '%feedapi_cursors%'"
        )
        rows = "SELECT partition_id FROM feedapi_cursors WHERE partition_id {} FOR UPDATE {}"
        later = advanced(opening(range(20)), "later")
        async with store.engine.connect() as holder, store.engine.connect() as watcher:
            await holder.execute(sa.text(rows.format("= 19", "")))
            async with anyio.create_task_group() as group:
                group.start_soon(store.save, FEED, later)
                while not (await watcher.execute(blocked)).all():
                    await watcher.rollback()
                free = await watcher.execute(sa.text(rows.format("< 20", "SKIP LOCKED")))
                await watcher.rollback()
                await holder.rollback()
        await execute(store.engine, database.format("RESET", ""))
        assert free.all() == []
        assert await store.load(FEED) == later


class TestSQLiteWithAiosqlite(SQLContract):
    @pytest.fixture
    def url(self, sqlite_url: str) -> str:
        return sqlite_url

    @asynccontextmanager
    async def failing(self, store: SQLAlchemyCursorStore) -> AsyncIterator[None]:
        trigger = (
            "CREATE TRIGGER fail_{0} BEFORE {0} ON feedapi_cursors WHEN NEW.partition_id = 5 "
            "BEGIN SELECT RAISE(FAIL, 'disk on fire'); END"
        )
        await execute(store.engine, trigger.format("INSERT"), trigger.format("UPDATE"))
        yield
        await execute(store.engine, "DROP TRIGGER fail_INSERT", "DROP TRIGGER fail_UPDATE")


class TestMariaDBWithAsyncmy(SQLContract):
    @pytest.fixture
    def url(self, mariadb: MariaDB) -> str:
        return mariadb.url("asyncmy")

    @asynccontextmanager
    async def failing(self, store: SQLAlchemyCursorStore) -> AsyncIterator[None]:
        trigger = (
            "CREATE TRIGGER fail_{0} BEFORE {0} ON feedapi_cursors FOR EACH ROW "
            "IF NEW.partition_id = 5 THEN SIGNAL SQLSTATE '45000'; END IF"
        )
        await execute(store.engine, trigger.format("INSERT"), trigger.format("UPDATE"))
        yield
        await execute(store.engine, "DROP TRIGGER fail_INSERT", "DROP TRIGGER fail_UPDATE")


# The journal


class SQLJournal(JournalContract):
    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    async def make(self, url: str) -> AsyncIterator[Make]:
        async with emptied(url) as engine:

            async def make(journal: Journal | None) -> SQLAlchemyCursorStore:
                return SQLAlchemyCursorStore(engine, metadata=METADATA, journal=journal)

            yield make

    async def journal_rows(self, store: JournalledStore) -> int:
        assert isinstance(store, SQLAlchemyCursorStore)
        async with store.engine.connect() as connection:
            return (
                await connection.execute(sa.text("SELECT COUNT(*) FROM feedapi_cursors_journal"))
            ).scalar_one()

    async def age(self, store: JournalledStore, seconds: int) -> None:
        assert isinstance(store, SQLAlchemyCursorStore)
        await execute(store.engine, *AGING, by=seconds * 1_000_000)


class TestJournalOnPostgresWithPsycopg(SQLJournal):
    @pytest.fixture
    def url(self, postgres: Postgres) -> str:
        return postgres.url("psycopg")


class TestJournalOnPostgresWithAsyncpg(SQLJournal):
    @pytest.fixture
    def url(self, postgres: Postgres) -> str:
        return postgres.url("asyncpg")


class TestJournalOnSQLite(SQLJournal):
    @pytest.fixture
    def url(self, sqlite_url: str) -> str:
        return sqlite_url


class TestJournalOnMariaDB(SQLJournal):
    @pytest.fixture
    def url(self, mariadb: MariaDB) -> str:
        return mariadb.url("asyncmy")


# The application's own transaction, on each database


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres psycopg", marks=pytest.mark.slow),
        pytest.param("postgres asyncpg", marks=pytest.mark.slow),
        pytest.param("mariadb", marks=pytest.mark.slow),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    server, _, driver = str(request.param).partition(" ")
    if server == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/app.db"
    running: Postgres | MariaDB = request.getfixturevalue(server)
    return running.url(driver) if driver else running.url()


@pytest.fixture
async def engine(url: str) -> AsyncIterator[AsyncEngine]:
    engine = open_engine(url)
    await drop_tables(engine)
    async with engine.begin() as connection:
        await connection.execute(sa.text("CREATE TABLE effects (n INTEGER)"))
    yield engine
    await drop_tables(engine)
    await engine.dispose()


@pytest.fixture
async def store(engine: AsyncEngine) -> SQLAlchemyCursorStore:
    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()
    return store


async def apply(transaction: AsyncConnection | AsyncSession) -> None:
    await transaction.execute(sa.text("INSERT INTO effects VALUES (1)"))


async def effects(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        return (await connection.execute(sa.text("SELECT COUNT(*) FROM effects"))).scalar_one()


async def test_r5_cursor_and_effect_stand_or_fall_together(
    store: SQLAlchemyCursorStore, engine: AsyncEngine
) -> None:
    async with engine.connect() as connection:
        await apply(connection)
        await store.save(FEED, opening(), transaction=connection)
        await connection.rollback()
    assert (await effects(engine), await store.load(FEED)) == (0, {})
    async with engine.begin() as connection:
        await apply(connection)
        await store.save(FEED, opening(), transaction=connection)
    assert (await effects(engine), await store.load(FEED)) == (1, opening())


async def test_r5_a_save_before_the_first_effect_is_in_the_transaction(
    store: SQLAlchemyCursorStore, engine: AsyncEngine
) -> None:
    async with engine.connect() as connection:
        await store.save(FEED, opening(range(3)), transaction=connection)
        await apply(connection)
        await connection.rollback()
    assert (await effects(engine), await store.load(FEED)) == (0, {})


async def test_r5_a_session_is_a_transaction(
    store: SQLAlchemyCursorStore, engine: AsyncEngine
) -> None:
    sessions = async_sessionmaker(engine)
    positions = opening(range(3))
    async with sessions() as session:
        await apply(session)
        await store.save(FEED, positions, transaction=session)
        await session.rollback()
    assert (await effects(engine), await store.load(FEED)) == (0, {})
    async with sessions() as session, session.begin():
        await store.save(FEED, positions, transaction=session)
        await apply(session)
    async with sessions() as session:
        await store.save(FEED, advanced(opening()), transaction=session)
        await session.commit()
    assert (await effects(engine), await store.load(FEED)) == (
        1,
        {**positions, **advanced(opening())},
    )


@pytest.mark.parametrize(
    "refused",
    [
        {0: counted("x", 9)},
        opening(range(5)),
        {1: Position("new"), 0: counted("x", 9)},
    ],
)
async def test_r17_a_refused_save_leaves_a_transaction_that_can_even_commit(
    store: SQLAlchemyCursorStore, engine: AsyncEngine, refused: dict[int, Position]
) -> None:
    await store.save(FEED, opening())
    async with engine.begin() as connection:
        await apply(connection)
        with pytest.raises(FencedError) as failed:
            await store.save(FEED, refused, transaction=connection)
        await apply(connection)
    assert failed.value.partition == 0
    assert (await effects(engine), await store.load(FEED)) == (2, opening())


async def test_r17_of_two_transactions_at_once_the_second_is_refused(
    store: SQLAlchemyCursorStore, engine: AsyncEngine
) -> None:
    await store.save(FEED, opening())
    results: list[str] = []

    async def consume(name: str) -> None:
        try:
            async with engine.begin() as connection:
                await apply(connection)
                await store.save(FEED, advanced(opening(), name), transaction=connection)
            results.append("saved")
        except FencedError:
            results.append("fenced")

    async with anyio.create_task_group() as group:
        group.start_soon(consume, "a")
        group.start_soon(consume, "b")
    assert sorted(results) == ["fenced", "saved"]
    assert await effects(engine) == 1


async def test_the_usual_save_is_one_statement_and_three_with_a_journal(
    engine: AsyncEngine,
) -> None:
    store = SQLAlchemyCursorStore(engine, journal=Journal(keep=None))
    await store.create_tables()
    await store.save(FEED, opening())
    statements: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement.split()[0])

    sa.event.listen(engine.sync_engine, "before_cursor_execute", note)
    await SQLAlchemyCursorStore(engine).save(FEED, advanced(opening()))
    assert statements == ["UPDATE"]
    await store.save(FEED, advanced(advanced(opening())))
    lock = ["DELETE"] if engine.dialect.name == "sqlite" else []  # of the whole file
    assert statements == ["UPDATE", *lock, "SELECT", "INSERT", "INSERT"]


@pytest.mark.slow
async def test_a_save_of_all_partitions_is_a_few_statements(
    store: SQLAlchemyCursorStore, engine: AsyncEngine
) -> None:
    statements: list[str] = []
    sa.event.listen(
        engine.sync_engine,
        "before_cursor_execute",
        lambda connection, cursor, statement, *_: statements.append(statement),
    )
    positions = opening(range(5_000))
    await store.save(FEED, positions)
    assert len(statements) < 60
    statements.clear()
    await store.save(FEED, advanced(positions))
    assert len(statements) < 70


async def test_both_sqlite_stores_work_on_one_file(tmp_path: Path) -> None:
    from feedapi_client.stores import SQLiteCursorStore

    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/cursors.db")
    first = SQLAlchemyCursorStore(engine, journal=Journal(keep=None))
    await first.create_tables()
    async with SQLiteCursorStore(tmp_path / "cursors.db", journal=Journal(keep=None)) as second:
        await first.save(FEED, opening(range(3)))
        await second.save(FEED, advanced(opening(range(3))))
        await first.save(FEED, advanced(advanced(opening(range(3)))))
        assert (
            await first.load(FEED)
            == await second.load(FEED)
            == advanced(advanced(opening(range(3))))
        )
        assert await first.feeds() == await second.feeds() == [FEED]
    await engine.dispose()


# Tables


async def test_create_tables_may_be_called_by_several_at_once(
    url: str, engine: AsyncEngine
) -> None:
    async with AsyncExitStack() as stack:
        engines = [create_async_engine(url) for _ in range(4)]
        for other in engines:
            stack.push_async_callback(other.dispose)
        async with anyio.create_task_group() as group:
            for other in engines:
                group.start_soon(SQLAlchemyCursorStore(other, journal=Journal()).create_tables)
    await SQLAlchemyCursorStore(engine).save(FEED, opening())


async def test_the_table_is_part_of_the_callers_metadata(engine: AsyncEngine) -> None:
    metadata = sa.MetaData()
    store = SQLAlchemyCursorStore(engine, table="my_cursors", metadata=metadata, journal=Journal())
    again = SQLAlchemyCursorStore(engine, table="my_cursors", metadata=metadata)
    assert set(metadata.tables) == {
        "feedapi_format",
        "my_cursors",
        "my_cursors_journal",
        "my_cursors_done",
        "my_cursors_instances",
        "my_cursors_leases",
    }
    assert store.table is again.table is metadata.tables["my_cursors"]
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await store.save(FEED, opening())
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)


async def test_a_missing_table_is_a_store_error_that_says_how_to_make_it(
    engine: AsyncEngine,
) -> None:
    store = SQLAlchemyCursorStore(engine)
    with pytest.raises(StoreError, match=r"create_tables\(\)") as failed:
        await store.load(FEED)
    assert isinstance(failed.value.__cause__, DBAPIError)
    with pytest.raises(StoreError, match=r"create_tables\(\)"):
        await store.save(FEED, opening())


@pytest.mark.parametrize(
    "dialect",
    [mysql.dialect(), postgresql.dialect(), sqlite.dialect()],
    ids=lambda dialect: dialect.name,
)
def test_tables_compile_for_every_dialect(dialect: Any) -> None:
    store = SQLAlchemyCursorStore(create_async_engine("sqlite+aiosqlite://"), journal=Journal())
    assert store.journal_table is not None
    for table in (store.table, store.journal_table):
        assert "feed_cursor" in str(CreateTable(table).compile(dialect=dialect))
    created = str(CreateTable(store.table).compile(dialect=dialect))
    assert ("LONGTEXT" if dialect.name == "mysql" else "TEXT") in created


# Bad input


async def test_what_is_no_transaction_is_refused(
    store: SQLAlchemyCursorStore, engine: AsyncEngine
) -> None:
    for wrong in (object(), scoped_session(sessionmaker()), engine):
        with pytest.raises(StoreError, match="AsyncConnection or an AsyncSession"):
            await store.save(FEED, opening(), transaction=wrong)


async def test_a_transaction_of_another_database_is_refused(
    store: SQLAlchemyCursorStore, engine: AsyncEngine, postgres: Postgres
) -> None:
    other = create_async_engine(
        "sqlite+aiosqlite://" if engine.dialect.name != "sqlite" else postgres.url()
    )
    async with other.connect() as connection:
        with pytest.raises(StoreError, match="but the cursors are on"):
            await store.save(FEED, opening(), transaction=connection)
    await other.dispose()


async def test_r17_a_transaction_on_another_database_of_the_server_is_refused(
    postgres: Postgres,
) -> None:
    """It has the same tables, such as those of another environment."""
    server = create_async_engine(postgres.url(), isolation_level="AUTOCOMMIT")
    await execute(server, "DROP DATABASE IF EXISTS elsewhere", "CREATE DATABASE elsewhere")
    engine = create_async_engine(postgres.url())
    other = create_async_engine(postgres.url().replace("@/postgres?", "@/elsewhere?"))
    await drop_tables(engine)
    store, elsewhere = SQLAlchemyCursorStore(engine), SQLAlchemyCursorStore(other)
    await store.create_tables()
    await elsewhere.create_tables()
    await store.save(FEED, opening())  # as a consumer does it at its start
    async with other.begin() as connection:
        with pytest.raises(FencedError, match="nothing is stored"):
            await store.save(FEED, advanced(opening()), transaction=connection)
    assert (await elsewhere.load(FEED), await store.load(FEED)) == ({}, opening())
    await other.dispose()
    await execute(server, "DROP DATABASE elsewhere")
    for each in (engine, server):
        await each.dispose()


async def test_a_schema_that_the_engine_maps_holds_all_tables(postgres: Postgres) -> None:
    server = create_async_engine(postgres.url(), isolation_level="AUTOCOMMIT")
    await execute(server, "DROP SCHEMA IF EXISTS tenant CASCADE", "CREATE SCHEMA tenant")
    mapped = create_async_engine(postgres.url()).execution_options(
        schema_translate_map={None: "tenant"}
    )
    store = SQLAlchemyCursorStore(mapped)
    for _ in range(2):
        await store.create_tables()
    await store.save(FEED, opening())
    assert await store.load(FEED) == opening()
    await execute(server, "DROP SCHEMA tenant CASCADE")
    for each in (mapped, server):
        await each.dispose()


async def test_r5_first_positions_whose_commit_fails_are_not_stored(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/cursors.db")
    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()

    def refuse(_: object) -> None:
        raise RuntimeError("the commit is refused")

    sa.event.listen(engine.sync_engine, "commit", refuse)
    with pytest.raises(StoreError):
        await store.save(FEED, opening())
    sa.event.remove(engine.sync_engine, "commit", refuse)
    assert await store.load(FEED) == {}
    await engine.dispose()


async def test_an_engine_with_the_execution_option_autocommit_is_refused(
    engine: AsyncEngine,
) -> None:
    with pytest.raises(ValueError, match="AUTOCOMMIT"):
        SQLAlchemyCursorStore(engine.execution_options(isolation_level="AUTOCOMMIT"))


async def test_a_connection_in_autocommit_mode_is_no_transaction(
    store: SQLAlchemyCursorStore, engine: AsyncEngine
) -> None:
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(StoreError, match="autocommit mode"):
            await store.save(FEED, opening(), transaction=connection)
    assert await store.load(FEED) == {}


async def test_nothing_is_saved_through_an_engine_created_in_autocommit_mode(
    store: SQLAlchemyCursorStore, url: str
) -> None:
    autocommit = create_async_engine(url, isolation_level="AUTOCOMMIT")
    refused = SQLAlchemyCursorStore(autocommit)
    with pytest.raises(StoreError, match="autocommit mode"):
        await refused.save(FEED, opening())
    with pytest.raises(StoreError, match="autocommit mode"):
        await refused.replace(FEED, opening())
    async with autocommit.connect() as connection:
        with pytest.raises(StoreError, match="autocommit mode"):
            await store.save(FEED, opening(), transaction=connection)
    await autocommit.dispose()
    assert await store.load(FEED) == {}


async def test_an_sqlite_engine_that_emits_begin_itself_has_transactions(tmp_path: Path) -> None:
    """SQLAlchemy's recipe for savepoints: the driver is in autocommit mode, the engine is not."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/app.db")

    @sa.event.listens_for(engine.sync_engine, "connect")
    def stop_the_driver_from_beginning(connection: Any, _: object) -> None:
        connection.isolation_level = None

    @sa.event.listens_for(engine.sync_engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()
    async with engine.connect() as connection:
        await store.save(FEED, opening(range(3)), transaction=connection)
        await connection.rollback()
    assert await store.load(FEED) == {}
    await store.save(FEED, opening(range(3)))
    assert await store.load(FEED) == opening(range(3))
    await engine.dispose()


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(TypeError, match="not a str"):
        SQLAlchemyCursorStore("sqlite://")  # type: ignore[arg-type]


def test_an_engine_whose_threads_have_databases_of_their_own_is_refused() -> None:
    with pytest.raises(ValueError, match="StaticPool"):
        SQLAlchemyCursorStore(sa.create_engine("sqlite://"))


async def test_text_that_the_database_can_not_keep_is_a_store_error(
    store: SQLAlchemyCursorStore, engine: AsyncEngine
) -> None:
    for cursor in ("\ud800", "\x00"):
        with pytest.raises(StoreError, match="failed"):
            await store.save(FEED, {0: Position(cursor)})
    await store.save(FEED, opening())
    assert await store.load(FEED) == opening()


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "postgresql+asyncpg", "mysql+asyncmy"])
async def test_r19_an_unreachable_database_is_a_store_error_without_the_password(
    driver: str,
) -> None:
    engine = create_async_engine(f"{driver}://user:secret-password@127.0.0.1:1/db")
    store = SQLAlchemyCursorStore(engine, timeout=10)
    with pytest.raises(StoreError) as failed:
        await store.load(FEED)
    assert "secret" not in f"{failed.value} {failed.value.__cause__} {store!r}"
    await engine.dispose()


async def test_a_database_that_does_not_answer_is_a_store_error(postgres: Postgres) -> None:
    engine = create_async_engine(postgres.url())
    await drop_tables(engine)
    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()
    await store.save(FEED, opening())
    async with engine.begin() as connection:
        await connection.execute(sa.text("LOCK TABLE feedapi_cursors IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(StoreError, match=r"did not answer within 0\.3 s"):
            await SQLAlchemyCursorStore(engine, timeout=0.3).save(FEED, advanced(opening()))
    await store.save(FEED, advanced(opening()))
    assert await store.load(FEED) == advanced(opening())
    await engine.dispose()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_r17_fencing_at_stricter_isolation(
    postgres: Postgres, mariadb: MariaDB, level: str
) -> None:
    for url in (postgres.url("psycopg"), postgres.url("asyncpg"), mariadb.url()):
        engine = create_async_engine(url, isolation_level=level)
        await drop_tables(engine)
        store = SQLAlchemyCursorStore(engine, journal=Journal())
        await store.create_tables()
        for revision in range(1, 6):
            results = await asyncio.gather(
                *(store.save(FEED, {0: counted(str(n), revision)}) for n in range(6)),
                return_exceptions=True,
            )
            assert sorted(type(result).__name__ for result in results) == ["FencedError"] * 5 + [
                "NoneType"
            ]
        await engine.dispose()


def test_on_trio_operations_say_what_to_use() -> None:
    store = SQLAlchemyCursorStore(create_async_engine("sqlite+aiosqlite://"))
    with pytest.raises(StoreError, match="asyncio only"):
        anyio.run(store.load, FEED, backend="trio")


async def test_an_error_of_another_kind_is_a_store_error_that_names_it(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/app.db")
    store = SQLAlchemyCursorStore(engine)
    await store.create_tables()

    @sa.event.listens_for(engine.sync_engine, "before_cursor_execute")
    def fail(*_: object) -> None:
        raise RuntimeError("with a payload")

    with pytest.raises(StoreError, match="RuntimeError") as failed:
        await store.load(FEED)
    assert isinstance(failed.value.__cause__, RuntimeError)
    assert (failed.value.feed, "payload" in str(failed.value)) == (FEED.url, False)
    await engine.dispose()
