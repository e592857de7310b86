"""Exactly once into PostgreSQL: the handler's inserts and the cursor in one transaction.

16 partitions, batches of 100 events. The bare loop reads the same feed with httpx, and does the
same inserts and one UPDATE in a transaction for each page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import httpx
import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from feedapi_client import Batch, FeedConsumer, Limits, SQLAlchemyCursorStore
from tests.benchmarks.consume_loops import Line
from tests.benchmarks.results import Comparison, in_turns
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.static_feed import static_feed
from tests.servers import run_postgres

PARTITIONS = 16
BATCH = 100
BATCH_BYTES = 12_000
"""A batch takes no further page when it has so many bytes, and a page of 100 events has more."""
TABLES = (
    "DROP TABLE IF EXISTS bench_events, bench_bare, bench_cursors",
    "CREATE TABLE bench_events (partition INTEGER, payload TEXT)",
    "CREATE TABLE bench_bare (partition INTEGER PRIMARY KEY, cursor TEXT)",
)
INSERT = sa.text("INSERT INTO bench_events (partition, payload) VALUES (:partition, :payload)")
UPDATE = sa.text("UPDATE bench_bare SET cursor = :cursor WHERE partition = :partition")


async def _insert(connection: AsyncConnection, partition: int, payloads: list[bytes]) -> None:
    rows = [{"partition": partition, "payload": each.decode()} for each in payloads]
    await connection.execute(INSERT, rows)


async def ours(url: str, engine: AsyncEngine) -> None:
    """Consume with `run`; the cursor is saved in the handler's transaction."""
    store = SQLAlchemyCursorStore(engine, table="bench_cursors")
    await store.create_tables()
    limits = Limits(max_batch_bytes=BATCH_BYTES)
    async with FeedConsumer(url, store=store, follow=False, limits=limits) as consumer:

        async def handle(batch: Batch) -> None:
            async with engine.begin() as connection:
                if batch.events:
                    payloads = [event.raw for event in batch.events]
                    await _insert(connection, batch.partition, payloads)
                await batch.commit(transaction=connection)

        await consumer.run(handle, max_concurrency=PARTITIONS)


async def bare(url: str, engine: AsyncEngine) -> None:
    """Do the same with httpx and SQLAlchemy alone."""
    decoder = msgspec.json.Decoder(Line)

    async def consume(client: httpx.AsyncClient, partition: int) -> None:
        cursor = "_first"
        while True:
            params = {"token": "t", "partition": str(partition), "cursor": cursor}
            response = await client.get(f"{url}/events", params=params)
            lines = decoder.decode_lines(response.content)
            payloads = [bytes(line.data) for line in lines if line.cursor is None]
            if not payloads:
                return
            cursor = lines[-1].cursor or ""
            async with engine.begin() as connection:
                await _insert(connection, partition, payloads)
                await connection.execute(UPDATE, {"cursor": cursor, "partition": partition})

    async with engine.begin() as connection:
        rows = [{"partition": partition} for partition in range(PARTITIONS)]
        await connection.execute(
            sa.text("INSERT INTO bench_bare VALUES (:partition, '_first')"), rows
        )
    async with httpx.AsyncClient() as client:
        await asyncio.gather(*(consume(client, partition) for partition in range(PARTITIONS)))


async def _rate(
    loop: Callable[[str, AsyncEngine], Awaitable[None]], url: str, postgres: str, events: int
) -> float:
    """Return events per second of one loop, from an empty table."""
    engine = create_async_engine(postgres, pool_size=PARTITIONS, max_overflow=0)
    try:
        async with engine.begin() as connection:
            for statement in TABLES:
                await connection.execute(sa.text(statement))
        started = time.perf_counter()
        await loop(url, engine)
        seconds = time.perf_counter() - started
        async with engine.connect() as connection:
            found = await connection.scalar(sa.text("SELECT count(*) FROM bench_events"))
    finally:
        await engine.dispose()
    if found != events:
        raise RuntimeError(f"{found} rows for {events} events")
    return events / seconds


def measure(sizes: Sizes) -> list[Comparison]:
    """Compare events per second, the end of the feed included."""
    each = sizes.pick(10_000, 200)
    total = each * PARTITIONS
    server = nullcontext() if sizes.postgres else run_postgres()
    with (
        server as started,
        static_feed(
            partitions=PARTITIONS, events=each, page_size=BATCH, in_thread=sizes.quick
        ) as url,
    ):
        where = sizes.postgres or started.url("asyncpg")  # type: ignore[union-attr]
        pairs = in_turns(
            lambda: asyncio.run(_rate(ours, url, where, total)),
            lambda: asyncio.run(_rate(bare, url, where, total)),
            rounds=sizes.rounds,
            title="exactly once into PostgreSQL",
        )
    return [
        Comparison(
            name="exactly once into PostgreSQL, 16 partitions / the same with httpx alone",
            unit="events/s",
            ours=[mine for mine, _ in pairs],
            theirs=[other for _, other in pairs],
            bar=0.8,
        )
    ]
