"""Cursors in Django's own transaction, in the thread that opened it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections, transaction
from django.db.backends.signals import connection_created
from django.db.transaction import TransactionManagementError
from django.utils.connection import ConnectionProxy

from feedapi_client import FeedConsumer, FeedKey, StoreError, SyncFeedConsumer
from feedapi_client.testing import Publisher
from feedapi_client.testing.contracts import advanced, opening
from tests.django.databases import SERVERS, created, execute, registered, set_up

set_up()

from feedapi_client.django import DjangoCursorStore  # noqa: E402 - Django has its settings

pytestmark = pytest.mark.slow
INSERT = "INSERT INTO effects VALUES (%s)"


@pytest.fixture(params=SERVERS)
def using(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    for using in created(request.param, request, tmp_path):
        execute(using, "CREATE TABLE effects (n integer)")
        yield using


@pytest.fixture
def store(using: str) -> Iterator[DjangoCursorStore]:
    store = DjangoCursorStore(using)
    yield store
    asyncio.run(store.aclose())


@pytest.fixture
def feed() -> Iterator[Publisher]:
    publisher = Publisher(2, page_size=5, checkpoint_every=5)
    publisher.extend(0, [{"n": n} for n in range(20)])
    with publisher.serve():
        yield publisher


class UndoneError(Exception):
    """Rolls a block back."""


def opened(feed: Publisher, store: DjangoCursorStore) -> SyncFeedConsumer[Any]:
    assert feed.url is not None
    return SyncFeedConsumer(feed.url, store=store, follow=False)


def insert(using: str, batch: Any) -> None:
    with connections[using].cursor() as cursor:
        cursor.executemany(INSERT, [(event.json()["n"],) for event in batch])


def effects(using: str) -> list[int]:
    return [row[0] for row in execute(using, "SELECT n FROM effects ORDER BY n")]


def test_r05_cursor_and_effects_stand_or_fall_together(
    using: str, store: DjangoCursorStore, feed: Publisher
) -> None:
    told: list[str] = []
    with opened(feed, store) as consumer:
        for batch in consumer.batches():
            stored = asyncio.run(store.load(consumer.key))
            before = effects(using)
            with pytest.raises(UndoneError), transaction.atomic(using=using):  # noqa: PT012
                insert(using, batch)
                transaction.on_commit(lambda: told.append("undone"), using=using)
                batch.commit(transaction=connections[using])
                raise UndoneError
            assert (effects(using), asyncio.run(store.load(consumer.key))) == (before, stored)
            with transaction.atomic(using=using, durable=True):
                insert(using, batch)
                transaction.on_commit(
                    lambda cursor=batch.cursor: told.append(
                        "stored" if cursor in cursors(store, consumer) else "too early"
                    ),
                    using=using,
                )
                with transaction.atomic(using=using):
                    batch.commit(transaction=connections[using])
    assert effects(using) == list(range(20))
    assert set(told) == {"stored"}


def cursors(store: DjangoCursorStore, consumer: Any) -> set[str]:
    return {position.cursor for position in asyncio.run(store.load(consumer.key)).values()}


def test_without_an_atomic_block_a_commit_is_refused(
    using: str, store: DjangoCursorStore, feed: Publisher
) -> None:
    with opened(feed, store) as consumer:
        batch = next(consumer.batches())
        before = asyncio.run(store.load(consumer.key))
        with pytest.raises(StoreError, match="no atomic block is open on") as refused:
            batch.commit(transaction=connections[using])
        assert refused.value.feed == consumer.feed
        assert asyncio.run(store.load(consumer.key)) == before


@pytest.mark.parametrize("way", ["events", "batches", "run", "run_by_key"])
def test_a_save_of_the_consumers_own_in_the_block_of_a_request_is_refused(
    using: str, store: DjangoCursorStore, feed: Publisher, way: str
) -> None:
    """As in a view with ``ATOMIC_REQUESTS``: effects would be rolled back, the cursor not."""

    def consume(consumer: SyncFeedConsumer[Any]) -> None:
        if way == "events":
            for event in consumer:
                execute(using, f"INSERT INTO effects VALUES ({event.json()['n']})")
        elif way == "batches":
            next(consumer.batches()).commit()
        elif way == "run":
            consumer.run(lambda batch: insert(using, batch))
        else:
            consumer.run_by_key(lambda _: None, key=lambda event: event.json()["n"], threads=1)

    with opened(feed, store) as consumer:
        with (
            pytest.raises(StoreError, match="an atomic block is open on"),
            transaction.atomic(using=using),
        ):
            consume(consumer)
        assert asyncio.run(store.load(consumer.key))[0].cursor == "_first"  # 1 has no events
    assert effects(using) == []


def test_r05_one_block_may_hold_several_batches(
    using: str, store: DjangoCursorStore, feed: Publisher
) -> None:
    """A view with ``ATOMIC_REQUESTS`` that reads to the end: all of it, or nothing."""

    def handle(batch: Any) -> None:
        with transaction.atomic(using=using):
            insert(using, batch)
            batch.commit(transaction=connections[using])

    def view() -> None:
        with transaction.atomic(using=using), opened(feed, store) as consumer:
            consumer.run(handle)
            if not failed:
                failed.append(True)
                raise UndoneError

    failed: list[bool] = []
    with pytest.raises(UndoneError):
        view()
    assert effects(using) == []
    view()
    assert effects(using) == list(range(20))


def test_a_commit_of_async_to_sync_beside_an_open_block_is_refused(
    using: str, store: DjangoCursorStore, feed: Publisher
) -> None:
    def handle(batch: Any) -> None:
        with transaction.atomic(using=using):
            insert(using, batch)
            async_to_sync(batch.commit)()

    async def consume() -> dict[int, str]:
        assert feed.url is not None
        async with FeedConsumer(feed.url, store=store, follow=False) as consumer:
            with pytest.raises(StoreError, match="an atomic block is open on"):
                await consumer.run(sync_to_async(handle))
            stored = await store.load(consumer.key)
        await sync_to_async(connections.close_all)()
        return {partition: position.cursor for partition, position in stored.items()}

    assert asyncio.run(consume()) == {0: "_first", 1: "_first"}
    assert effects(using) == []


@pytest.mark.parametrize("whole", [False, True], ids=["by itself", "in async_to_sync"])
def test_commits_of_async_code_do_not_wait_for_a_thread_that_is_busy(
    using: str, store: DjangoCursorStore, feed: Publisher, whole: bool
) -> None:
    """A handler of synchronous code works for long in the one thread that there is for it."""
    release, saved = threading.Event(), threading.Event()

    async def consume() -> None:
        assert feed.url is not None
        async with FeedConsumer(feed.url, store=store, follow=False) as consumer:
            batches = consumer.batches()
            batch = await anext(batches)
            busy = asyncio.create_task(sync_to_async(release.wait)())
            await batch.commit()
            saved.set()
            release.set()
            await busy
        await sync_to_async(connections.close_all)()

    try:
        async_to_sync(consume)() if whole else asyncio.run(consume())
    finally:
        release.set()
    assert saved.is_set()


def test_a_transaction_of_another_database_is_refused(
    using: str, store: DjangoCursorStore, feed: Publisher, tmp_path: Path
) -> None:
    other = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "other.db")}
    with registered(other, "other") as alias, opened(feed, store) as consumer:
        batch = next(consumer.batches())
        with (
            pytest.raises(StoreError, match="the transaction is on the database 'other'"),
            transaction.atomic(using=alias),
        ):
            batch.commit(transaction=connections[alias])


def test_the_statements_run_in_the_thread_of_the_block(
    using: str, store: DjangoCursorStore, feed: Publisher
) -> None:
    used: set[int] = set()

    def note(execute: Any, sql: str, *rest: Any) -> Any:
        if "feedapi_cursors" in sql:
            used.add(threading.get_ident())
        return execute(sql, *rest)

    with opened(feed, store) as consumer:
        batch = next(consumer.batches())
        with connections[using].execute_wrapper(note), transaction.atomic(using=using):
            batch.commit(transaction=connections[using])
    assert used == {threading.get_ident()}


def test_after_an_error_of_the_database_the_block_can_only_be_rolled_back(
    using: str, store: DjangoCursorStore, feed: Publisher
) -> None:
    """PostgreSQL would answer a COMMIT without an error, and roll back."""
    told: list[str] = []
    with opened(feed, store) as consumer:
        batch = next(consumer.batches())
        execute(using, "ALTER TABLE feedapi_cursors RENAME TO gone")
        with transaction.atomic(using=using):
            transaction.on_commit(lambda: told.append("committed"), using=using)
            with pytest.raises(StoreError, match=r"manage\.py migrate"):
                batch.commit(transaction=connections[using])
            with pytest.raises(TransactionManagementError):
                insert(using, batch)
        execute(using, "ALTER TABLE gone RENAME TO feedapi_cursors")
    assert (told, effects(using)) == ([], [])


def test_r20_a_save_that_is_cancelled_natively_is_not_made_later(
    using: str, store: DjangoCursorStore
) -> None:
    key, made = FeedKey("https://service.test/feed"), SimpleQueue[Any]()

    def note(connection: Any, **_: object) -> None:
        made.put(connection)

    async def cancelled() -> Any:
        saving = asyncio.ensure_future(store.save(key, advanced(opening())))
        connection = await asyncio.to_thread(made.get, timeout=60)
        saving.cancel()
        await asyncio.wait([saving])
        assert saving.cancelled()
        return connection

    asyncio.run(store.save(key, opening()))
    with transaction.atomic(using):
        execute(using, "UPDATE feedapi_cursors SET status = status")
        connection_created.connect(note)
        connection = asyncio.run(cancelled())
        connection_created.disconnect(note)
    while connection.connection is not None:
        time.sleep(0.01)
    assert asyncio.run(store.load(key)) == opening()


def test_r05_handlers_in_the_thread_of_synchronous_code(
    using: str, store: DjangoCursorStore, feed: Publisher
) -> None:
    """`FeedConsumer`, with `sync_to_async` and `async_to_sync`."""

    def handle(batch: Any) -> None:
        with transaction.atomic(using=using):
            insert(using, batch)
            async_to_sync(batch.commit)(transaction=connections[using])

    async def consume() -> None:
        assert feed.url is not None
        async with FeedConsumer(feed.url, store=store, follow=False) as consumer:
            await consumer.run(sync_to_async(handle))
        await sync_to_async(connections.close_all)()

    asyncio.run(consume())
    assert effects(using) == list(range(20))


def test_a_commit_from_async_code_says_that_there_is_no_block(
    using: str, store: DjangoCursorStore, feed: Publisher
) -> None:
    async def consume() -> None:
        assert feed.url is not None
        async with FeedConsumer(feed.url, store=store, follow=False) as consumer:
            async for batch in consumer.batches():
                with pytest.raises(StoreError, match="in the thread that opened it"):
                    await batch.commit(transaction=ConnectionProxy(connections, using))
                break
        await sync_to_async(connections.close_all)()

    asyncio.run(consume())


def test_an_alias_that_is_missing_and_a_database_that_is_not_supported_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(Exception, match="'nowhere' doesn't exist"):
        DjangoCursorStore("nowhere")
    with (
        registered({"ENGINE": "django.db.backends.dummy"}, "strange"),
        pytest.raises(ValueError, match="PostgreSQL, MySQL, MariaDB and SQLite"),
    ):
        DjangoCursorStore("strange")


def test_its_own_transactions_take_few_connections_however_many_there_are(
    using: str, store: DjangoCursorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, counting, counts = connections.create_connection, threading.Lock(), [0]

    def counted(alias: str) -> Any:
        connection = create(alias)
        close = connection.close
        with counting:
            counts.append(counts[-1] + 1)

        def closed() -> None:
            close()
            with counting:
                counts.append(counts[-1] - 1)

        connection.close = closed
        return connection

    async def load() -> None:
        key = FeedKey("http://feed/feed")
        await asyncio.gather(*(store.load(key) for _ in range(40)))

    monkeypatch.setattr(connections, "create_connection", counted)
    asyncio.run(load())
    assert (max(counts) <= 4, counts[-1], len(counts)) == (True, 0, 81)
