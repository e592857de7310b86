"""Open the cursor store that ``--store`` names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import typer

from feedapi_client.cli.common.databases import (
    check_sqlite_file,
    is_redis_url,
    is_url,
    open_database,
    resolve_store,
    sqlite_tables,
    unusable,
)
from feedapi_client.cli.common.errors import CommandError
from feedapi_client.stores.base import AdministrableStore
from feedapi_client.stores.journal import Journal

TABLE = "feedapi_cursors"
_CONTENT = "cursors"


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
    if not create:
        check_sqlite_file(path, TABLE, _CONTENT)
    has_journal = f"{TABLE}_journal" in (sqlite_tables(path) or ())
    return SQLiteCursorStore(path, journal=journal or _kept(has_journal))


@asynccontextmanager
async def _sqlalchemy(
    url: str, create: bool, table: str, journal: Journal | None
) -> AsyncIterator[AdministrableStore]:
    async with open_database(url, table, _CONTENT, create=create) as found:
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
