"""The start of a feed of 32,768 partitions: discovery and the first save, beside bare calls."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import orjson

from feedapi_client import FeedClient, FeedKey, Position, SQLiteCursorStore
from feedapi_client.protocol import negotiation
from tests.benchmarks.results import Comparison, in_turns
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.static_feed import static_feed

KEY = FeedKey("https://service.example/feed")


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


async def _seconds_of(action: Awaitable[object]) -> float:
    started = time.perf_counter()
    await action
    return time.perf_counter() - started


async def _body(url: str) -> bytes:
    async with httpx.AsyncClient() as client:
        return (await client.get(url)).content


async def _discover(url: str) -> float:
    negotiation._without_fields.cache_clear()  # as the first discovery of a process finds it
    async with FeedClient(url) as client:
        return await _seconds_of(client.discover())


async def _discover_again(url: str) -> float:
    async with FeedClient(url) as client:
        await client.discover()
        return await _seconds_of(client.discover())


async def _bare_discover(url: str) -> float:
    async with httpx.AsyncClient() as client:
        started = time.perf_counter()
        orjson.loads((await client.get(url)).content)
        return time.perf_counter() - started


async def _save(positions: dict[int, Position]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        async with SQLiteCursorStore(f"{folder}/cursors.db") as store:
            await store.load(KEY)  # which creates the table
            return await _seconds_of(store.save(KEY, positions))


def _bare_save(positions: dict[int, Position]) -> float:
    """One transaction of `executemany`, which compares no revision."""
    with tempfile.TemporaryDirectory() as folder:
        connection = sqlite3.connect(Path(folder) / "cursors.db")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "CREATE TABLE cursors (feed TEXT, partition INTEGER, cursor TEXT, status TEXT,"
            " revision INTEGER, PRIMARY KEY (feed, partition))"
        )
        started = time.perf_counter()
        rows = [(KEY.id, n, p.cursor, p.status, p.revision) for n, p in positions.items()]
        connection.executemany("INSERT INTO cursors VALUES (?, ?, ?, ?, ?)", rows)
        connection.commit()
        seconds = time.perf_counter() - started
        connection.close()
    return seconds


def _comparison(
    sizes: Sizes,
    name: str,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    bar: float | None = None,
) -> Comparison:
    pairs = in_turns(ours, theirs, rounds=sizes.rounds, title=name)
    return Comparison(
        name=name,
        unit="ms",
        ours=[mine * 1e3 for mine, _ in pairs],
        theirs=[other * 1e3 for _, other in pairs],
        bar=bar,
        less_is_better=True,
    )


def measure(sizes: Sizes) -> list[Comparison]:
    """Compare the discovery with parsing its JSON, and the first save with a bare `executemany`."""
    partitions = sizes.pick(32768, 256)
    positions = {n: Position(f"a-cursor-of-usual-length-{n:010d}") for n in range(partitions)}
    with static_feed(partitions=partitions, events=1, page_size=1, in_thread=sizes.quick) as url:
        body = asyncio.run(_body(url))
        return [
            _comparison(
                sizes,
                f"discovery of {partitions:,} partitions, validated / orjson.loads of it",
                lambda: _seconds(lambda: negotiation.negotiate(200, body, feed=url)),
                lambda: _seconds(lambda: orjson.loads(body)),
            ),
            _comparison(
                sizes,
                f"FeedClient.discover(), {partitions:,} partitions / httpx + orjson.loads",
                lambda: asyncio.run(_discover(url)),
                lambda: asyncio.run(_bare_discover(url)),
                bar=2.0,
            ),
            _comparison(
                sizes,
                "discover() again, when nothing has changed / httpx + orjson.loads",
                lambda: asyncio.run(_discover_again(url)),
                lambda: asyncio.run(_bare_discover(url)),
                bar=2.0,
            ),
            _comparison(
                sizes,
                f"first save of {partitions:,} positions, SQLite / executemany",
                lambda: asyncio.run(_save(positions)),
                lambda: _bare_save(positions),
            ),
        ]
