"""The quarantine stores: each alone, and each with the cursors of every driver."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from inspect import isawaitable
from pathlib import Path
from typing import Any

import aiosqlite
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
    PostgresCursorStore,
    SQLAlchemyCursorStore,
    SQLiteCursorStore,
    StoreError,
)
from feedapi_client.model import make_event
from feedapi_client.quarantine import (
    MemoryQuarantineStore,
    PostgresQuarantineStore,
    QuarantineStore,
    SQLAlchemyQuarantineStore,
    SQLiteQuarantineStore,
    drop,
    list_events,
    open_quarantine,
    quarantine_beside,
    show,
)
from feedapi_client.quarantine.record import QuarantinedEvent, quarantined
from feedapi_client.testing import Publisher
from tests.positions import counted
from tests.postgres_pools import opened
from tests.quarantine.helpers import PoisonError, kept, numbers, run

pytestmark = pytest.mark.anyio

FEED = FeedKey("https://service/feed", "mine", {"event-types": "a;b"})
OTHER = FeedKey("https://service/feed", "theirs")
RAW = '{"text":"\u2028 \\u0000 \\ud800 ä"}'.encode()
BAD = (7, 12)
POOLS = ("psycopg", "psycopg in threads", "asyncpg")
ENGINES = {
    "SQLAlchemy, aiosqlite": ("sqlite+aiosqlite", create_async_engine),
    "SQLAlchemy, sqlite3": ("sqlite", sa.create_engine),
    "SQLAlchemy, psycopg": ("postgresql+psycopg", create_async_engine),
    "SQLAlchemy, psycopg in threads": ("postgresql+psycopg", sa.create_engine),
    "SQLAlchemy, asyncpg": ("postgresql+asyncpg", create_async_engine),
    "SQLAlchemy, asyncmy": ("mysql+asyncmy", create_async_engine),
}
FILES = ("sqlite3", "aiosqlite", "SQLAlchemy, aiosqlite", "SQLAlchemy, sqlite3")
SERVED = [pytest.param(each, marks=pytest.mark.slow) for each in (*POOLS, *list(ENGINES)[2:])]
ON_TRIO = ("memory", "sqlite3", "psycopg in threads")


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "effects"
    __table_args__ = (sa.CheckConstraint("n NOT IN (7, 12)"),)
    at: Mapped[int] = mapped_column(primary_key=True)
    n: Mapped[int]


class Application:
    """One with its effects, its cursors and its quarantine in one database."""

    def __init__(self, kind: str, url: sa.URL, cursors: Any, quarantine: Any) -> None:
        self.cursors, self.quarantine = cursors, quarantine
        self._kind, self._url = kind, url

    def execute(self, statement: str) -> list[Any]:
        engine = sa.create_engine(self._url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            result = connection.execute(sa.text(statement))
            return result.fetchall() if result.returns_rows else []

    def rows(self) -> list[int]:
        return [n for (n,) in self.execute("SELECT n FROM effects ORDER BY at")]

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """Give what the application passes to a commit."""
        engine: Any = getattr(self.cursors, "engine", None)
        pool: Any = getattr(self.cursors, "pool", None)
        async with AsyncExitStack() as stack:
            if self._kind == "sqlite3":
                connection = stack.enter_context(closing(sqlite3.connect(self.cursors.path)))
                yield stack.enter_context(connection)
            elif self._kind == "aiosqlite":
                connection = await stack.enter_async_context(aiosqlite.connect(self.cursors.path))
                yield connection
                await connection.commit()
            elif isinstance(engine, AsyncEngine):
                yield await stack.enter_async_context(engine.begin())
            elif engine is not None:
                yield stack.enter_context(engine.begin())
            elif self._kind == "psycopg in threads":
                yield stack.enter_context(pool.connection())
            elif self._kind == "psycopg":
                yield await stack.enter_async_context(pool.connection())
            else:
                connection = await stack.enter_async_context(pool.acquire())
                await stack.enter_async_context(connection.transaction())
                yield connection

    async def write(self, transaction: Any, effects: list[int]) -> None:
        statement: Any = f"INSERT INTO effects (n) VALUES {', '.join(f'({n})' for n in effects)}"
        done = transaction.execute(sa.text(statement) if "SQLA" in self._kind else statement)
        if isawaitable(done):
            await done


@asynccontextmanager
async def running(kind: str, folder: Path, served: Callable[[str], Any]) -> AsyncIterator[Any]:
    """Give an application with its tables."""
    scheme, create = ENGINES.get(kind, ("postgresql" if kind in POOLS else "sqlite", None))
    if kind in FILES:
        url = sa.make_url(f"sqlite:///{folder / 'app.db'}")
    else:
        server = served("mariadb" if "my" in scheme else "postgres")
        url = sa.make_url(server.url("pymysql" if "my" in scheme else "psycopg"))
        server.empty()
    async with AsyncExitStack() as stack:
        cursors: Any = None
        quarantine: Any = None
        if create is not None:
            engine: Any = create(url.set(drivername=scheme))
            dispose = engine.dispose
            if isinstance(engine, AsyncEngine):
                stack.push_async_callback(dispose)
            else:
                stack.callback(dispose)
            cursors, quarantine = SQLAlchemyCursorStore(engine), SQLAlchemyQuarantineStore(engine)
        elif kind in POOLS:
            pool = await stack.enter_async_context(opened(kind, served("postgres").dsn))
            cursors, quarantine = PostgresCursorStore(pool), PostgresQuarantineStore(pool)
        else:
            cursors = SQLiteCursorStore(folder / "app.db")
            quarantine = SQLiteQuarantineStore(folder / "app.db")
        await stack.enter_async_context(cursors)
        if kind not in ("sqlite3", "aiosqlite"):
            await cursors.create_tables()
            await quarantine.create_tables()
        if hasattr(quarantine, "aclose"):
            stack.push_async_callback(quarantine.aclose)
        await quarantine.prepare()
        admin = sa.create_engine(url, poolclass=sa.NullPool)
        Base.metadata.create_all(admin)
        yield Application(kind, url, cursors, quarantine)


@pytest.fixture(params=[*FILES, *SERVED])
async def application(
    request: pytest.FixtureRequest, tmp_path: Path, anyio_backend: str
) -> AsyncIterator[Application]:
    if anyio_backend == "trio" and request.param not in ON_TRIO:
        pytest.skip("the driver runs on asyncio only")
    async with running(request.param, tmp_path, request.getfixturevalue) as application:
        yield application


@pytest.fixture(params=["memory", "sqlite3", "SQLAlchemy, aiosqlite", *SERVED])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, anyio_backend: str
) -> AsyncIterator[QuarantineStore]:
    if anyio_backend == "trio" and request.param not in ON_TRIO:
        pytest.skip("the driver runs on asyncio only")
    if request.param == "memory":
        yield MemoryQuarantineStore()
    else:
        async with running(request.param, tmp_path, request.getfixturevalue) as application:
            yield application.quarantine


def record(
    feed: FeedKey = FEED, partition: int = 3, index: int = 0, error: Exception | None = None
) -> QuarantinedEvent:
    event = make_event(partition, RAW, {"h": "\x00"})
    error = error or ValueError("bad\x00 \ud800")
    return quarantined(feed, event, "c" * 10_000, index, error)


# Each store alone


async def test_an_event_is_stored_and_returned_unchanged(store: QuarantineStore) -> None:
    put = record()
    await store.add([put])
    assert await store.get(put.id) == put
    assert (put.raw, put.error) == (RAW, "bad\ufffd ?")
    long = record(error=ValueError("x" * 1_000_000))
    await store.add([long])
    assert (await show(store, long.id)).error == "x" * 4000


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


async def test_r19_the_same_id_twice_is_refused_without_a_payload(store: QuarantineStore) -> None:
    put = record()
    await store.add([put])
    with pytest.raises(StoreError, match="the quarantine") as caught:
        await store.add([put])
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "text" not in str(caught.value)
    assert await kept(store) == [put]


# Each with the cursors of its database


async def test_the_callers_transaction_holds_what_is_added_and_removed(
    application: Application,
) -> None:
    store, put = application.quarantine, [record(index=0), record(index=1)]
    await store.add(put[:1])

    async def change(*, fails: bool) -> None:
        async with application.transaction() as transaction:
            await application.write(transaction, [1])
            await store.add(put[1:], transaction=transaction)
            assert await store.remove([put[0].id], transaction=transaction) == 1
            if fails:
                raise PoisonError

    with pytest.raises(PoisonError):
        await change(fails=True)
    assert (await kept(store), application.rows()) == (put[:1], [])
    await change(fails=False)
    assert (await kept(store), application.rows()) == (put[1:], [1])


async def test_r05_events_that_the_database_refuses_are_kept_and_the_others_there_once(
    publisher: Publisher, application: Application
) -> None:
    async def handle(batch: Batch) -> None:
        async with application.transaction() as transaction:
            await application.write(transaction, numbers(batch))
            await batch.commit(transaction=transaction)

    await run(publisher, application.cursors, handle, "quarantine")
    assert application.rows() == [n for n in range(20) if n not in BAD]
    events = await kept(quarantine_beside(application.cursors))
    assert [event.index for event in events] == list(BAD)


async def test_r05_the_cursor_is_saved_with_the_events_or_not_at_all(
    publisher: Publisher, application: Application
) -> None:
    """The handler leaves the commit to `run`."""
    breaks = True

    async def handle(batch: Batch) -> None:
        if set(numbers(batch)) & set(BAD):
            raise PoisonError
        if breaks:
            application.execute("ALTER TABLE feedapi_quarantine RENAME TO elsewhere")

    with pytest.raises(StoreError, match="the quarantine") as caught:
        await run(publisher, application.cursors, handle, "quarantine")
    assert caught.value.__cause__ is None  # it may hold a payload (R19)
    (feed,) = await application.cursors.feeds()
    assert (await application.cursors.load(feed))[0].cursor == "_first"
    application.execute("ALTER TABLE elsewhere RENAME TO feedapi_quarantine")
    breaks = False
    await run(publisher, application.cursors, handle, "quarantine")
    events = await kept(application.quarantine)
    assert [event.index for event in events] == list(BAD)
    assert (await application.cursors.load(feed))[0].cursor == publisher.end_cursor(0)


async def test_a_missing_table_is_found_before_anything_is_read(
    publisher: Publisher, application: Application
) -> None:
    if isinstance(application.cursors, SQLiteCursorStore):
        pytest.skip("creates its tables")
    application.execute("DROP TABLE feedapi_quarantine")

    async def handle(batch: Batch) -> None:
        raise AssertionError

    with pytest.raises(StoreError, match=r"create_tables\(\)"):
        await run(publisher, application.cursors, handle, "quarantine")


async def test_a_transaction_of_something_else_is_refused(application: Application) -> None:
    with pytest.raises(StoreError):
        await application.quarantine.add([record()], transaction=object())


@pytest.mark.slow
@pytest.mark.parametrize("create", [create_async_engine, sa.create_engine])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_dry_run_flushes_what_a_session_still_holds_back(
    publisher: Publisher, postgres: Any, tmp_path: Path, create: Any
) -> None:
    kind = "SQLAlchemy, psycopg" + " in threads" * (create is sa.create_engine)
    async with running(kind, tmp_path, lambda _: postgres) as application:
        engine = application.cursors.engine

        async def handle(batch: Batch) -> None:
            if isinstance(engine, AsyncEngine):
                async with AsyncSession(engine) as session, session.begin():
                    session.add_all([Effect(n=n) for n in numbers(batch)])
                    await batch.commit(transaction=session)
            else:
                with Session(engine) as session, session.begin():
                    session.add_all([Effect(n=n) for n in numbers(batch)])
                    await batch.commit(transaction=session)

        await run(publisher, application.cursors, handle, "quarantine")
        assert sorted(application.rows()) == [n for n in range(20) if n not in BAD]
        events = await kept(application.quarantine)
        assert [event.index for event in events] == list(BAD)


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_one_store_of_a_database_keeps_the_others_show(
    postgres: Any, tmp_path: Path
) -> None:
    async with (
        running("asyncpg", tmp_path, lambda _: postgres) as application,
        open_quarantine(postgres.url()) as theirs,
    ):
        put = [record(index=0), record(index=1)]
        await application.quarantine.add(put[:1])
        await theirs.add(put[1:])
        assert await kept(application.quarantine) == await kept(theirs) == put


# Details


async def test_an_event_is_quarantined_although_its_error_has_no_text() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert record(error=SilentError()).error == ""


async def test_the_quarantine_beside_a_memory_store_is_always_the_same() -> None:
    cursors = MemoryCursorStore()
    assert quarantine_beside(cursors) is quarantine_beside(cursors)
    assert quarantine_beside(cursors) is not quarantine_beside(MemoryCursorStore())


# The file


async def test_a_file_that_is_no_database_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="quarantine in"):
        await SQLiteQuarantineStore(tmp_path / "a.db").prepare()


async def test_open_quarantine_takes_a_file(tmp_path: Path) -> None:
    put = record()
    await SQLiteQuarantineStore(tmp_path / "a.db").add([put])
    async with open_quarantine(str(tmp_path / "a.db")) as store:
        assert await kept(store) == [put]


async def test_tasks_that_quarantine_into_one_file_wait_for_each_other_and_for_handlers(
    tmp_path: Path,
) -> None:
    """A handler that uses `sqlite3` in the event loop's thread waits for no lock of ours."""
    path = tmp_path / "a.db"
    cursors, store, over = SQLiteCursorStore(path), SQLiteQuarantineStore(path), False
    await store.prepare()

    async def work(partition: int) -> None:
        for revision in range(1, 6):
            events = [record(partition=partition, index=revision)]
            with_events = store.along(cursors, events)
            position = counted("c", revision)
            await cursors.save(FEED, {partition: position}, transaction=with_events)

    async def write_without_waiting() -> None:
        with closing(sqlite3.connect(path, timeout=5, isolation_level=None)) as connection:
            connection.execute("CREATE TABLE effects (n INTEGER)")
            while not over:
                connection.execute("INSERT INTO effects VALUES (1)")
                await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as others:
        others.start_soon(write_without_waiting)
        async with anyio.create_task_group() as tasks:
            for partition in range(8):
                tasks.start_soon(work, partition)
        over = True
    assert len(await kept(store)) == 40
    assert await cursors.load(FEED) == dict.fromkeys(range(8), counted("c", 5))
    await store.aclose()
    await cursors.aclose()


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
    await store.aclose()


async def test_a_lock_that_is_not_freed_is_an_error(tmp_path: Path) -> None:
    store = SQLiteQuarantineStore(tmp_path / "a.db", busy_timeout=0.05)
    await store.prepare()
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="database is locked"):
            await store.add([record()])
    await store.aclose()
