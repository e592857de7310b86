"""The quarantine stores: each alone, and each with the cursors of every driver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from feedapi_client import (
    Batch,
    FeedKey,
    StoreError,
)
from feedapi_client.operations.opening import open_quarantine
from feedapi_client.quarantine import (
    MemoryQuarantineStore,
    PostgresQuarantineStore,
    QuarantineStore,
    SQLAlchemyQuarantineStore,
    SQLiteQuarantineStore,
    drop,
    list_events,
    quarantine_beside,
    show,
)
from feedapi_client.testing import Publisher
from feedapi_client.testing.contracts import opening
from tests.quarantine.helpers import FEED, RAW, PoisonError, kept, numbers, record, run
from tests.stores import drivers
from tests.stores.drivers import App, Driver, empty, with_drivers

pytestmark = pytest.mark.anyio

OTHER = FeedKey("https://service/feed", "theirs")
MOVED = FeedKey.named("orders", "mine", FEED.filters)
BAD = (7, 12)
DRIVERS = [*(each for each in drivers.SQL[1:] if each.transaction != "rows"), *drivers.DJANGO]
ALL = [drivers.MEMORY, *DRIVERS]
CREATING = [each for each in DRIVERS if each.server != "file" or "SQLAlchemy" in each.name]


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "effects"
    __table_args__ = (sa.CheckConstraint("n NOT IN (7, 12)"),)
    at: Mapped[int] = mapped_column(primary_key=True)
    n: Mapped[int]


def quarantine_of(app: App) -> Any:
    if app.driver.server == "memory":
        return MemoryQuarantineStore()
    if app.driver.kind == "django":
        from feedapi_client.django import DjangoQuarantineStore  # Django has its settings

        return DjangoQuarantineStore(app.given)
    if app.is_sqlalchemy:
        return SQLAlchemyQuarantineStore(app.given)
    if app.driver.server == "file":
        return SQLiteQuarantineStore(app.given)
    return PostgresQuarantineStore(app.given)


def rows(app: Any) -> list[int]:
    return [n for (n,) in app.execute("SELECT n FROM effects ORDER BY at")]


@pytest.fixture
async def app(driver: Driver, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    """One with its effects, its cursors and its quarantine in one database."""
    async with empty(driver, request, tmp_path) as app, app.store() as cursors:
        application: Any = app
        quarantine = quarantine_of(app)
        if driver.server != "memory":
            for table in ("effects", "feedapi_quarantine", "elsewhere"):
                app.execute(f"DROP TABLE IF EXISTS {table}")
            Base.metadata.create_all(app.admin)
        if driver.kind == "django":
            SQLAlchemyQuarantineStore(app.admin, metadata=(tables := sa.MetaData()))
            tables.create_all(app.admin)  # as a migration makes them
        if hasattr(quarantine, "create_tables"):
            await quarantine.create_tables()
        await quarantine.prepare()
        application.cursors, application.quarantine = cursors, quarantine
        yield app
        await quarantine.aclose()


@pytest.fixture
def store(app: Any) -> Any:
    return app.quarantine


@pytest.fixture
def moving(app: Any) -> Any:
    """Cursors that can be moved, with the quarantine beside them."""
    return app.cursors


# Each store alone


@with_drivers(ALL)
async def test_an_event_is_stored_and_returned_unchanged(store: QuarantineStore) -> None:
    put = record()
    await store.add([put])
    assert await store.get(put.id) == put
    assert (put.raw, put.error) == (RAW, "bad\ufffd ?")
    long = record(error=ValueError("x" * 1_000_000))
    await store.add([long])
    assert (await show(store, long.id)).error == "x" * 4000


@with_drivers(ALL)
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


@with_drivers(ALL)
async def test_dropped_events_are_gone(store: QuarantineStore) -> None:
    put = [record(index=index, feed=FEED if index < 130 else OTHER) for index in range(150)]
    await store.add(put)
    assert await drop(store, [put[0].id, put[1].id, put[1].id, "unknown"]) == 2
    assert await drop(store, feed=FEED) == 128
    assert await kept(store) == put[130:]
    assert await store.get(put[0].id) is None
    with pytest.raises(StoreError, match="no event"):
        await show(store, put[0].id)


@with_drivers(ALL)
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


@with_drivers(DRIVERS)
async def test_the_callers_transaction_holds_what_is_added_and_removed(
    app: Any,
) -> None:
    store, put = app.quarantine, [record(index=0), record(index=1)]
    await store.add(put[:1])

    async def change(*, fails: bool) -> None:
        async with app.transaction() as transaction:
            await app.write(transaction)
            await store.add(put[1:], transaction=transaction)
            assert await store.remove([put[0].id], transaction=transaction) == 1
            if fails:
                raise PoisonError

    with pytest.raises(PoisonError):
        await change(fails=True)
    assert (await kept(store), rows(app)) == (put[:1], [])
    await change(fails=False)
    assert (await kept(store), rows(app)) == (put[1:], [1])


@with_drivers(DRIVERS)
async def test_r05_events_that_the_database_refuses_are_kept_and_the_others_there_once(
    publisher: Publisher, app: Any
) -> None:
    async def handle(batch: Batch) -> None:
        async with app.transaction() as transaction:
            await app.write(transaction, *numbers(batch))
            await batch.commit(transaction=transaction)

    await run(publisher, app.cursors, handle, "quarantine")
    assert rows(app) == [n for n in range(20) if n not in BAD]
    events = await kept(quarantine_beside(app.cursors))
    assert [event.index for event in events] == list(BAD)


@with_drivers(DRIVERS)
async def test_r05_the_cursor_is_saved_with_the_events_or_not_at_all(
    publisher: Publisher, app: Any
) -> None:
    """The handler leaves the commit to `run`."""
    breaks = True

    async def handle(batch: Batch) -> None:
        if set(numbers(batch)) & set(BAD):
            raise PoisonError
        if breaks:
            app.execute("ALTER TABLE feedapi_quarantine RENAME TO elsewhere")

    with pytest.raises(StoreError, match="the quarantine") as caught:
        await run(publisher, app.cursors, handle, "quarantine")
    assert caught.value.__cause__ is None  # it may hold a payload (R19)
    (feed,) = await app.cursors.feeds()
    assert (await app.cursors.load(feed))[0].cursor == "_first"
    app.execute("ALTER TABLE elsewhere RENAME TO feedapi_quarantine")
    breaks = False
    await run(publisher, app.cursors, handle, "quarantine")
    events = await kept(app.quarantine)
    assert [event.index for event in events] == list(BAD)
    assert (await app.cursors.load(feed))[0].cursor == publisher.end_cursor(0)


@with_drivers(CREATING)
async def test_a_missing_table_is_found_before_anything_is_read(
    publisher: Publisher, app: Any
) -> None:
    app.execute("DROP TABLE feedapi_quarantine")

    async def handle(batch: Batch) -> None:
        raise AssertionError

    with pytest.raises(StoreError, match=r"create_tables\(\)|manage\.py migrate"):
        await run(publisher, app.cursors, handle, "quarantine")


@with_drivers(DRIVERS)
async def test_a_transaction_of_something_else_is_refused(app: Any) -> None:
    with pytest.raises(StoreError):
        await app.quarantine.add([record()], transaction=object())


@with_drivers([each for each in DRIVERS if each.kind == "postgresql+psycopg"])
async def test_a_dry_run_flushes_what_a_session_still_holds_back(
    publisher: Publisher, app: Any
) -> None:
    engine = app.cursors.engine

    async def handle(batch: Batch) -> None:
        if isinstance(engine, AsyncEngine):
            async with AsyncSession(engine) as session, session.begin():
                session.add_all([Effect(n=n) for n in numbers(batch)])
                await batch.commit(transaction=session)
        else:
            with Session(engine) as session, session.begin():
                session.add_all([Effect(n=n) for n in numbers(batch)])
                await batch.commit(transaction=session)

    await run(publisher, app.cursors, handle, "quarantine")
    assert sorted(rows(app)) == [n for n in range(20) if n not in BAD]
    events = await kept(app.quarantine)
    assert [event.index for event in events] == list(BAD)


@with_drivers([each for each in DRIVERS if each.name in ("SQLAlchemy sqlite", "asyncpg")])
async def test_what_one_store_of_a_database_keeps_the_others_show(
    app: Any,
) -> None:
    async with open_quarantine(str(app.admin.url)) as theirs:
        put = [record(index=0), record(index=1)]
        await app.quarantine.add(put[:1])
        await theirs.add(put[1:])
        assert await kept(app.quarantine) == await kept(theirs) == put


# A move of the cursors


@with_drivers(ALL)
async def test_r07_a_move_takes_the_quarantined_events_along(moving: Any) -> None:
    store, there = quarantine_beside(moving), record(feed=MOVED)
    of_feed, of_others = [record(index=n) for n in range(3)], record(feed=OTHER)
    await moving.save(FEED, opening())
    await store.add([there, *of_feed, of_others])
    await moving.move({FEED: MOVED})
    moved = [replace(each, feed=MOVED) for each in of_feed]
    assert [each async for each in list_events(store, FEED)] == []
    assert [each async for each in list_events(store, MOVED)] == [there, *moved]
    assert [each async for each in list_events(store, OTHER)] == [of_others]
    assert await drop(store, feed=MOVED) == 4


@with_drivers(ALL)
async def test_r07_a_move_that_is_refused_leaves_the_quarantined_events(moving: Any) -> None:
    store, put = quarantine_beside(moving), record()
    for feed in (FEED, MOVED):
        await moving.save(feed, opening())
    await store.add([put])
    with pytest.raises(StoreError, match="already"):
        await moving.move({FEED: MOVED})
    assert await kept(store) == [put]
    await moving.move({FEED: MOVED}, overwrite=True)
    assert await kept(store) == [replace(put, feed=MOVED)]


@with_drivers(DRIVERS)
async def test_r07_cursors_are_moved_with_the_quarantined_events_or_not_at_all(
    app: Any,
) -> None:
    cursors = app.cursors
    await cursors.save(FEED, opening())
    await app.quarantine.add([record()])
    app.execute("ALTER TABLE feedapi_quarantine RENAME COLUMN filters TO selection")
    with pytest.raises(StoreError, match="filters"):
        await cursors.move({FEED: MOVED})
    assert await cursors.feeds() == [FEED]
    # An application that quarantines nothing has no table for it.
    app.execute("DROP TABLE feedapi_quarantine")
    await cursors.move({FEED: MOVED})
    assert await cursors.feeds() == [MOVED]
