"""`DjangoCursorStore` passes the contract of every cursor store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.management import call_command
from django.db import connections, transaction

from feedapi_client.stores import Journal, JournalledStore
from feedapi_client.testing.contracts import AdministrableStoreContract, DoneStoreContract
from tests.django.databases import (
    APP_TABLES,
    SERVERS,
    TABLES,
    execute,
    registered,
    set_up,
    settings_of,
)
from tests.stores.journal_contract import AGING, JournalContract, Make

set_up()

from feedapi_client.django import DjangoCursorStore  # noqa: E402 - Django has its settings

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def drop(using: str) -> None:
    execute(using, *(f"DROP TABLE IF EXISTS {table}" for table in (*TABLES, "django_migrations")))


def created(server: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """Give the alias of a database with the app's tables, which are empty.

    They are those of the test before, or else made by a migration, which takes a tenth of a second.
    """
    database = settings_of(server, request, folder)
    if server == "sqlite":  # it need not survive the end of the machine
        Path(database["NAME"]).write_bytes(migrated_file())
        database["OPTIONS"] = {"init_command": "PRAGMA synchronous=OFF"}
    with registered(database) as using:
        if {*APP_TABLES} <= {*connections[using].introspection.table_names()}:
            emptied = (f"DELETE FROM {table}" for table in APP_TABLES)
            execute(using, "DROP TABLE IF EXISTS effects", *emptied)
        else:
            drop(using)
            call_command("migrate", "feedapi", database=using, verbosity=0)
        yield using


@cache
def migrated_file() -> bytes:
    """Return a file of SQLite with the app's tables."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "app.db")
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(file)}
        with registered(database) as using:
            call_command("migrate", "feedapi", database=using, verbosity=0)
        return file.read_bytes()


def in_django(function: Any) -> Any:
    """Make a function a coroutine function, which runs in the thread of synchronous code."""
    return sync_to_async(function)


class DjangoContract(AdministrableStoreContract, DoneStoreContract):
    server: str
    supports_transactions = True
    supports_second_handle = True
    supports_failure_injection = True

    @pytest.fixture
    async def using(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
        steps = created(self.server, request, tmp_path)
        yield await in_django(next)(steps)
        await in_django(next)(steps, None)

    @pytest.fixture
    async def store(self, using: str) -> AsyncIterator[DjangoCursorStore]:
        async with DjangoCursorStore(using) as store:
            yield store

    @asynccontextmanager
    async def second_handle(self, store: Any) -> AsyncIterator[DjangoCursorStore]:
        async with DjangoCursorStore(store.using) as second:
            yield second

    async def begin(self, store: Any) -> Any:
        def begin() -> Any:
            transaction.atomic(using=store.using).__enter__()
            return connections[store.using]

        return await in_django(begin)()

    async def commit(self, transaction: Any) -> None:
        await self._end(transaction, None)

    async def rollback(self, transaction: Any) -> None:
        await self._end(transaction, RuntimeError)

    async def _end(self, connection: Any, error: Any) -> None:
        block = transaction.atomic(using=connection.alias)
        await in_django(lambda: block.__exit__(error, None, None))()

    @asynccontextmanager
    async def failing(self, store: Any) -> AsyncIterator[None]:
        event = "CREATE TRIGGER fail_{0} BEFORE {0} ON feedapi_cursors "
        trigger = {
            "sqlite": event + "WHEN NEW.partition_id = 5 BEGIN SELECT RAISE(FAIL, 'fire'); END",
            "mysql": event + "FOR EACH ROW IF NEW.partition_id = 5 "
            "THEN SIGNAL SQLSTATE '45000'; END IF",
        }.get(store.database.dialect)
        run = in_django(execute)
        if trigger is None:
            await run(
                store.using,
                "ALTER TABLE feedapi_cursors ADD CONSTRAINT fire "
                "CHECK (partition_id <> 5 OR revision < 0) NOT VALID",
            )
            yield
            await run(store.using, "ALTER TABLE feedapi_cursors DROP CONSTRAINT fire")
            return
        await run(store.using, trigger.format("INSERT"), trigger.format("UPDATE"))
        yield
        await run(store.using, "DROP TRIGGER fail_INSERT", "DROP TRIGGER fail_UPDATE")


class TestSQLite(DjangoContract):
    server = "sqlite"


class TestPostgres(DjangoContract):
    server = "postgres"


class TestMariaDB(DjangoContract):
    server = "mariadb"


class DjangoJournal(JournalContract):
    server: str
    using = DjangoContract.using

    @pytest.fixture
    async def make(self, using: str) -> AsyncIterator[Make]:
        opened: list[DjangoCursorStore] = []

        async def make(journal: Journal | None) -> DjangoCursorStore:
            opened.append(DjangoCursorStore(using, journal=journal))
            return opened[-1]

        yield make
        for store in opened:
            await store.aclose()

    async def journal_rows(self, store: JournalledStore) -> int:
        assert isinstance(store, DjangoCursorStore)
        rows = await in_django(execute)(store.using, "SELECT COUNT(*) FROM feedapi_cursors_journal")
        return int(rows[0][0])

    async def age(self, store: JournalledStore, seconds: int) -> None:
        assert isinstance(store, DjangoCursorStore)
        statements = (each.replace(":by", f"{seconds}000000") for each in AGING)
        await in_django(execute)(store.using, *statements)


class TestJournalOfSQLite(DjangoJournal):
    server = "sqlite"


class TestJournalOfPostgres(DjangoJournal):
    server = "postgres"


class TestJournalOfMariaDB(DjangoJournal):
    server = "mariadb"


def test_every_server_is_tested() -> None:
    assert {case.server for case in DjangoContract.__subclasses__()} == set(SERVERS)
    assert {case.server for case in DjangoJournal.__subclasses__()} == set(SERVERS)
