"""The quarantine stores, each alone and beside its cursor store."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from feedapi_client import (
    Batch,
    FeedKey,
    MemoryCursorStore,
    SQLAlchemyCursorStore,
    SQLiteCursorStore,
    StoreError,
)
from feedapi_client.model import make_event
from feedapi_client.quarantine import (
    MemoryQuarantineStore,
    PostgresQuarantineStore,
    QuarantineStore,
    SQLiteQuarantineStore,
    drop,
    list_events,
    open_quarantine,
    quarantine_beside,
    show,
)
from feedapi_client.quarantine.record import QuarantinedEvent, quarantined
from feedapi_client.quarantine.sql_quarantine import SQLAlchemyQuarantineStore
from feedapi_client.testing import Publisher
from tests.positions import counted
from tests.postgres_pools import execute, opened
from tests.quarantine.helpers import PoisonError, kept, numbers, run

pytestmark = pytest.mark.anyio

FEED = FeedKey("https://service/feed", "mine", {"event-types": "a;b"})
OTHER = FeedKey("https://service/feed", "theirs")
RAW = '{"text":"\u2028 \\u0000 \\ud800 ä"}'.encode()


def record(
    feed: FeedKey = FEED, partition: int = 3, index: int = 0, error: Exception | None = None
) -> QuarantinedEvent:
    return quarantined(
        feed,
        make_event(partition, RAW, {"h": "\x00"}),
        "c" * 10_000,
        index,
        error or ValueError("bad\x00 \ud800"),
    )


POOLS = ("psycopg", "psycopg in threads", "asyncpg")
SERVED = [pytest.param(name, marks=pytest.mark.slow) for name in ("postgresql", *POOLS)]


@pytest.fixture(params=["memory", "sqlite", "sqlite through SQLAlchemy", *SERVED])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, anyio_backend: str
) -> AsyncIterator[QuarantineStore]:
    if request.param == "memory":
        yield MemoryQuarantineStore()
    elif request.param == "sqlite":
        yield SQLiteQuarantineStore(tmp_path / "quarantine.db")
    elif anyio_backend == "trio" and request.param != "psycopg in threads":
        pytest.skip("the driver runs on asyncio only")
    elif request.param in POOLS:
        dsn = request.getfixturevalue("postgres").dsn
        execute(dsn, "DROP TABLE IF EXISTS feedapi_quarantine")
        async with opened(request.param, dsn) as pool:
            through = PostgresQuarantineStore(pool)
            await through.create_tables()
            yield through
            await through.aclose()
    else:
        url = (
            request.getfixturevalue("postgres").url()
            if request.param == "postgresql"
            else f"sqlite+aiosqlite:///{tmp_path / 'quarantine.db'}"
        )
        engine = create_async_engine(url)
        store = SQLAlchemyQuarantineStore(engine)
        async with engine.begin() as connection:
            await connection.run_sync(store.table.metadata.drop_all)
        await store.create_tables()
        yield store
        await engine.dispose()


async def test_an_event_is_stored_and_returned_unchanged(store: QuarantineStore) -> None:
    await store.prepare()
    put = record()
    await store.add([put])
    assert await store.get(put.id) == put
    assert put.raw == RAW
    assert put.error == "bad\ufffd ?"


async def test_events_are_listed_in_the_order_of_quarantining(store: QuarantineStore) -> None:
    put = [
        record(index=index, feed=FEED if index % 2 else OTHER, partition=index % 3)
        for index in range(250)
    ]
    for start in range(0, 250, 50):
        await store.add(put[start : start + 50])
    assert await kept(store) == put
    assert [event async for event in list_events(store, FEED)] == put[1::2]
    assert [event async for event in list_events(store, OTHER, partition=0)] == [
        event for event in put[::2] if event.partition == 0
    ]


async def test_dropped_events_are_gone(store: QuarantineStore) -> None:
    put = [record(index=index, feed=FEED if index < 130 else OTHER) for index in range(150)]
    await store.add(put)
    assert await drop(store, [put[0].id, put[1].id, put[1].id, "unknown"]) == 2
    assert await drop(store, feed=FEED) == 128
    assert await kept(store) == put[130:]
    assert await store.get(put[0].id) is None
    with pytest.raises(StoreError, match="no event"):
        await show(store, put[0].id)


async def test_a_transaction_that_is_rolled_back_adds_and_removes_nothing(
    store: QuarantineStore,
) -> None:
    if isinstance(store, MemoryQuarantineStore):
        pytest.skip("memory has no transactions")
    put = [record(index=0), record(index=1)]
    await store.add(put[:1])

    async def change() -> None:
        async with store.begin() as transaction:
            await store.add(put[1:], transaction=transaction)
            assert await store.remove([put[0].id], transaction=transaction) == 1
            raise PoisonError

    with pytest.raises(PoisonError):
        await change()
    assert await kept(store) == put[:1]


async def test_a_transaction_is_committed_at_the_end_of_its_block(store: QuarantineStore) -> None:
    put = record()
    async with store.begin() as transaction:
        await store.add([put], transaction=transaction)
    assert await kept(store) == [put]


async def test_the_same_id_twice_is_refused_or_one_event(store: QuarantineStore) -> None:
    put = record()
    await store.add([put])
    if isinstance(store, MemoryQuarantineStore):
        await store.add([put])
    else:
        with pytest.raises(StoreError) as caught:
            await store.add([put])
        assert "text" not in str(caught.value)
    assert await kept(store) == [put]


async def test_a_long_error_is_cut(store: QuarantineStore) -> None:
    put = record(error=ValueError("x" * 1_000_000))
    await store.add([put])
    assert len((await show(store, put.id)).error) == 4000


async def test_an_event_is_quarantined_although_its_error_has_no_text() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert record(error=SilentError()).error == ""


async def test_the_quarantine_beside_a_memory_store_is_always_the_same() -> None:
    cursors = MemoryCursorStore()
    assert quarantine_beside(cursors) is quarantine_beside(cursors)
    assert quarantine_beside(cursors) is not quarantine_beside(MemoryCursorStore())


async def test_one_transaction_spans_only_one_file(tmp_path: Path) -> None:
    store = SQLiteQuarantineStore(tmp_path / "a.db")
    assert store.joins(SQLiteCursorStore(f"{tmp_path}/x/../a.db"))
    assert not store.joins(SQLiteCursorStore(tmp_path / "b.db"))
    assert not store.joins(MemoryCursorStore())


async def test_a_file_that_is_no_database_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="quarantine in"):
        await SQLiteQuarantineStore(tmp_path / "a.db").prepare()


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "effects"
    at: Mapped[int] = mapped_column(primary_key=True)
    n: Mapped[int]


class TestPostgreSQL:
    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture
    async def cursors(self, postgres: Any) -> AsyncIterator[SQLAlchemyCursorStore]:
        engine = create_async_engine(postgres.url())
        cursors = SQLAlchemyCursorStore(engine)
        quarantine = SQLAlchemyQuarantineStore(engine)
        async with engine.begin() as connection:
            for table in ("feedapi_cursors", "feedapi_quarantine", "effects"):
                await connection.execute(sa.text(f"DROP TABLE IF EXISTS {table}"))
            await connection.execute(
                sa.text(
                    "CREATE TABLE effects "
                    "(at serial PRIMARY KEY, n integer NOT NULL CHECK (n NOT IN (7, 12)))"
                )
            )
        await cursors.create_tables()
        await quarantine.create_tables()
        yield cursors
        await engine.dispose()

    async def rows(self, cursors: SQLAlchemyCursorStore) -> list[int]:
        assert isinstance(cursors.engine, AsyncEngine)
        async with cursors.engine.connect() as connection:
            return list(
                (await connection.execute(sa.text("SELECT n FROM effects ORDER BY at"))).scalars()
            )

    async def test_events_that_the_database_refuses_are_quarantined_and_the_rest_is_there_once(
        self, publisher: Publisher, cursors: SQLAlchemyCursorStore
    ) -> None:
        async def handle(batch: Batch) -> None:
            async with cursors.engine.begin() as connection:
                await connection.execute(
                    sa.text("INSERT INTO effects (n) VALUES (:n)"),
                    [{"n": n} for n in numbers(batch)],
                )
                await batch.commit(transaction=connection)

        await run(publisher, cursors, handle, "quarantine")
        assert await self.rows(cursors) == [n for n in range(20) if n not in (7, 12)]
        quarantined = await kept(quarantine_beside(cursors))
        assert [(event.index, event.error_type) for event in quarantined] == [
            (7, "IntegrityError"),
            (12, "IntegrityError"),
        ]

    async def test_a_session_is_a_transaction(
        self, publisher: Publisher, cursors: SQLAlchemyCursorStore
    ) -> None:
        async def handle(batch: Batch) -> None:
            async with AsyncSession(cursors.engine) as session, session.begin():
                for n in numbers(batch):
                    await session.execute(sa.text("INSERT INTO effects (n) VALUES (:n)"), {"n": n})
                await batch.commit(transaction=session)

        await run(publisher, cursors, handle, "quarantine")
        assert await self.rows(cursors) == [n for n in range(20) if n not in (7, 12)]
        assert len(await kept(quarantine_beside(cursors))) == 2

    async def test_a_dry_run_flushes_what_a_session_still_holds_back(
        self, publisher: Publisher, cursors: SQLAlchemyCursorStore
    ) -> None:
        async def handle(batch: Batch) -> None:
            async with AsyncSession(cursors.engine) as session, session.begin():
                session.add_all([Effect(n=n) for n in numbers(batch)])
                await batch.commit(transaction=session)

        await run(publisher, cursors, handle, "quarantine")
        assert sorted(await self.rows(cursors)) == [n for n in range(20) if n not in (7, 12)]
        assert [event.index for event in await kept(quarantine_beside(cursors))] == [7, 12]

    async def test_a_synchronous_session_is_a_transaction_and_is_flushed(
        self, publisher: Publisher, cursors: SQLAlchemyCursorStore
    ) -> None:
        engine = sa.create_engine(cursors.engine.url)
        blocking = SQLAlchemyCursorStore(engine)

        async def handle(batch: Batch) -> None:
            with Session(engine) as session, session.begin():
                session.add_all([Effect(n=n) for n in numbers(batch)])
                await batch.commit(transaction=session)

        await run(publisher, blocking, handle, "quarantine")
        assert sorted(await self.rows(cursors)) == [n for n in range(20) if n not in (7, 12)]
        assert [event.index for event in await kept(quarantine_beside(blocking))] == [7, 12]
        engine.dispose()

    async def test_a_handler_that_leaves_the_commit_to_run_quarantines_with_the_cursor(
        self, publisher: Publisher, cursors: SQLAlchemyCursorStore
    ) -> None:
        async def handle(batch: Batch) -> None:
            if set(numbers(batch)) & {7, 12}:
                raise PoisonError

        await run(publisher, cursors, handle, "quarantine")
        assert [event.index for event in await kept(quarantine_beside(cursors))] == [7, 12]
        (feed,) = await cursors.feeds()
        assert (await cursors.load(feed))[0].cursor == publisher.end_cursor(0)

    async def test_a_missing_table_is_found_before_anything_is_read(
        self, publisher: Publisher, cursors: SQLAlchemyCursorStore
    ) -> None:
        async with cursors.engine.begin() as connection:
            await connection.execute(sa.text("DROP TABLE feedapi_quarantine"))

        async def handle(batch: Batch) -> None:
            raise AssertionError

        with pytest.raises(StoreError, match=r"create_tables\(\)"):
            await run(publisher, cursors, handle, "quarantine")

    async def test_r19_the_error_of_a_failed_insert_holds_no_payload(
        self, cursors: SQLAlchemyCursorStore
    ) -> None:
        store = quarantine_beside(cursors)
        put = record()
        await store.add([put])
        with pytest.raises(StoreError) as caught:
            await store.add([put])
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
        assert "text" not in str(caught.value)

    async def test_open_quarantine_takes_a_url(
        self, postgres: Any, cursors: SQLAlchemyCursorStore
    ) -> None:
        put = record()
        await quarantine_beside(cursors).add([put])
        async with open_quarantine(postgres.url()) as store:
            assert await kept(store) == [put]


async def test_open_quarantine_takes_a_file(tmp_path: Path) -> None:
    put = record()
    await SQLiteQuarantineStore(tmp_path / "a.db").add([put])
    async with open_quarantine(str(tmp_path / "a.db")) as store:
        assert await kept(store) == [put]


async def test_many_tasks_quarantine_into_one_file_at_a_time(tmp_path: Path) -> None:
    """Each with the save of a cursor, as consumers of several partitions do."""
    cursors = SQLiteCursorStore(tmp_path / "a.db")
    store = quarantine_beside(cursors)

    async def work(partition: int) -> None:
        for revision in range(1, 6):
            async with store.begin() as transaction:
                await cursors.save(
                    FEED, {partition: counted("c", revision)}, transaction=transaction
                )
                await store.add(
                    [record(partition=partition, index=revision)], transaction=transaction
                )

    async with anyio.create_task_group() as tasks:
        for partition in range(8):
            tasks.start_soon(work, partition)
    assert len(await kept(store)) == 40
    assert await cursors.load(FEED) == dict.fromkeys(range(8), counted("c", 5))


async def test_no_other_task_runs_while_the_file_is_locked(tmp_path: Path) -> None:
    """A handler that uses `sqlite3` would wait for a lock that only its own event loop frees."""
    path = tmp_path / "a.db"
    cursors = SQLiteCursorStore(path)
    store = quarantine_beside(cursors)
    await store.prepare()
    assert await cursors.load(FEED) == {}  # turns the write-ahead log on: reading locks nothing
    over = False

    async def write_without_waiting() -> None:
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
            connection.execute("CREATE TABLE effects (n INTEGER)")
            while not over:
                connection.execute("INSERT INTO effects VALUES (1)")
                await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write_without_waiting)
        for revision in range(1, 21):
            async with store.begin() as transaction:
                await cursors.save(FEED, {0: counted("c", revision)}, transaction=transaction)
                await store.add([record(index=revision)], transaction=transaction)
        over = True
    assert len(await kept(store)) == 20


async def test_another_programs_lock_is_waited_for_beside_the_event_loop(tmp_path: Path) -> None:
    store = SQLiteQuarantineStore(tmp_path / "a.db")
    await store.prepare()
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.add, [record(index=0)])
            tasks.start_soon(store.add, [record(index=1)])
            await anyio.sleep(0.2)  # the loop goes on
            other.execute("COMMIT")
    assert len(await kept(store)) == 2


async def test_a_lock_that_is_not_freed_is_an_error(tmp_path: Path) -> None:
    store = SQLiteQuarantineStore(tmp_path / "a.db", busy_timeout=0.05)
    await store.prepare()
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="database is locked"):
            await store.add([record()])
