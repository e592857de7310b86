"""The cursor store that ``--store`` names."""

from __future__ import annotations

import importlib.util
import os
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer

from feedapi_client.cli.common.errors import CommandError
from feedapi_client.errors import StoreError
from feedapi_client.stores.base import AdministrableStore
from feedapi_client.stores.journal import Journal

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

TABLE = "feedapi_cursors"
_ENVIRONMENT = "env:"
_REDIS = ("redis", "rediss", "unix")
# SQLAlchemy would take a driver that is not asynchronous.
_DRIVERS = {
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "mysql": "mysql+asyncmy",
    "mariadb": "mariadb+asyncmy",
}


@asynccontextmanager
async def open_store(
    spec: str, *, create: bool, table: str = TABLE, journal: Journal | None = None
) -> AsyncIterator[AdministrableStore]:
    """The store, closed at the end of the block. Without `create` it has to exist already, so that a slip of the pen makes no new one.

    With or without `journal` the positions that are replaced are kept where a journal has been begun: a gap would spoil it.
    Raises `CommandError` and `StoreError`.
    """
    spec = resolved(spec)
    scheme = spec.partition("://")[0] if "://" in spec else ""
    if not scheme:
        store = _sqlite(Path(spec), create, table, journal)
        async with store:
            yield store
    elif scheme in _REDIS:
        async with _redis(spec, table) as store:
            yield store
    else:
        async with _sqlalchemy(spec, create, table, journal) as store:
            yield store


def resolved(spec: str) -> str:
    """The store's name, out of the environment where ``env:NAME`` says so."""
    if not spec.startswith(_ENVIRONMENT):
        return spec
    variable = spec.removeprefix(_ENVIRONMENT)
    value = os.environ.get(variable, "")
    if not value:
        raise typer.BadParameter(f"--store: the environment variable {variable} is not set")
    return value


def _sqlite(path: Path, create: bool, table: str, journal: Journal | None) -> Any:
    from feedapi_client.stores.sqlite import SQLiteCursorStore

    if table != TABLE:
        raise typer.BadParameter(
            f"--table: a file keeps its cursors in the table {TABLE}; give a URL (sqlite+aiosqlite:///{path}) for another one"
        )
    if not create:
        check_file(path, TABLE, "cursors")
    tables = _tables(path)
    kept = Journal(keep=None) if f"{TABLE}_journal" in (tables or ()) else None
    return SQLiteCursorStore(path, journal=journal or kept)


def check_file(path: Path, table: str, what: str) -> None:
    """Raise `CommandError` unless there is a database file that holds the table: a slip of the pen makes neither."""
    tables = _tables(path)
    if tables is None:
        raise CommandError(f"{path}: there is no such file")
    if table not in tables:
        raise CommandError(f"{path}: the database holds no {what} (no table {table})")


def _tables(path: Path) -> set[str] | None:
    """The tables of a database file; None when there is no file."""
    if not path.exists():
        return None
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            return {
                name
                for (name,) in connection.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table'"
                )
            }
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise StoreError(f"the cursor database {path} failed: {error}") from error


@asynccontextmanager
async def _sqlalchemy(
    url: str, create: bool, table: str, journal: Journal | None
) -> AsyncIterator[AdministrableStore]:
    async with database(url, table, "cursors", create=create) as (engine, schema, name, journalled):
        from feedapi_client.stores.sql import SQLAlchemyCursorStore

        kept = Journal(keep=None) if journalled else None
        store = SQLAlchemyCursorStore(engine, table=name, schema=schema, journal=journal or kept)
        if create:
            await store.create_tables()
        yield store


@asynccontextmanager
async def database(
    url: str, table: str, what: str, *, create: bool = False
) -> AsyncIterator[tuple[AsyncEngine, str | None, str, bool]]:
    """An engine, the schema (or None) and the name of the table, and whether it has a journal. Without `create` the table has to be there."""
    if importlib.util.find_spec("sqlalchemy") is None:
        raise CommandError("SQLAlchemy is not installed: pip install 'feedapi-client[sql]'")
    if re.fullmatch(r"(\w+\.)?\w+", table) is None:
        raise typer.BadParameter("--table takes NAME or SCHEMA.NAME")
    schema, _, name = table.rpartition(".")
    engine = _engine(url)
    try:
        tables = await _database_tables(engine, schema or None, name)
        if not create and name not in tables:
            raise CommandError(f"{shown(url)}: the database holds no {what} (no table {table})")
        yield engine, schema or None, name, f"{name}_journal" in tables
    finally:
        await engine.dispose()


def _engine(url: str) -> AsyncEngine:
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.ext.asyncio import create_async_engine

    try:
        return create_async_engine(_asynchronous(url), hide_parameters=True)
    except ModuleNotFoundError as missing:
        raise CommandError(
            f"{shown(url)}: the database driver is not installed (no module {missing.name})"
        ) from None
    except (SQLAlchemyError, ValueError) as error:
        raise CommandError(
            f"{shown(url)}: this is no database URL that can be used: {type(error).__name__}. Use for example postgresql+psycopg://…"
        ) from None


def _asynchronous(url: str) -> str:
    """The URL with an asynchronous driver where it names none."""
    scheme, rest = url.split("://", 1)
    return f"{_DRIVERS.get(scheme, scheme)}://{rest}"


async def _database_tables(engine: AsyncEngine, schema: str | None, table: str) -> set[str]:
    import sqlalchemy as sa
    from sqlalchemy.exc import SQLAlchemyError

    try:
        async with engine.connect() as connection:
            found = await connection.run_sync(
                lambda sync: [
                    name
                    for name in (table, f"{table}_journal")
                    if sa.inspect(sync).has_table(name, schema=schema)
                ]
            )
    except (SQLAlchemyError, OSError) as error:
        foreign = getattr(error, "orig", None) or error
        raise StoreError(
            f"the cursor database {shown(str(engine.url))} can't be reached: {type(foreign).__name__}"
        ) from error
    return set(found)


def _redis(url: str, prefix: str) -> Any:
    try:
        from feedapi_client.stores.redis import RedisCursorStore
    except ImportError as missing:
        raise CommandError(str(missing)) from None
    try:
        return RedisCursorStore(url) if prefix == TABLE else RedisCursorStore(url, prefix=prefix)
    except ValueError:
        raise CommandError(
            f"{shown(url)}: this is no Redis URL that can be used. Use for example redis://localhost:6379/0"
        ) from None


def shown(url: str) -> str:
    """The URL of a database without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
