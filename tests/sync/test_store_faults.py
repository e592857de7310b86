"""A database that fails before or after its commit, at random: nothing is lost, nothing twice."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from random import Random
from typing import Any

import pytest

from feedapi_client import (
    CommitOrderError,
    FeedKey,
    Position,
    SQLiteCursorStore,
    StoreError,
    SyncBatch,
    SyncFeedConsumer,
)
from feedapi_client.testing import Publisher
from tests.consumer.helpers import fill
from tests.sync.helpers import consume, effects, ns, write

pytestmark = pytest.mark.usefixtures("nothing_is_left")
SMALL = {"max_batch_events": 7}


class DatabaseError(Exception):
    """The connection broke, at a moment that the drawn numbers say."""


class FaultyStore(SQLiteCursorStore):
    """Fails at a part of the operations, before them or after them."""

    def __init__(self, path: str, random: Random) -> None:
        super().__init__(path)
        self.faults: Counter[str] = Counter()
        self._random = random

    def fail(self, when: str, share: float = 0.15) -> None:
        if self._random.random() < share:
            self.faults[when] += 1
            raise DatabaseError(when)

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        self.fail("load")
        return await super().load(feed)

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        where = "own" if transaction is None else "caller's"
        self.fail(f"before {where} save")
        await super().save(feed, positions, transaction=transaction)
        self.fail(f"after {where} save")


class Program:
    """Consumes exactly once, and starts again when the database fails, as its supervisor would."""

    def __init__(self, publisher: Publisher, path: str, seed: int) -> None:
        self._publisher = publisher
        self._path = path
        self.store = FaultyStore(path, Random(seed))
        self.starts = 0

    def run(self, way: str) -> None:
        while True:
            self.starts += 1
            assert self.starts < 2000
            try:
                with consume(
                    self._publisher, store=self.store, follow=False, limit=SMALL
                ) as consumer:
                    self._consume(consumer, way)
            except (StoreError, DatabaseError, CommitOrderError):
                continue
            return

    def _consume(self, consumer: SyncFeedConsumer, way: str) -> None:
        if way == "batches":
            for batch in consumer.batches():
                self._handle(batch)
        else:
            consumer.run(self._handle, threads=3 if way == "threads" else 1)

    def _handle(self, batch: SyncBatch) -> None:
        with closing(sqlite3.connect(self._path, timeout=60)) as connection:
            with connection:
                write(connection, batch)
                batch.commit(transaction=connection)
                self.store.fail("the database's own commit")
            self.store.fail("the answer to that")


@pytest.mark.parametrize("way", ["batches", "run", "threads"])
@pytest.mark.parametrize("seed", [1, 2])
def test_each_event_has_one_effect(wide: Publisher, path: str, way: str, seed: int) -> None:
    fill(wide, 150, entities=12)
    program = Program(wide, path, seed)
    program.run(way)
    found = effects(path)
    assert sorted(found) == list(range(150))
    assert program.starts > 1
    assert len(program.store.faults) > 3
    with consume(wide, store=SQLiteCursorStore(path), follow=False) as consumer:
        assert ns(consumer) == []
