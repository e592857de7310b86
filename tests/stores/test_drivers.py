"""What is beside the contracts and the same with every driver: transactions, tables, refusals."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from typing import Any

import anyio
import asyncpg  # type: ignore[import-untyped]
import pytest
import redis
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import scoped_session, sessionmaker

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores import (
    Journal,
    Lease,
    PostgresCursorStore,
    RedisCursorStore,
    SQLAlchemyCursorStore,
)
from feedapi_client.testing.contracts import advanced, opening
from tests.leases import claims
from tests.positions import counted
from tests.servers import Postgres
from tests.stores import drivers
from tests.stores.drivers import (
    CONNECTED,
    DJANGO,
    FILES,
    SERVED,
    TABLES,
    TRANSACTING,
    App,
    awaited,
    handle,
    with_drivers,
)

pytestmark = pytest.mark.anyio
FEED = FeedKey("https://service.test/feed")


ON_SQLALCHEMY = [each for each in TRANSACTING if each.name.startswith("SQLAlchemy")]


def effects(app: App) -> int:
    return int(app.execute("SELECT COUNT(*) FROM effects")[0][0])


@pytest.mark.parametrize("effect_first", [True, False])
@with_drivers([*TRANSACTING, *DJANGO])
async def test_r05_cursor_and_effect_stand_or_fall_together(
    app: App, store: Any, effect_first: bool
) -> None:
    for commit in (False, True):
        begun = await app.begin()
        if effect_first:
            await app.write(begun)
        await store.save(FEED, opening(range(3)), transaction=begun)
        if not effect_first:
            await app.write(begun)
        await app.end(begun, commit=commit)
        assert effects(app) == commit
        assert await store.load(FEED) == (opening(range(3)) if commit else {})


@pytest.mark.parametrize(
    "refused",
    [{0: counted("x", 9)}, opening(range(5)), {1: Position("new"), 0: counted("x", 9)}],
    ids=["one", "first", "several"],
)
@with_drivers([*TRANSACTING, *DJANGO])
async def test_r17_a_refused_save_leaves_a_transaction_that_can_even_commit(
    app: App, store: Any, refused: dict[int, Position]
) -> None:
    await store.save(FEED, opening())
    begun = await app.begin()
    await app.write(begun)
    with pytest.raises(FencedError) as failed:
        await store.save(FEED, refused, transaction=begun)
    await app.write(begun)
    await app.end(begun, commit=True)
    assert failed.value.partition == 0
    assert (effects(app), await store.load(FEED)) == (2, opening())


@with_drivers(SERVED)
async def test_r17_of_several_transactions_at_once_all_but_one_are_refused(
    app: App, store: Any
) -> None:
    await store.save(FEED, opening(range(3)))
    results: list[str] = []

    async def consume(name: str) -> None:
        begun = await app.begin()
        try:
            await store.save(FEED, advanced(opening(range(3)), name), transaction=begun)
            results.append("saved")
        except FencedError:
            results.append("fenced")
        await app.end(begun, commit=True)

    async with anyio.create_task_group() as group:
        for name in "abc":
            group.start_soon(consume, name)
    assert sorted(results) == ["fenced", "fenced", "saved"]


@with_drivers([*drivers.SQL, *DJANGO, *drivers.REDIS])
async def test_r17_a_save_on_what_a_database_that_went_back_has_lost_is_refused(
    app: App, store: Any
) -> None:
    """Counted revisions would be the same: the rival's save would be overwritten."""
    first = Position.after(None, "a")
    await store.save(FEED, {0: first})
    lost = first.advance("b")
    await store.save(FEED, {0: lost})
    await store.delete(FEED)
    await store.save(FEED, {0: first})  # a replica that lags has taken over
    rival = first.advance("x")
    await store.save(FEED, {0: rival})
    with pytest.raises(FencedError):
        await store.save(FEED, {0: lost.advance("c")})
    assert await store.load(FEED) == {0: rival}


@with_drivers([each for each in SERVED if each.loops == ("asyncio",)])
async def test_r20_native_cancellation_within_a_save_keeps_all_or_nothing(
    app: App, store: Any
) -> None:
    expected = opening(range(200))
    await store.save(FEED, expected)
    for delay in (0, 0.001, 0.003, 0.01, 0.03):
        begun, later = await app.begin(), advanced(expected)
        task = asyncio.create_task(store.save(FEED, later, transaction=begun))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.wait([task])
        await app.end(begun, commit=False)
        assert await store.load(FEED) == expected
        save = asyncio.create_task(store.save(FEED, later))
        await asyncio.sleep(delay)
        save.cancel()
        await asyncio.wait([save])
        found = await store.load(FEED)
        assert found in (expected, later)
        expected = found


@with_drivers(CONNECTED)
async def test_r17_a_save_does_not_wait_longer_than_it_may_for_a_row(app: App, store: Any) -> None:
    await store.save(FEED, opening())
    store.limit_lock_waits(FEED, 0.2)
    with app.admin.begin() as holder:
        holder.execute(sa.text("SELECT * FROM feedapi_cursors FOR UPDATE"))
        columns = "feed_cursor, status, 1, 0, feed_url, consumer, filters"
        first = f"INSERT INTO feedapi_cursors SELECT feed_id, 1, {columns} FROM feedapi_cursors"
        holder.execute(sa.text(first))
        for positions in (advanced(opening()), {1: Position("new")}):
            begun = await app.begin()
            for transaction in (begun, None):
                with pytest.raises(FencedError, match="has not ended within"):
                    await store.save(FEED, positions, transaction=transaction)
            await app.end(begun, commit=True)
        holder.rollback()
    await store.save(FEED, advanced(opening()))


LEASE, PARTITIONS = 20.0, range(1_100)
"""A lease in seconds, of which nothing waits longer than a part; and more than two statements."""


@with_drivers(CONNECTED)
async def test_leases_pass_by_the_rows_that_a_paused_process_holds(app: App, store: Any) -> None:
    for name in ("dead", "a", "b"):
        await store.beat(FEED, name, LEASE)
    await store.put(FEED, "dead", claims("dead", dict.fromkeys(PARTITIONS, 0)))
    await store.leave(FEED, "dead")
    await store.put(FEED, "a", claims("a", {2001: 0, 2002: 0}))
    await store.put(FEED, "b", claims("b", {2003: 0}))
    of_feed = f"feed_id = '{FEED.id}'"
    leases = f"UPDATE feedapi_cursors_leases SET epoch = 9 WHERE {of_feed} AND partition_id"
    heartbeat = f"UPDATE feedapi_cursors_instances SET expires_at = 1 WHERE {of_feed}"
    passed = anyio.Event()

    async def pass_by() -> None:
        claimed = await store.put(FEED, "a", claims("a", dict.fromkeys(PARTITIONS, 1)))
        assert claimed == {*PARTITIONS} - {7}
        assert await store.put(FEED, "a", [Lease(2001, "a", 1, ended=True)]) == {2001}
        assert await store.put(FEED, "a", [Lease(2002, None, 1)]) == {2002}
        assert await store.beat(FEED, "a", LEASE)
        with pytest.raises(StoreError):
            await store.beat(FEED, "b", LEASE)
        await store.leave(FEED, "a")
        passed.set()

    with app.admin.begin() as paused:
        for held in (f"{leases} IN (7, 2003)", f"{heartbeat} AND instance = 'b'"):
            paused.execute(sa.text(held))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pass_by)
            with anyio.move_on_after(LEASE / 2):
                await passed.wait()
            in_time = passed.is_set()
            paused.rollback()  # else what waits for the rows would never end
    assert in_time
    owners = {p: lease.owner for p, lease in (await store.look(FEED)).leases.items()}
    assert {p for p, owner in owners.items() if owner} == {2003}


@with_drivers([each for each in SERVED if each.server == "postgres"])
async def test_a_database_that_does_not_answer_is_a_store_error(app: App, store: Any) -> None:
    await store.save(FEED, opening())
    with app.admin.connect() as holder:
        holder.execute(sa.text("LOCK TABLE feedapi_cursors IN ACCESS EXCLUSIVE MODE"))
        async with app.store(timeout=0.3) as impatient:
            with pytest.raises(StoreError, match=r"did not answer within 0\.3 s"):
                await impatient.save(FEED, advanced(opening()))
    assert await store.load(FEED) == opening()
    await store.save(FEED, advanced(opening()))


@with_drivers([each for each in TRANSACTING if each.name != "sqlite3"])
async def test_a_missing_table_is_a_store_error_that_says_how_to_make_it(
    app: App, store: Any
) -> None:
    app.execute("DROP TABLE feedapi_cursors")
    begun = await app.begin()
    with pytest.raises(StoreError, match=r"create_tables\(\)"):
        await store.save(FEED, opening(), transaction=begun)
    await app.end(begun, commit=False)
    with pytest.raises(StoreError, match=r"create_tables\(\)") as failed:
        await store.load(FEED)
    assert failed.value.__cause__ is not None


@with_drivers(TRANSACTING)
async def test_what_is_no_transaction_is_refused(app: App, store: Any) -> None:
    for wrong in (object(), scoped_session(sessionmaker()), app.given, "transaction"):
        with pytest.raises(StoreError, match="transaction must be"):
            await store.save(FEED, opening(), transaction=wrong)


@with_drivers([*drivers.SQL, *DJANGO])
async def test_an_error_of_another_kind_is_a_store_error_that_names_it(
    app: App, store: Any
) -> None:
    with pytest.raises(StoreError, match="TypeError") as failed:
        await store.save(FEED, {0: Position("c"), "one": Position("a secret")})
    assert isinstance(failed.value.__cause__, TypeError)
    assert (failed.value.feed, "secret" in str(failed.value)) == (FEED.url, False)
    await store.save(FEED, opening())


async def loose_connection(app: App) -> Any:
    """A connection of the application in autocommit mode."""
    if app.driver.kind == "asyncpg":
        return await asyncpg.connect(app.place.dsn)
    begun = await app.begin()
    if app.is_sqlalchemy:
        await awaited(begun.execution_options(isolation_level="AUTOCOMMIT"))
    elif app.driver.server == "file":
        begun.isolation_level = None
    else:
        await awaited(begun.set_autocommit(True))
    return begun


@with_drivers([each for each in TRANSACTING if not each.transaction])
async def test_r05_a_connection_without_a_transaction_is_refused(app: App, store: Any) -> None:
    loose = await loose_connection(app)
    with pytest.raises(StoreError, match=r"autocommit mode|BEGIN one first"):
        await store.save(FEED, opening(), transaction=loose)
    await awaited(loose.close())
    assert await store.load(FEED) == {}


@with_drivers(SERVED[:1])
async def test_an_event_loop_goes_on_while_a_synchronous_save_waits_for_a_lock(
    app: App, store: Any, postgres: Postgres
) -> None:
    import psycopg

    await store.save(FEED, opening())
    with psycopg.connect(postgres.dsn) as holder, psycopg.connect(postgres.dsn) as waiting:
        holder.execute("SELECT * FROM feedapi_cursors FOR UPDATE")
        async with anyio.create_task_group() as group:
            later = advanced(opening())
            group.start_soon(lambda: store.save(FEED, later, transaction=waiting))
            waits = "SELECT 1 FROM pg_locks WHERE NOT granted"
            while not app.execute(waits):  # noqa: ASYNC110 - the server has no event for it
                await anyio.sleep(0.01)
            holder.rollback()  # by a task that runs meanwhile
        waiting.commit()
    assert await store.load(FEED) == advanced(opening())


@with_drivers([each for each in ON_SQLALCHEMY if "session" in each.transaction])
async def test_a_store_takes_the_transactions_of_other_drivers_of_its_database(
    app: App, store: Any
) -> None:
    """Synchronous ones where it is asynchronous, and the reverse."""
    other = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
    engine = create_async_engine(
        app.admin.url.set(drivername=other.get(app.admin.dialect.name, "mysql+asyncmy"))
    )
    async with engine.begin() as connection:
        await store.save(FEED, opening(), transaction=connection)
    await engine.dispose()
    with app.admin.begin() as synchronous:
        await store.save(FEED, advanced(opening()), transaction=synchronous)
    assert await store.load(FEED) == advanced(opening())


@with_drivers([each for each in ON_SQLALCHEMY if each.kind in ("sqlite", "mysql+pymysql")])
async def test_a_synchronous_connection_is_used_by_threads_beside_the_event_loop(
    app: App, store: Any
) -> None:
    used: list[int] = []
    sa.event.listen(
        app.given, "before_cursor_execute", lambda *_: used.append(threading.get_ident())
    )
    begun = await app.begin()
    await store.save(FEED, opening(range(3)), transaction=begun)
    await app.end(begun, commit=True)
    assert used
    assert threading.get_ident() not in used


# Cost


@with_drivers([each for each in ON_SQLALCHEMY if not each.transaction])
async def test_the_usual_save_is_one_statement_three_with_a_journal_and_few_for_many(
    app: App, store: Any
) -> None:
    positions, statements = opening(), list[str]()
    async with app.store(journal=Journal(keep=None)) as journalled:
        await journalled.save(FEED, positions)
        sa.event.listen(
            getattr(app.given, "sync_engine", app.given),
            "before_cursor_execute",
            lambda connection, cursor, statement, *_: statements.append(statement),
        )
        await store.save(FEED, positions := advanced(positions))
        assert [each.split()[0] for each in statements] == ["UPDATE"]
        statements.clear()
        await journalled.save(FEED, positions := advanced(positions))
        lock = ["DELETE"] if app.driver.server == "file" else []  # of the whole file
        first = statements.copy()
        assert [each.split()[0] for each in first] == [*lock, "SELECT", "INSERT", "INSERT"]
        # The next one has the same texts: a driver knows them, and a server has planned them.
        await journalled.save(FEED, advanced(positions))
        assert statements == first * 2
    many = opening(range(1, 5_001))
    for positions in (many, advanced(many)):
        statements.clear()
        await store.save(FEED, positions)
        assert len(statements) < 70


# Tables


CREATING = [each for each in TRANSACTING if each.server != "file" or "SQLAlchemy" in each.name]
CREATING = [each for each in CREATING if not each.transaction]


@with_drivers(CREATING)
async def test_create_tables_may_be_called_by_several_at_once(app: App, store: Any) -> None:
    app.execute(*(f"DROP TABLE IF EXISTS {table}" for table in (*TABLES, "feedapi_format")))
    async with AsyncExitStack() as stack:
        handles = [await stack.enter_async_context(handle(app.driver, app.place)) for _ in "1234"]
        async with anyio.create_task_group() as group:
            for each in handles:
                group.start_soon(each.store(journal=Journal()).create_tables)
    await store.save(FEED, opening())


@with_drivers([each for each in (*CREATING, *FILES[1:2]) if each.loops == ("asyncio",)])
async def test_what_one_store_of_a_database_writes_the_others_read(app: App) -> None:
    others = [each for each in (*CREATING, *FILES) if each.server == app.driver.server]
    positions = opening(range(3))
    async with app.store(journal=Journal(keep=None)) as ours:
        await ours.save(FEED, positions)
        await ours.look(FEED)  # a file has tables of leases from then on
        for driver in others:
            async with (
                handle(driver, app.place) as other,
                other.store(journal=Journal(keep=None)) as theirs,
            ):
                assert await theirs.load(FEED) == positions
                positions = advanced(positions)
                await theirs.save(FEED, positions)
                assert await ours.load(FEED) == positions
                assert await ours.feeds() == await theirs.feeds() == [FEED]
                assert await theirs.beat(FEED, driver.name, 1000) is False
                assert await theirs.put(FEED, driver.name, claims(driver.name, {0: 0})) == {0}
                assert (await ours.look(FEED)).leases[0].owner == driver.name
                await ours.leave(FEED, driver.name)
                assert not (await theirs.look(FEED)).instances
                app.execute("DELETE FROM feedapi_cursors_leases")


@with_drivers([each for each in CREATING if each.server == "postgres"])
async def test_every_store_creates_the_same_tables(app: App) -> None:
    columns = (
        "SELECT table_name, ordinal_position, column_name, data_type, character_maximum_length, "
        "is_nullable, column_default FROM information_schema.columns "
        "WHERE table_name LIKE 'feedapi_cursors%' ORDER BY 1, 2"
    )
    keys = (
        "SELECT conrelid::regclass\\:\\:text, pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE conrelid::regclass\\:\\:text LIKE 'feedapi_cursors%' AND contype = 'p' ORDER BY 1"
    ).replace("::regclass", "\\:\\:regclass")
    found = []
    metadata = sa.MetaData()
    SQLAlchemyCursorStore(sa.create_engine("sqlite:///x"), metadata=metadata, journal=Journal())
    for create in (True, False):
        app.execute(*(f"DROP TABLE IF EXISTS {table}" for table in TABLES))
        if create:
            await app.store(journal=Journal()).create_tables()
        else:  # by the application's own migrations
            metadata.create_all(app.admin)
        found.append((app.execute(columns), app.execute(keys)))
    assert found[0] == found[1]
    assert len(found[0][1]) == 5


# What is wrong


WRONG: dict[str, tuple[Any, type[Exception]]] = {
    "an Engine or an AsyncEngine is needed, not a str": (
        lambda: SQLAlchemyCursorStore("sqlite://"),  # type: ignore[arg-type]
        TypeError,
    ),
    "poolclass=sqlalchemy.StaticPool": (
        lambda: SQLAlchemyCursorStore(sa.create_engine("sqlite://")),
        ValueError,
    ),
    "not oracle": (lambda: SQLAlchemyCursorStore(_engine_of("oracle")), ValueError),
    "the isolation level AUTOCOMMIT": (
        lambda: SQLAlchemyCursorStore(
            sa.create_engine("sqlite:///x").execution_options(isolation_level="AUTOCOMMIT")
        ),
        ValueError,
    ),
    "or a DSN, not a Engine": (
        lambda: PostgresCursorStore(sa.create_engine("sqlite://")),  # type: ignore[arg-type]
        TypeError,
    ),
    "needs a redis.asyncio client or a URL": (
        lambda: RedisCursorStore(redis.Redis()),
        TypeError,
    ),
}


def _engine_of(name: str) -> sa.Engine:
    engine = sa.create_engine("sqlite:///x")
    engine.dialect.name = name
    return engine


@pytest.mark.parametrize("why", WRONG)
def test_what_is_no_database_is_refused(why: str) -> None:
    make, kind = WRONG[why]
    with pytest.raises(kind, match=why):
        make()
