"""Databases that ``--store`` names, for cursors and for quarantined events."""

from __future__ import annotations

import importlib.util
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from feedapi_client.arguments import environment_value
from feedapi_client.causes import store_problem
from feedapi_client.cli.reporting import CommandError
from feedapi_client.errors import StoreError
from feedapi_client.stores.base import AdministrableStore
from feedapi_client.stores.journal import Journal

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from feedapi_client.quarantine import QuarantineStore

TABLE = "feedapi_cursors"
_QUARANTINE = "feedapi_quarantine"
_ENVIRONMENT = "env:"
_LEDGERS = ("liftbridge", "liftbridges")
_REDIS = ("redis", "rediss", "unix")
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
"""The extra of the package that brings the module of a driver."""


def resolve_store(spec: str) -> str:
    """Return the value of ``--store``; for ``env:NAME`` the value of that environment variable.

    Raises `typer.BadParameter` when the variable is not set, and for what can be no store.
    """
    if spec.startswith(_ENVIRONMENT):
        try:
            spec = environment_value(spec.removeprefix(_ENVIRONMENT), "--store")
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    if not spec.strip() or not spec.isprintable():
        raise typer.BadParameter("--store: this is neither a file nor a database URL")
    return spec


def is_url(spec: str) -> bool:
    """Whether ``--store`` is the URL of a database, not a file."""
    return "://" in spec


def is_redis_url(spec: str) -> bool:
    """Whether ``--store`` is the URL of a Redis server."""
    return is_url(spec) and spec.partition("://")[0] in _REDIS


def is_ledger_url(spec: str) -> bool:
    """Whether ``--store`` is a Liftbridge stream, in which a relay keeps its positions."""
    return is_url(spec) and spec.partition("://")[0] in _LEDGERS


def unusable(url: str) -> str:
    """Return what a message may show of a URL that can't be used: any part may be a password."""
    return f"{url.partition('://')[0]}://…"


def url_without_secrets(url: str) -> str:
    """Return the URL of a database without user, password and query, for messages.

    Any text will do. Only the scheme is left where a password may hold the `?` of the query.
    """
    scheme, _, rest = url.partition("://")
    before, at, address = rest.rpartition("@")
    if at and not set(before).isdisjoint("?#"):
        return f"{scheme}://…"
    return f"{scheme}://{address.partition('?')[0].partition('#')[0]}"


# ---------------------------------------------------------------------- SQLite files


def existing_tables(path: Path) -> set[str]:
    """Return the names of the tables in a database file that has to exist.

    Raises `CommandError` when there is no such file, so that a typo creates none, and `StoreError`
    when it is no database.
    """
    tables = sqlite_tables(path)
    if tables is None:
        raise CommandError(f"{path}: there is no such file")
    return tables


def sqlite_tables(path: Path) -> set[str] | None:
    """Return the names of the tables in a database file, None when there is no such file.

    Raises `StoreError` when the file is no database.
    """
    if not path.exists():
        return None
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            return {name for (name,) in rows}
        finally:
            connection.close()
    except (sqlite3.Error, UnicodeError) as error:
        raise StoreError(f"the cursor database {path} failed: {error}") from error


# ---------------------------------------------------------------------- SQLAlchemy URLs


@dataclass(frozen=True, slots=True)
class DatabaseTable:
    """A table in an open database."""

    engine: AsyncEngine
    schema: str | None
    name: str
    exists: bool
    has_journal: bool


@asynccontextmanager
async def open_database(
    url: str, table: str, *, create: bool = False
) -> AsyncIterator[DatabaseTable]:
    """Open the database of a SQLAlchemy URL, and close it at the end of the block.

    `table` is NAME or SCHEMA.NAME. Without `create` it has to exist.
    Raises `CommandError`, `StoreError` and `typer.BadParameter`.
    """
    if importlib.util.find_spec("sqlalchemy") is None:
        raise CommandError(f"SQLAlchemy is not installed{_hint(_driver(url), 'sql')}")
    if re.fullmatch(r"(\w+\.)?\w+", table) is None:
        raise typer.BadParameter("--table takes NAME or SCHEMA.NAME")
    schema, _, name = table.rpartition(".")
    engine = _create_engine(url)
    try:
        journal = f"{name}_journal"
        found = await _existing_tables(engine, schema or None, (name, journal))
        if not create and name not in found:
            raise CommandError(
                f"{url_without_secrets(url)}: the database holds no cursors (no table {table})"
            )
        yield DatabaseTable(engine, schema or None, name, name in found, journal in found)
    finally:
        await engine.dispose()


def _create_engine(url: str) -> AsyncEngine:
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.ext.asyncio import create_async_engine

    try:
        return create_async_engine(
            _with_async_driver(url), hide_parameters=True, pool_pre_ping=True
        )
    except ModuleNotFoundError as missing:
        raise CommandError(
            f"{url_without_secrets(url)}: the database driver is not installed "
            f"(no module {missing.name}){_hint(missing.name)}"
        ) from None
    except ImportError as broken:
        raise CommandError(_unloadable(url, broken)) from None
    except (SQLAlchemyError, ValueError, TypeError) as error:
        raise typer.BadParameter(
            f"--store: {unusable(url)} is no database URL that can be used: "
            f"{type(error).__name__}. Use for example postgresql+psycopg://…"
        ) from None


def _driver(url: str) -> str:
    """Return the name of the driver's module, "" where the URL names none that is known."""
    return _with_async_driver(url).partition("://")[0].partition("+")[2]


def _hint(module: str | None, otherwise: str = "") -> str:
    """Return how to install the module, for the end of a message; "" when that is not known."""
    extra = _EXTRAS.get((module or "").partition(".")[0], otherwise)
    return f": pip install 'feedapi-client[{extra}]'" if extra else ""


def _unloadable(url: str, error: ImportError) -> str:
    """Return the message for a driver that is installed, but can't be loaded."""
    return f"{url_without_secrets(url)}: the database driver can't be loaded: {error}"


def _with_async_driver(url: str) -> str:
    """Return the URL with an asynchronous driver, where it names no driver."""
    scheme, rest = url.split("://", 1)
    return f"{_DRIVERS.get(scheme, scheme)}://{rest}"


async def _existing_tables(
    engine: AsyncEngine, schema: str | None, names: tuple[str, ...]
) -> set[str]:
    import sqlalchemy as sa

    def look(connection: sa.Connection) -> set[str]:
        return {name for name in names if sa.inspect(connection).has_table(name, schema=schema)}

    try:
        async with engine.connect() as connection:
            return await connection.run_sync(look)
    except Exception as error:
        # Any: drivers raise ValueError or TypeError for an option of the URL that they don't know.
        original = getattr(error, "orig", None) or error
        raise StoreError(
            f"the cursor database {url_without_secrets(str(engine.url))} can't be reached: "
            f"{store_problem(error) or type(original).__name__}"
        ) from error


# ---------------------------------------------------------------------- cursor stores


@asynccontextmanager
async def open_store(
    spec: str, *, create: bool, table: str = TABLE, journal: Journal | None = None
) -> AsyncIterator[AdministrableStore]:
    """Open a cursor store, and close it at the end of the block.

    Without `create` the store has to exist, so that a typo creates none. A store that already has
    a journal keeps it up also without `journal`: a gap would make it useless.

    Raises `CommandError`, `StoreError` and `typer.BadParameter`.
    """
    spec = resolve_store(spec)
    if not is_url(spec):
        async with _sqlite(Path(spec), create, table, journal) as store:
            yield store
    elif is_ledger_url(spec):
        async with _ledger(spec, create) as store:
            yield store
    elif is_redis_url(spec):
        async with _redis(spec, table) as store:
            yield store
    else:
        async with _sqlalchemy(spec, create, table, journal) as store:
            yield store


def _sqlite(path: Path, create: bool, table: str, journal: Journal | None) -> Any:
    from feedapi_client.stores.sqlite import SQLiteCursorStore

    if table != TABLE:
        raise typer.BadParameter(
            f"--table: a file keeps its cursors in the table {TABLE}; "
            f"give a URL (sqlite+aiosqlite:///{path}) for another one"
        )
    if not create and TABLE not in existing_tables(path):
        raise CommandError(f"{path}: the database holds no cursors (no table {TABLE})")
    has_journal = f"{TABLE}_journal" in (sqlite_tables(path) or ())
    return SQLiteCursorStore(path, journal=journal or _kept(has_journal))


@asynccontextmanager
async def _sqlalchemy(
    url: str, create: bool, table: str, journal: Journal | None
) -> AsyncIterator[AdministrableStore]:
    async with open_database(url, table, create=create) as found:
        from feedapi_client.stores.sql import SQLAlchemyCursorStore

        store = SQLAlchemyCursorStore(
            found.engine,
            table=found.name,
            schema=found.schema,
            journal=journal or _kept(found.has_journal),
        )
        if create:
            await store.create_tables()
        yield store


def _kept(has_journal: bool) -> Journal | None:
    """A journal that is kept up, but from which nothing is deleted."""
    return Journal(keep=None) if has_journal else None


@asynccontextmanager
async def _ledger(url: str, create: bool) -> AsyncIterator[AdministrableStore]:
    """Open the positions in a Liftbridge stream, over the gRPC API."""
    try:
        from feedapi_client.liftbridge.ledger_url import open_ledger
    except ImportError as missing:
        raise CommandError(str(missing)) from None
    try:
        opened = open_ledger(url, create=create)
    except ValueError as error:
        raise typer.BadParameter(f"--store: {error}") from None
    async with opened as store:
        yield store


def is_gap(error: Exception) -> bool:
    """Whether positions can't be read because the retention of their stream removed some."""
    try:
        from feedapi_client.liftbridge.liftbridge_errors import StreamGapError
    except ImportError:
        return False
    return isinstance(error, StreamGapError)


def _redis(url: str, prefix: str) -> Any:
    try:
        from feedapi_client.stores.redis import RedisCursorStore
    except ImportError as missing:
        raise CommandError(str(missing)) from None
    try:
        return RedisCursorStore(url) if prefix == TABLE else RedisCursorStore(url, prefix=prefix)
    except (ValueError, TypeError):
        raise typer.BadParameter(
            f"--store: {unusable(url)} is no Redis URL that can be used. "
            "Use for example redis://localhost:6379/0"
        ) from None


# ---------------------------------------------------------------------- quarantine


@asynccontextmanager
async def open_quarantine_of(spec: str) -> AsyncIterator[QuarantineStore]:
    """Open the quarantine of ``--store``, a database that exists, and close it after the block.

    A database without the table is a `MemoryQuarantineStore`, which is empty: nothing was ever
    quarantined there. Raises `CommandError` and `StoreError`.
    """
    from feedapi_client.quarantine import MemoryQuarantineStore, SQLiteQuarantineStore

    spec = resolve_store(spec)
    if is_redis_url(spec):
        raise CommandError("--store: Redis holds no quarantine")
    if is_ledger_url(spec):
        raise CommandError(
            "--store: a stream holds no quarantine: give what the relay's --quarantine names"
        )
    if is_url(spec):
        async with open_database(spec, _QUARANTINE, create=True) as found:
            from feedapi_client.quarantine.sql_quarantine import SQLAlchemyQuarantineStore

            if found.exists:
                yield SQLAlchemyQuarantineStore(found.engine, table=found.name, schema=found.schema)
            else:
                yield MemoryQuarantineStore()
    elif _QUARANTINE in existing_tables(Path(spec)):
        yield SQLiteQuarantineStore(spec)
    else:
        yield MemoryQuarantineStore()
