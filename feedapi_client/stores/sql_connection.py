"""Properties of SQLAlchemy's connections, transactions and errors, for the SQL stores."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey

# Serialization failures and deadlocks: SQLSTATEs of PostgreSQL and SQL Server, numbers of MySQL
# and MariaDB.
_CONFLICTS = ("40001", "40P01", 1213, 1020)


async def connection_of(transaction: Any, feed: FeedKey | None = None) -> AsyncConnection:
    """Return the connection of the caller's `AsyncConnection` or `AsyncSession`.

    Raises:
        StoreError: it is neither.
    """
    if isinstance(transaction, (AsyncSession, async_scoped_session)):
        transaction = await transaction.connection()
    if not isinstance(transaction, AsyncConnection):
        raise StoreError(
            "transaction must be an AsyncConnection or an AsyncSession, "
            f"not a {type(transaction).__name__}",
            feed=None if feed is None else feed.url,
        )
    return transaction


async def is_autocommit(connection: AsyncConnection) -> bool:
    """Return whether the database commits each statement, so that nothing can be rolled back.

    Asks the driver, which costs no round trip.
    """
    if connection.sync_connection is None:
        return False
    pooled = connection.sync_connection.connection
    if pooled.dbapi_connection is None:
        return False
    try:
        autocommit = connection.dialect.detect_autocommit_setting(pooled.dbapi_connection)
    except NotImplementedError:
        return False  # a dialect that can't say
    if autocommit and connection.dialect.name == "sqlite":
        # SQLAlchemy's recipe for savepoints in SQLite switches the driver to autocommit and emits
        # BEGIN when a transaction begins, which is at the latest with this statement.
        await connection.execute(sa.select(sa.literal(1)))
        return not getattr(pooled.driver_connection, "in_transaction", True)
    return autocommit


def is_conflict(error: Exception) -> bool:
    """Return whether another transaction caused the error."""
    if isinstance(error, IntegrityError):
        return True
    cause = getattr(error, "orig", None)
    codes = (getattr(cause, "sqlstate", None), *getattr(cause, "args", ())[:1])
    return any(code in _CONFLICTS for code in codes)


def database_message(engine: AsyncEngine, error: BaseException) -> str:
    """Return the first line of the database's own message.

    It holds neither the statement and its parameters, which may be payloads, nor the password.
    """
    foreign = getattr(error, "orig", None) or error
    text = next(iter(str(foreign).strip().splitlines()), "") or type(foreign).__name__
    password = engine.url.password
    return text.replace(str(password), "***") if password else text
