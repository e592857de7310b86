"""An application that keeps its events and its cursors in one SQLite file, and its deployment."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from feedapi_client import FeedConsumer, SQLiteCursorStore
from feedapi_client.testing import Publisher
from tests.consumer.helpers import RETRY, limits, wait_until
from tests.deployments.proxy import Proxy, Routes, proxy
from tests.peers.go_publisher import GoPublisher

REQUESTS = 60
"""Requests that a phase of a deployment takes."""


AnyPublisher = Publisher | GoPublisher
Change = Callable[[Any], object]


def _publish(n: int, publisher: AnyPublisher) -> None:
    publisher.publish(f"e{n % 5}", {"entity": f"e{n % 5}", "n": n})


def port_of(publisher: AnyPublisher) -> int:
    """Return the port where a publisher is served."""
    assert publisher.url is not None
    return int(publisher.url.split(":")[2].split("/")[0])


@dataclass
class Deployment:
    """Two publishers with the same events behind one proxy, and a consumer that never ends."""

    old: AnyPublisher
    new: AnyPublisher
    proxy: Proxy
    file: Path
    published: int = 0
    lagging: AnyPublisher | None = None
    """A replica that does not know yet what is published and changed."""
    _missed: list[Change] = field(default_factory=list)

    async def both(self, requests: int = REQUESTS) -> None:
        """Let the publishers answer in turn, for a while in which more is published."""
        ports = (port_of(self.old), port_of(self.new))
        await self.phase(Routes(ports, ports), requests)

    async def only(self, publisher: AnyPublisher) -> None:
        """Let one publisher answer, until all that it has is consumed."""
        port = port_of(publisher)
        await self._route(Routes((port,), (port,)))
        self.publish(20)
        await self.consumed()

    async def phase(self, routes: Routes, requests: int = REQUESTS) -> None:
        """Change the routes, publish, and wait until that many requests came."""
        await self._route(routes)
        self.publish(20)
        before = self.proxy.requests()
        await wait_until(lambda: self.proxy.requests() >= before + requests)

    async def _route(self, routes: Routes) -> None:
        await anyio.to_thread.run_sync(self.proxy.route, routes)

    def publish(self, count: int) -> None:
        """Publish events to both publishers; a replica that lags gets them later."""
        for n in range(self.published, self.published + count):
            self.change(partial(_publish, n))
        self.published += count

    def change(self, change: Change) -> None:
        """Change both publishers in the same way; a replica that lags is changed later."""
        for publisher in (self.old, self.new):
            if publisher is not self.lagging:
                change(publisher)
        if self.lagging is not None:
            self._missed.append(change)

    def catch_up(self) -> None:
        """End the lag of a replica."""
        lagging, self.lagging = self.lagging, None
        assert lagging is not None
        for change in self._missed:
            change(lagging)
        self._missed.clear()

    async def consumed(self) -> None:
        """Wait until everything that was published is stored."""
        await wait_until(lambda: len(self.stored()) >= self.published)

    def stored(self) -> list[tuple[int, str]]:
        """Return number and entity of the stored events, in the order of their transactions."""
        with sqlite3.connect(self.file) as database:
            return database.execute("SELECT n, entity FROM effects ORDER BY rowid").fetchall()

    def check(self) -> None:
        """Nothing is lost, nothing is there twice, and each entity is in order."""
        rows = self.stored()
        assert sorted(n for n, _ in rows) == list(range(self.published))
        by_entity: dict[str, list[int]] = defaultdict(list)
        for n, entity in rows:
            by_entity[entity].append(n)
        assert all(numbers == sorted(numbers) for numbers in by_entity.values())


@asynccontextmanager
async def deployment(
    folder: Path, old: AnyPublisher, new: AnyPublisher, **options: Any
) -> AsyncIterator[Deployment]:
    """Run publishers, proxy and consumer. At the end the consumer still runs, and all is there."""
    file = folder / "application.db"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE effects (n INTEGER, entity TEXT)")
    async with old.serve(), new.serve(), anyio.create_task_group() as tasks:
        port = port_of(old)
        with proxy(Routes((port,), (port,))) as front:
            running = Deployment(old, new, front, file)
            tasks.start_soon(_consume, front.url, file, options)
            yield running
            await running.consumed()
            tasks.cancel_scope.cancel()
    running.check()


async def _consume(url: str, file: Path, options: dict[str, Any]) -> None:
    """Consume for ever. An error of the consumer fails the test."""
    database = sqlite3.connect(file, isolation_level=None)
    settings: dict[str, Any] = {"retry": RETRY, "limits": limits(request_timeout=5.0), **options}
    try:
        async with FeedConsumer(url, store=SQLiteCursorStore(file), **settings) as consumer:
            async for batch in consumer.batches():
                database.execute("BEGIN IMMEDIATE")
                values = [(event.json()["n"], event.json()["entity"]) for event in batch.events]
                database.executemany("INSERT INTO effects VALUES (?, ?)", values)
                await batch.commit(transaction=database)
                database.execute("COMMIT")
        raise AssertionError("the consumer ended")
    finally:
        database.close()
