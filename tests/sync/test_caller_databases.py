"""The caller's connection to a database server is used in the caller's thread alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg_pool import ConnectionPool
from sqlalchemy.orm import Session

from feedapi_client import PostgresCursorStore, SQLAlchemyCursorStore, SyncFeedConsumer
from feedapi_client.testing import Publisher
from tests.postgres_pools import execute
from tests.servers import Postgres

pytestmark = pytest.mark.slow
DROP = "DROP TABLE IF EXISTS feedapi_cursors, feedapi_journal, sync_effects"


@pytest.fixture
def clean(postgres: Postgres) -> Iterator[Postgres]:
    execute(postgres.dsn, DROP)
    execute(postgres.dsn, "CREATE TABLE sync_effects (n integer)")
    yield postgres
    execute(postgres.dsn, DROP)


def test_a_connection_of_psycopg(clean: Postgres, wide: Publisher) -> None:
    wide.extend(0, [{"n": n} for n in range(40)])
    used = set()

    class Noted(psycopg.Connection[Any]):
        def wait(self, *args: Any, **options: Any) -> Any:
            used.add(threading.get_ident())
            return super().wait(*args, **options)

    with ConnectionPool(clean.dsn, open=True) as pool:
        store = PostgresCursorStore(pool)
        asyncio.run(store.create_tables())
        with (
            SyncFeedConsumer(wide.url, store=store, follow=False) as consumer,
            Noted.connect(clean.dsn, autocommit=True) as connection,
        ):
            for batch in consumer.batches():
                with connection.transaction():
                    for event in batch:
                        n = event.json()["n"]
                        connection.execute("INSERT INTO sync_effects VALUES (%s)", [n])
                    batch.commit(transaction=connection)
            found = connection.execute("SELECT n FROM sync_effects ORDER BY n").fetchall()
        cursors = asyncio.run(store.load(consumer.key))
    assert found == [(n,) for n in range(40)]
    assert cursors.keys() == {0, 1, 2, 3}
    assert used == {threading.get_ident()}


def test_a_session_of_sqlalchemy(clean: Postgres, wide: Publisher) -> None:
    wide.extend(0, [{"n": n} for n in range(40)])
    pooled, engine, used = sa.create_engine(clean.url()), sa.create_engine(clean.url()), set()

    @sa.event.listens_for(engine, "before_cursor_execute")
    def note(*_: object) -> None:
        used.add(threading.get_ident())

    store = SQLAlchemyCursorStore(pooled)
    asyncio.run(store.create_tables())
    with (
        SyncFeedConsumer(wide.url, store=store, follow=False) as consumer,
        Session(engine) as session,
    ):
        for batch in consumer.batches():
            with session.begin():
                for event in batch:
                    insert = sa.text("INSERT INTO sync_effects VALUES (:n)")
                    session.execute(insert, {"n": event.json()["n"]})
                batch.commit(transaction=session)
        select = sa.text("SELECT n FROM sync_effects ORDER BY n")
        found = session.execute(select).scalars().all()
    assert found == list(range(40))
    assert asyncio.run(store.load(consumer.key)).keys() == {0, 1, 2, 3}
    assert used == {threading.get_ident()}
    for each in (pooled, engine):
        each.dispose()
