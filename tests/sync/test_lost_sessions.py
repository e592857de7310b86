"""PostgreSQL ends sessions anywhere in a transaction: nothing is lost, nothing twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import Any

import psycopg
import psycopg_pool
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from feedapi_client import (
    CommitOrderError,
    CursorStore,
    PostgresCursorStore,
    SQLAlchemyCursorStore,
    StoreError,
    SyncBatch,
)
from feedapi_client.testing import Publisher
from tests.consumer.helpers import fill
from tests.django import databases
from tests.postgres_pools import execute
from tests.servers import Postgres
from tests.sync.helpers import consume, ns

databases.set_up()

from asgiref.sync import async_to_sync  # noqa: E402
from django.db import Error, connections, transaction  # noqa: E402

from feedapi_client.django import DjangoCursorStore  # noqa: E402 - Django has its settings

pytestmark = pytest.mark.slow
EVENTS = 120
TABLES = ("feedapi_cursors", "feedapi_cursors_instances", "feedapi_cursors_leases", "effects")
Begin = Callable[[], AbstractContextManager[Any]]
Execute = Callable[[Any, str], object]


@contextmanager
def of_psycopg(server: Postgres) -> Iterator[tuple[CursorStore, Begin, Execute]]:
    # Without a check before each use, which would wait ever longer for each session that is gone.
    with psycopg_pool.ConnectionPool(server.dsn, min_size=2, max_size=8) as pool:
        yield PostgresCursorStore(pool), pool.connection, lambda each, sql: each.execute(sql)


@contextmanager
def of_sqlalchemy(server: Postgres) -> Iterator[tuple[CursorStore, Begin, Execute]]:
    engine = sa.create_engine(server.url(), pool_pre_ping=True)
    store = SQLAlchemyCursorStore(engine)
    yield store, engine.begin, lambda each, sql: each.execute(sa.text(sql))
    engine.dispose()


@contextmanager
def of_django(server: Postgres) -> Iterator[tuple[CursorStore, Begin, Execute]]:
    with databases.registered(databases.settings_of(server)) as using:
        store = DjangoCursorStore(using)

        @contextmanager
        def begin() -> Iterator[Any]:
            try:
                with transaction.atomic(using=using):
                    yield connections[using]
            finally:  # a thread of a handler ends without
                connections[using].close()

        yield store, begin, lambda _, sql: databases.execute(using, sql)
        async_to_sync(store.aclose)()


WAYS = {"psycopg": of_psycopg, "SQLAlchemy": of_sqlalchemy, "Django": of_django}


class Sessions:
    """Ends all sessions of the server but its own at drawn moments."""

    def __init__(self, dsn: str, random: Random) -> None:
        self._dsn = dsn
        self._random = random
        self._lock = threading.Lock()
        self._calls = 0
        self.ended: list[str] = []

    def maybe_end(self, when: str) -> None:
        with self._lock:
            self._calls += 1
            # Each moment once, and then at random.
            first = when not in self.ended and self._calls > 8
            if first or self._random.random() < 0.05:
                self.ended.append(when)
                execute(
                    self._dsn,
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'",
                )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_r05_each_event_has_one_effect(
    postgres: Postgres, wide: Publisher, way: str, threads: int
) -> None:
    execute(postgres.dsn, *(f"DROP TABLE IF EXISTS {name}" for name in TABLES))
    engine = sa.create_engine(postgres.url())
    SQLAlchemyCursorStore(engine).table.create(engine)
    engine.dispose()
    execute(postgres.dsn, "CREATE TABLE effects (n integer)")
    fill(wide, EVENTS, entities=12)
    sessions, starts = Sessions(postgres.dsn, Random(f"{way} {threads}")), 0

    with WAYS[way](postgres) as (store, begin, run):

        def handle(batch: SyncBatch) -> None:
            sessions.maybe_end("before it")
            with begin() as connection:
                for n in ns(batch):
                    run(connection, f"INSERT INTO effects VALUES ({n})")
                sessions.maybe_end("before the cursor")
                batch.commit(transaction=connection)
                sessions.maybe_end("behind the cursor")
            sessions.maybe_end("behind it")

        ended = False
        while not ended:
            starts += 1
            assert starts < 500
            try:
                with consume(
                    wide, store=store, follow=False, limit={"max_batch_events": 5}
                ) as consumer:
                    consumer.run(handle, threads=threads)
                ended = True
            except (StoreError, CommitOrderError, psycopg.Error, DBAPIError, Error):
                continue
    found = sorted(n for (n,) in execute(postgres.dsn, "SELECT n FROM effects"))
    assert found == list(range(EVENTS))
    assert starts > 1
    assert len(set(sessions.ended)) == 4
    execute(postgres.dsn, *(f"DROP TABLE IF EXISTS {name}" for name in TABLES))
