"""The app's tables are those of the other stores, whoever has created them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connections
from sqlalchemy.ext.asyncio import create_async_engine

from feedapi_client import Journal, PostgresCursorStore, SQLAlchemyCursorStore
from feedapi_client.quarantine.quarantine_store import SQLAlchemyQuarantineStore, quarantine_beside
from feedapi_client.stores.tables import QUARANTINE, TABLES
from feedapi_client.testing.contracts import advanced, opening
from tests.django.databases import (
    APP_TABLES,
    SERVERS,
    created,
    drop,
    execute,
    migrate,
    place_of,
    registered,
    set_up,
    settings_of,
)
from tests.django.test_quarantine import FEED, record
from tests.servers import MariaDB, Postgres

set_up()

from feedapi_client.django import DjangoCursorStore, DjangoQuarantineStore  # noqa: E402

pytestmark = pytest.mark.slow


@asynccontextmanager
async def others(server: str, request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Any]:
    """The stores of SQLAlchemy in the same database."""
    if server == "sqlite":
        url = f"sqlite+aiosqlite:///{folder}/app.db"
    else:
        running: Postgres | MariaDB = request.getfixturevalue(server)
        url = running.url()
    engine = create_async_engine(url)
    yield SQLAlchemyCursorStore(engine, journal=Journal()), SQLAlchemyQuarantineStore(engine)
    await engine.dispose()


def test_the_migration_is_the_models(tmp_path: Path) -> None:
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "empty.db")}
    with registered(database, "default"):
        call_command("makemigrations", "feedapi", check=True, dry_run=True, verbosity=0)
    app = apps.get_app_config("feedapi")
    assert app.name == "feedapi_client.django"
    fields = app.get_model("EventInQuarantine")._meta.get_fields()
    assert {each.name for each in fields} == {*TABLES[QUARANTINE][0]} - {"feed_id"}


def test_a_database_that_django_created_the_tables_of_stays_as_it_is(tmp_path: Path) -> None:
    """As the migration did before it took them from the stores' declaration."""
    file = tmp_path / "app.db"
    golden = Path(__file__).with_name("migrated.sql").read_text()
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(golden)

    async def consume(using: str) -> None:
        async with DjangoCursorStore(using, journal=Journal()) as store:
            stored = await store.load(FEED)
            assert {p: position.cursor for p, position in stored.items()} == {0: "c0", 1: "c1"}
            await store.save(FEED, advanced(stored))
            assert [event.raw for event in await quarantine_beside(store).page()] == [b'{"n":1}']

    with registered({"ENGINE": "django.db.backends.sqlite3", "NAME": str(file)}) as using:
        call_command("migrate", "feedapi", database=using, check_unapplied=True, verbosity=0)
        golden_columns = [columns(using, table) for table in APP_TABLES]
        asyncio.run(consume(using))
        migrate(using)
        assert [columns(using, table) for table in APP_TABLES] == golden_columns


def columns(using: str, table: str) -> list[Any]:
    introspection = connections[using].introspection
    with connections[using].cursor() as cursor:
        found = introspection.get_table_description(cursor, table)
        keys = introspection.get_primary_key_columns(cursor, table)
    # By name: the order of columns is free.
    return [sorted((each.name, str(each.type_code).lower(), each.null_ok) for each in found), keys]


@pytest.mark.parametrize("server", SERVERS)
def test_the_tables_are_those_of_sqlalchemys_stores(
    server: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async def create() -> None:
        async with others(server, request, tmp_path) as (cursors, quarantine):
            await cursors.create_tables()
            await quarantine.create_tables()

    for using in created(server, request, tmp_path):
        migrated = [columns(using, table) for table in APP_TABLES]
        drop(using)
        asyncio.run(create())
        assert [columns(using, table) for table in APP_TABLES] == migrated
        if server == "mariadb":
            migrate(using)
            query = (
                "SELECT DISTINCT collation_name FROM information_schema.columns "
                "WHERE table_name LIKE 'feedapi\\_%' AND collation_name IS NOT NULL"
            )
            assert execute(using, query) == [("utf8mb4_bin",)]
        drop(using)


@pytest.mark.parametrize("server", SERVERS)
def test_tables_that_are_there_stay_and_stores_can_be_exchanged(
    server: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    event = record()

    async def before() -> None:
        async with others(server, request, tmp_path) as (cursors, quarantine):
            await cursors.create_tables()
            await quarantine.create_tables()
            await cursors.save(FEED, opening(range(3)))
            await quarantine.add([event])

    async def through_django(using: str) -> None:
        async with DjangoCursorStore(using, journal=Journal()) as store:
            assert await store.feeds() == [FEED]
            await store.save(FEED, advanced(await store.load(FEED)))
            assert await quarantine_beside(store).page() == [event]
            await quarantine_beside(store).add([record(1)])

    async def after() -> None:
        async with others(server, request, tmp_path) as (cursors, quarantine):
            assert await cursors.load(FEED) == advanced(opening(range(3)))
            assert len(await quarantine.page()) == 2
        if server == "postgres":
            async with PostgresCursorStore(request.getfixturevalue(server).dsn) as native:
                assert await native.load(FEED) == advanced(opening(range(3)))

    with registered(settings_of(place_of(server, request, tmp_path))) as using:
        drop(using)
        asyncio.run(before())
        call_command("migrate", "feedapi", database=using, verbosity=0)
        asyncio.run(through_django(using))
        asyncio.run(after())
        call_command("migrate", "feedapi", "zero", database=using, verbosity=0)
        assert not {*APP_TABLES} & set(connections[using].introspection.table_names())
        drop(using)


def test_each_database_has_tables_of_its_own(tmp_path: Path) -> None:
    async def run() -> None:
        async with DjangoCursorStore("one") as one, DjangoCursorStore("two") as two:
            await one.save(FEED, opening())
            assert (await one.load(FEED), await two.load(FEED)) == (opening(), {})
            assert DjangoQuarantineStore("one").along(two, []) is None

    def database(name: str) -> dict[str, Any]:
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / name)}

    with registered(database("1.db"), "one"), registered(database("2.db"), "two"):
        for alias in ("one", "two"):
            call_command("migrate", "feedapi", database=alias, verbosity=0)
        asyncio.run(run())
