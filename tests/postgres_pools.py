"""The pools that an application may have of connections to PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import psycopg
import psycopg_pool

POOLS = ("psycopg", "psycopg in threads", "asyncpg", "a DSN")


def execute(dsn: str, *statements: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


@asynccontextmanager
async def opened(kind: str, dsn: str) -> AsyncIterator[Any]:
    """Open what the store takes."""
    if kind == "psycopg":
        async with psycopg_pool.AsyncConnectionPool(dsn, min_size=1, max_size=20) as pool:
            yield pool
    elif kind == "psycopg in threads":
        with psycopg_pool.ConnectionPool(dsn, min_size=1, max_size=20) as threads:
            yield threads
    elif kind == "asyncpg":
        async with asyncpg.create_pool(dsn, min_size=1, max_size=20) as pool:
            yield pool
    else:
        yield dsn
