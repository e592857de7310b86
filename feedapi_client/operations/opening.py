"""The stores of cursors and of quarantined events that a text names, as ``--store`` gives it.

A file is SQLite. A URL names a database with its driver (SQLAlchemy), ``redis://``, or the stream
of an exactly-once relay, ``liftbridge://HOST:PORT/STREAM``. ``env:NAME`` stands for one of them in
an environment variable.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feedapi_client.arguments import environment_value
from feedapi_client.causes import store_problem
from feedapi_client.errors import StoreError
from feedapi_client.operations.stored_positions import OperationError
from feedapi_client.quarantine.quarantine_store import (
    MemoryQuarantineStore,
    QuarantineStore,
    SQLiteQuarantineStore,
)
from feedapi_client.stores.base import AdministrableStore
from feedapi_client.stores.journal import Journal
from feedapi_client.stores.sqlite import SQLiteCursorStore, create_privately

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

CURSORS, QUARANTINE = "feedapi_cursors", "feedapi_quarantine"
_LEDGERS, _REDIS = ("liftbridge", "liftbridges"), ("redis", "rediss", "unix")
# Without these SQLAlchemy would take a driver that is not asynchronous.
_DRIVERS = {
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "sqlite": "sqlite+aiosqlite",
    "mysql": "mysql+asyncmy",
    "mariadb": "mariadb+asyncmy",
}
_EXTRAS = {
    "psycopg": "postgresql",
    "asyncpg": "asyncpg",
    "aiosqlite": "sqlite",
    "asyncmy": "mysql",
}


def location(text: str) -> str:
    """Return the file or the URL that the text names. Raises ValueError."""
    if text.startswith("env:"):
        text = environment_value(text.removeprefix("env:"), "env:NAME")
    if not text.strip() or not text.isprintable():
        raise ValueError("this is neither a file nor a database URL")
    return text


def without_secrets(url: str) -> str:
    """Return the URL of a database without user, password and query, for messages.

    Any text will do. Only the scheme is left where a password may hold the `?` of the query.
    """
    scheme, _, rest = url.partition("://")
    before, at, place = rest.rpartition("@")
    if at and not set(before).isdisjoint("?#"):
        return f"{scheme}://…"
    return f"{scheme}://{place.partition('?')[0].partition('#')[0]}"


@asynccontextmanager
async def open_store(
    where: str, *, create: bool = False, table: str = CURSORS, journal: Journal | None = None
) -> AsyncIterator[AdministrableStore]:
    """Open a store of cursors, and close it at the end of the block.

    Arguments:
        create: without it the store has to exist, so that a typo creates none.
        table: NAME or SCHEMA.NAME in a database given by URL; the prefix of keys in Redis.
        journal: a store that has a journal keeps it up also without: a gap would make it useless.

    Raises:
        ValueError: this names no store.
        StoreError: the store can't be reached, or `OperationError` where there is none.
    """
    where = location(where)
    scheme, url, _ = where.partition("://")

    def kept(place: str, table: str, found: set[str]) -> Journal | None:
        if not create and table not in found:
            raise OperationError(f"{place}: the database holds no cursors (no table {table})")
        return journal or (Journal(keep=None) if f"{table}_journal" in found else None)

    if url and scheme in _LEDGERS:
        ledgers = import_module("feedapi_client.liftbridge.ledger_url")
        async with ledgers.open_ledger(where, create=create) as ledger:
            yield ledger
    elif url and scheme in _REDIS:
        async with _redis(where, table) as store:
            yield store
    elif not url:
        if table != CURSORS:
            raise ValueError(
                f"a file keeps its cursors in the table {CURSORS}; give a URL "
                f"(sqlite+aiosqlite:///{where}) for another one"
            )
        found = _tables(where, required=not create)
        async with SQLiteCursorStore(where, journal=kept(where, table, found)) as file:
            yield file
    else:
        if re.fullmatch(r"(\w+\.)?\w+", table) is None:
            raise ValueError("--table takes NAME or SCHEMA.NAME")
        schema, _, name = table.rpartition(".")
        async with _database(where, schema, (name, f"{name}_journal")) as (engine, found):
            from feedapi_client.stores.sql import SQLAlchemyCursorStore

            database = SQLAlchemyCursorStore(
                engine,
                table=name,
                schema=schema or None,
                journal=kept(without_secrets(where), name, found),
            )
            if create:
                await database.create_tables()
            yield database


@asynccontextmanager
async def open_quarantine(where: str, *, create: bool = True) -> AsyncIterator[QuarantineStore]:
    """Open a quarantine, and close it at the end of the block.

    Without `create` the database has to exist; without the table its quarantine is empty.

    Raises:
        ValueError: this names no store.
        StoreError: the store can't be reached, or `OperationError` where none can be.
    """
    where = location(where)
    scheme, url, _ = where.partition("://")
    if url and scheme in _REDIS:
        raise OperationError("Redis holds no quarantine")
    if url and scheme in _LEDGERS:
        raise OperationError(
            "a stream holds no quarantine: give what the relay's --quarantine names"
        )
    if not url:
        exists = QUARANTINE in _tables(where, required=not create)
        async with aclosing(SQLiteQuarantineStore(where)) as file:
            if create:
                await file.prepare()
            yield file if exists or create else MemoryQuarantineStore()
        return
    async with _database(where, "", (QUARANTINE,)) as (engine, found):
        from feedapi_client.quarantine.quarantine_store import SQLAlchemyQuarantineStore

        database = SQLAlchemyQuarantineStore(engine)
        if create:
            await database.prepare()
        yield database if found or create else MemoryQuarantineStore()


def _tables(file: str, *, required: bool) -> set[str]:
    """Return the names of the tables in a database file."""
    path = Path(file)
    if path.is_dir():
        raise ValueError(f"{file} is a folder: name a file in it")
    if not path.exists():
        if required:
            raise OperationError(f"{file}: there is no such file")
        return set()
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    except (sqlite3.Error, UnicodeError) as error:
        raise StoreError(f"the cursor database {file} failed: {error}") from error


def _redis(url: str, prefix: str) -> Any:
    from feedapi_client.stores.redis import RedisCursorStore

    try:
        return RedisCursorStore(url) if prefix == CURSORS else RedisCursorStore(url, prefix=prefix)
    except (ValueError, TypeError):
        raise ValueError(
            f"{url.partition('://')[0]}://… is no Redis URL that can be used. Use for example "
            "redis://localhost:6379/0"
        ) from None


@asynccontextmanager
async def _database(
    url: str, schema: str, tables: tuple[str, ...]
) -> AsyncIterator[tuple[AsyncEngine, set[str]]]:
    """Open the database of a SQLAlchemy URL. Gives those of the tables that exist, too."""
    scheme, rest = url.split("://", 1)
    place = without_secrets(url)
    try:
        from sqlalchemy import Connection, inspect
        from sqlalchemy.ext.asyncio import create_async_engine

        engine = create_async_engine(
            f"{_DRIVERS.get(scheme, scheme)}://{rest}", hide_parameters=True, pool_pre_ping=True
        )
    except ModuleNotFoundError as missing:
        module = (missing.name or "").partition(".")[0]
        driver = _DRIVERS.get(scheme, scheme).partition("+")[2]
        extra = _EXTRAS.get(driver, "sql") if module == "sqlalchemy" else _EXTRAS.get(module)
        hint = f": pip install 'feedapi-client[{extra}]'" if extra else ""
        raise OperationError(f"{place}: {module} is not installed{hint}") from None
    except ImportError as broken:
        raise OperationError(f"{place}: the database driver can't be loaded: {broken}") from None
    except Exception as error:  # noqa: BLE001 - SQLAlchemyError, ValueError or TypeError
        raise ValueError(
            f"{scheme}://… is no database URL that can be used: {type(error).__name__}. Use for "
            "example postgresql+psycopg://…"
        ) from None

    file = engine.url.database or ""
    if engine.dialect.name == "sqlite" and not file.startswith("file:"):
        create_privately(file)

    def existing(connection: Connection) -> set[str]:
        has = inspect(connection).has_table
        return {table for table in tables if has(table, schema=schema or None)}

    try:
        try:
            async with engine.connect() as connection:
                found = await connection.run_sync(existing)
        except Exception as error:
            # Any: drivers raise ValueError or TypeError for an option of the URL that they don't
            # know.
            reason = store_problem(error) or type(getattr(error, "orig", None) or error).__name__
            raise StoreError(f"the cursor database {place} can't be reached: {reason}") from error
        yield engine, found
    finally:
        await engine.dispose()
