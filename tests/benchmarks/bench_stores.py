"""Commits per second of each cursor store: ``python -m tests.benchmarks.bench_stores``.

Starts its own servers: PostgreSQL, Redis, and MariaDB where it is installed. The columns:

- `commits`: one consumer that saves one position after the other, as a handler of one partition.
- `concurrent`: 16 tasks, each with a partition of its own.
- `journal`: `commits` with a cursor journal.
- `in transaction`: a save and one effect in the caller's transaction.
- `effect alone`: the same transaction without the save.
- the last three: one save or load of all 32,767 partitions.
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from feedapi_client import FeedKey, Position
from feedapi_client.stores import (
    CursorStore,
    Journal,
    MemoryCursorStore,
    RedisCursorStore,
    SQLAlchemyCursorStore,
    SQLiteCursorStore,
)
from tests import components
from tests.servers import run_mariadb, run_postgres, run_redis

PARTITIONS = 32_767
TASKS = 16
EFFECT = "INSERT INTO effects (n) VALUES (1)"

Step = Callable[[Position], Awaitable[None]]


@dataclass
class Subject:
    """A store to measure, and what else its database can do."""

    name: str
    store: CursorStore
    journalled: CursorStore | None = None
    transaction: Callable[[FeedKey, Position | None], Awaitable[None]] | None = None


async def per_second(step: Step, seconds: float) -> float:
    position, count = Position("first"), 0
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        await step(position)
        position = position.advance(f"a-cursor-of-usual-length-{count:010d}")
        count += 1
    return count / elapsed


def key(name: str) -> FeedKey:
    return FeedKey("https://service.example/feed", name)


async def sequential(store: CursorStore, name: str, seconds: float) -> float:
    return await per_second(lambda position: store.save(key(name), {0: position}), seconds)


async def concurrent(store: CursorStore, seconds: float) -> float:
    rates: list[float] = []

    async def consume(partition: int) -> None:
        rates.append(
            await per_second(
                lambda position: store.save(key("concurrent"), {partition: position}), seconds
            )
        )

    async with anyio.create_task_group() as group:
        for partition in range(TASKS):
            group.start_soon(consume, partition)
    return sum(rates)


async def milliseconds(action: Awaitable[Any]) -> float:
    started = time.perf_counter()
    await action
    return (time.perf_counter() - started) * 1000


async def measure(subject: Subject, seconds: float) -> list[str]:
    store, transaction = subject.store, subject.transaction
    rates: list[float | None] = [
        await sequential(store, "sequential", seconds),
        await concurrent(store, seconds),
        await sequential(subject.journalled, "journal", seconds) if subject.journalled else None,
        await per_second(lambda position: transaction(key("transaction"), position), seconds)
        if transaction
        else None,
        await per_second(lambda _: transaction(key("transaction"), None), seconds)
        if transaction
        else None,
    ]
    first = {
        partition: Position(f"a-cursor-of-usual-length-{partition:010d}")
        for partition in range(PARTITIONS)
    }
    later = {
        partition: position.advance(f"{position.cursor}-later")
        for partition, position in first.items()
    }
    costs = [
        await milliseconds(store.save(key("all"), first)),
        await milliseconds(store.save(key("all"), later)),
        await milliseconds(store.load(key("all"))),
    ]
    return [
        subject.name,
        *("-" if rate is None else f"{rate:,.0f}" for rate in rates),
        *(f"{cost:,.0f} ms" for cost in costs),
    ]


@asynccontextmanager
async def memory() -> AsyncIterator[Subject]:
    yield Subject("memory", MemoryCursorStore())


@asynccontextmanager
async def sqlite(directory: str) -> AsyncIterator[Subject]:
    path = f"{directory}/cursors.db"
    async with (
        SQLiteCursorStore(path) as store,
        SQLiteCursorStore(path, journal=Journal()) as journalled,
    ):
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE effects (n INTEGER)")

        async def transaction(feed: FeedKey, position: Position | None) -> None:
            connection.execute(EFFECT)
            if position is not None:
                await store.save(feed, {0: position}, transaction=connection)
            connection.commit()

        yield Subject("sqlite", store, journalled, transaction)
        connection.close()


@asynccontextmanager
async def sql(name: str, url: str) -> AsyncIterator[Subject]:
    engine: AsyncEngine = create_async_engine(url)
    store = SQLAlchemyCursorStore(engine, table=f"cursors_{name.replace(' ', '_')}")
    journalled = SQLAlchemyCursorStore(
        engine, table=f"cursors_{name.replace(' ', '_')}", journal=Journal()
    )
    await journalled.create_tables()
    async with engine.begin() as connection:
        await connection.execute(sa.text("CREATE TABLE IF NOT EXISTS effects (n INTEGER)"))

    async def transaction(feed: FeedKey, position: Position | None) -> None:
        async with engine.begin() as connection:
            await connection.execute(sa.text(EFFECT))
            if position is not None:
                await store.save(feed, {0: position}, transaction=connection)

    yield Subject(f"sql {name}", store, journalled, transaction)
    await engine.dispose()


@asynccontextmanager
async def redis(url: str) -> AsyncIterator[Subject]:
    async with RedisCursorStore(url) as store:
        yield Subject("redis", store)


async def rows(seconds: float, servers: ExitStack) -> list[list[str]]:
    directory = servers.enter_context(tempfile.TemporaryDirectory())
    postgres, redis_server = (
        servers.enter_context(run_postgres()),
        servers.enter_context(run_redis()),
    )
    subjects = [
        memory(),
        sqlite(directory),
        sql("aiosqlite", f"sqlite+aiosqlite:///{directory}/sqlalchemy.db"),
        sql("psycopg", postgres.url("psycopg")),
        sql("asyncpg", postgres.url("asyncpg")),
        redis(redis_server.url),
    ]
    if components.available("mariadb"):
        subjects.append(sql("asyncmy", servers.enter_context(run_mariadb()).url()))
    found = []
    for subject in subjects:
        async with AsyncExitStack() as stack:
            found.append(await measure(await stack.enter_async_context(subject), seconds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each rate is measured")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    heads = [
        "store",
        "commits/s",
        "concurrent",
        "journal",
        "in transaction",
        "effect alone",
        f"first save of {PARTITIONS:,}",
        "next save of all",
        "load",
    ]
    with ExitStack() as servers:
        table = [heads, *anyio.run(rows, arguments.seconds, servers)]
    widths = [max(len(row[column]) for row in table) for column in range(len(heads))]
    for row in table:
        print(
            "  ".join(
                cell.ljust(width) if not column else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )


if __name__ == "__main__":
    main()
