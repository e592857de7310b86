"""Exactly once into PostgreSQL: the handler's inserts and the cursor in one transaction.

16 partitions, batches of 100 events, and each library that an application may write with. Each bare
loop reads the same feed with httpx, and does the same inserts and one UPDATE of its cursor in a
transaction for each page, with the same library.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import httpx
import msgspec
import psycopg

from feedapi_client import Batch, FeedConsumer, Limits, SyncBatch, SyncFeedConsumer
from tests.benchmarks.consume_loops import Line
from tests.benchmarks.exactly_once_ways import (
    AsyncWay,
    SyncWay,
    asyncpg_way,
    django_way,
    psycopg_way,
    sqlalchemy_way,
    sync_psycopg_way,
    sync_sqlalchemy_way,
)
from tests.benchmarks.results import Comparison, in_turns
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.static_feed import static_feed
from tests.servers import Postgres, run_postgres

PARTITIONS = 16
BATCH = 100
BATCH_BYTES = 12_000
"""A batch takes no further page when it has so many bytes, and a page of 100 events has more."""
TABLES = (
    "DROP TABLE IF EXISTS bench_events, bench_bare, feedapi_cursors",
    "CREATE TABLE bench_events (partition INTEGER, payload TEXT)",
    "CREATE TABLE bench_bare (partition INTEGER PRIMARY KEY, cursor TEXT)",
    "INSERT INTO bench_bare SELECT n, '_first' FROM generate_series(0, 15) AS n",
)
ASYNC: dict[str, Callable[[Postgres], AbstractAsyncContextManager[AsyncWay]]] = {
    "SQLAlchemy": sqlalchemy_way,
    "asyncpg": asyncpg_way,
    "psycopg": psycopg_way,
}
SYNC: dict[str, Callable[[Postgres], AbstractContextManager[SyncWay]]] = {
    "synchronous psycopg": sync_psycopg_way,
    "synchronous SQLAlchemy": sync_sqlalchemy_way,
    "Django": django_way,
}
_decoder = msgspec.json.Decoder(Line)


async def ours(url: str, way: AsyncWay) -> None:
    """Consume with `run`; the cursor is saved in the handler's transaction."""
    limits = Limits(max_batch_bytes=BATCH_BYTES)
    async with FeedConsumer(url, store=way.store, follow=False, limits=limits) as consumer:

        async def handle(batch: Batch) -> None:
            async with way.begin() as transaction:
                if batch.events:
                    payloads = [event.raw.decode() for event in batch.events]
                    await way.insert(transaction, batch.partition, payloads)
                await batch.commit(transaction=transaction)

        await consumer.run(handle, max_concurrency=PARTITIONS)


async def bare(url: str, way: AsyncWay) -> None:
    """Do the same with httpx and the library alone."""

    async def consume(client: httpx.AsyncClient, partition: int) -> None:
        cursor = "_first"
        while True:
            response = await client.get(f"{url}/events", params=_page(partition, cursor))
            payloads, cursor = _decoded(response.content)
            if not payloads:
                return
            async with way.begin() as transaction:
                await way.insert(transaction, partition, payloads)
                await way.update(transaction, partition, cursor)

    async with httpx.AsyncClient() as client:
        await asyncio.gather(*(consume(client, partition) for partition in range(PARTITIONS)))


def ours_in_threads(url: str, way: SyncWay) -> None:
    """Consume with `SyncFeedConsumer.run`, a thread for each partition."""
    limits = Limits(max_batch_bytes=BATCH_BYTES)
    with SyncFeedConsumer(url, store=way.store, follow=False, limits=limits) as consumer:

        def handle(batch: SyncBatch) -> None:
            with way.begin() as transaction:
                if batch.events:
                    payloads = [event.raw.decode() for event in batch.events]
                    way.insert(transaction, batch.partition, payloads)
                batch.commit(transaction=transaction)

        consumer.run(handle, threads=PARTITIONS)


def bare_in_threads(url: str, way: SyncWay) -> None:
    """Do the same with httpx and the library alone."""

    def consume(client: httpx.Client, partition: int) -> None:
        cursor = "_first"
        while True:
            response = client.get(f"{url}/events", params=_page(partition, cursor))
            payloads, cursor = _decoded(response.content)
            if not payloads:
                return
            with way.begin() as transaction:
                way.insert(transaction, partition, payloads)
                way.update(transaction, partition, cursor)

    with httpx.Client() as client, ThreadPoolExecutor(PARTITIONS) as threads:
        list(threads.map(partial(consume, client), range(PARTITIONS)))


def _page(partition: int, cursor: str) -> dict[str, str]:
    return {"token": "t", "partition": str(partition), "cursor": cursor}


def _decoded(content: bytes) -> tuple[list[str], str]:
    """Return the payloads of a page, and its last cursor."""
    lines = _decoder.decode_lines(content)
    payloads = [bytes(line.data).decode() for line in lines if line.cursor is None]
    return payloads, (lines[-1].cursor or "") if lines else ""


async def _seconds(
    loop: Callable[[str, AsyncWay], Awaitable[None]], url: str, name: str, server: Postgres
) -> float:
    async with ASYNC[name](server) as way:
        started = time.perf_counter()
        await loop(url, way)
        return time.perf_counter() - started


def _seconds_in_threads(
    loop: Callable[[str, SyncWay], None], url: str, name: str, server: Postgres
) -> float:
    with SYNC[name](server) as way:
        started = time.perf_counter()
        loop(url, way)
        return time.perf_counter() - started


def _rate(measured: Callable[[], float], server: Postgres, events: int) -> float:
    """Return events per second of one loop, from an empty table."""
    with psycopg.connect(server.dsn) as connection:
        for statement in TABLES:
            connection.execute(statement.encode())
        connection.commit()
        seconds = measured()
        row = connection.execute("SELECT count(*) FROM bench_events").fetchone()
    if row != (events,):
        raise RuntimeError(f"{row} rows for {events} events")
    return events / seconds


def _loops(url: str, name: str, server: Postgres) -> tuple[Callable[[], float], ...]:
    """Return what measures our loop and the bare one, in seconds."""
    if name in SYNC:
        return tuple(
            partial(_seconds_in_threads, loop, url, name, server)
            for loop in (ours_in_threads, bare_in_threads)
        )
    return tuple(partial(_run, partial(_seconds, loop, url, name, server)) for loop in (ours, bare))


def _run(measured: Callable[[], Coroutine[Any, Any, float]]) -> float:
    return asyncio.run(measured())


def measure(sizes: Sizes) -> list[Comparison]:
    """Compare events per second, the end of the feed included."""
    each = sizes.pick(10_000, 200)
    total = each * PARTITIONS
    results = []
    with ExitStack() as stack:
        if sizes.postgres:
            server = Postgres(sizes.postgres.partition("?host=")[2])
        else:
            server = stack.enter_context(run_postgres())
        feed = static_feed(
            partitions=PARTITIONS, events=each, page_size=BATCH, in_thread=sizes.quick
        )
        url = stack.enter_context(feed)
        for name in (*ASYNC, *SYNC):
            mine, other = _loops(url, name, server)
            pairs = in_turns(
                partial(_rate, mine, server, total),
                partial(_rate, other, server, total),
                rounds=sizes.rounds,
                title=f"exactly once into PostgreSQL, {name}",
            )
            results.append(
                Comparison(
                    name=f"exactly once into PostgreSQL, {name} / a bare loop",
                    unit="events/s",
                    ours=[rate for rate, _ in pairs],
                    theirs=[rate for _, rate in pairs],
                    bar=0.8,
                )
            )
    return results
