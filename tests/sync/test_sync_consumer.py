"""`SyncFeedConsumer`: iterating, committing, its methods, and what it refuses."""

from __future__ import annotations

import inspect
import signal
import sqlite3
import threading
from typing import Any

import pytest

from feedapi_client import (
    CommitOrderError,
    FeedConsumer,
    PartitionState,
    ProtocolError,
    Quarantine,
    Share,
    SQLiteCursorStore,
    StoreError,
    SyncBatch,
    SyncFeedConsumer,
)
from feedapi_client.runtime.loop_thread import LoopThread
from feedapi_client.testing import Publisher
from tests.consumer.helpers import (
    BROKEN,
    RecordingStore,
    Transaction,
    assert_each_entity_in_order_and_once,
    fill,
    numbers,
)
from tests.sync.helpers import (
    ThreadedStore,
    consume,
    effects,
    in_thread,
    ns,
    wait_until,
    write,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def last(store: RecordingStore) -> str | None:
    """The cursor that was saved last for partition 0."""
    return store.saves[-1][0].cursor if store.saves else None


# ---------------------------------------------------------------------- iterating


def test_it_takes_the_arguments_of_the_consumer_with_async() -> None:
    theirs = inspect.signature(FeedConsumer.__init__).parameters
    ours = inspect.signature(SyncFeedConsumer.__init__).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_events_come_in_order_and_to_the_end(wide: Publisher) -> None:
    fill(wide, 200)
    with consume(wide, follow=False) as consumer:
        assert_each_entity_in_order_and_once([event.json() for event in consumer], wide)


def test_r05_what_was_not_committed_comes_again(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(10))
    with consume(publisher, store=store, limit={"max_batch_events": 5}) as consumer:
        for event in consumer:
            if event.json()["n"] == 7:
                break
        assert ns(next(iter(consumer)) for _ in range(1)) == [5]
    with consume(publisher, store=store, follow=False) as consumer:
        assert ns(consumer) == [5, 6, 7, 8, 9]


def test_r05_a_batch_is_committed_by_its_method(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(10))
    with consume(publisher, store=store, limit={"max_batch_events": 5}) as consumer:
        batches = consumer.batches()
        first = next(batches)
        assert (len(first), bool(first), ns(first)) == (5, True, list(range(5)))
        assert repr(first) == f"<SyncBatch of partition 0, 5 events, cursor {first.cursor!r}>"
        first.commit()
        assert last(store) == first.cursor
        second = next(batches)
        assert ns(second.events) == list(range(5, 10))
        second.commit()
        with pytest.raises(CommitOrderError):
            first.commit()


def test_r05_a_commit_after_the_block_is_refused(publisher: Publisher) -> None:
    numbers(publisher, 0, range(10))
    with consume(publisher) as consumer:
        batch = next(consumer.batches())
    with pytest.raises(CommitOrderError, match=r"partition 0: .*the consumer is not open"):
        batch.commit()


def test_r20_an_error_is_raised_again_by_the_same_loop(publisher: Publisher) -> None:
    publisher.fail(BROKEN, times=None)
    with consume(publisher) as consumer:
        for iterator in (iter(consumer), consumer.batches()):
            for _ in range(3):
                with pytest.raises(ProtocolError, match="_last"):
                    next(iterator)


def test_it_can_be_entered_again(publisher: Publisher) -> None:
    numbers(publisher, 0, range(3))
    consumer = consume(publisher, follow=False)
    for expected in ([0, 1, 2], []):
        with consumer:
            assert ns(consumer) == expected
    numbers(publisher, 0, [3])
    with consumer:
        assert ns(consumer) == [3]


def test_outside_its_block_it_refuses_to_iterate(publisher: Publisher) -> None:
    consumer = consume(publisher)
    with pytest.raises(RuntimeError, match="use it inside 'with'"):
        next(iter(consumer))
    with pytest.raises(RuntimeError, match="use it inside 'with'"):
        consumer.run(print)
    with consumer:
        events, batches = iter(consumer), consumer.batches()
        with pytest.raises(RuntimeError, match="open already"):
            consumer.__enter__()
    for iterator in (events, batches):
        with pytest.raises(RuntimeError, match="use it inside 'with'"):
            next(iterator)


# ---------------------------------------------------------------------- the caller's transaction


def test_r05_a_rolled_back_transaction_takes_the_cursor_with_it(
    publisher: Publisher, path: str, connection: sqlite3.Connection
) -> None:
    numbers(publisher, 0, range(5))
    with consume(publisher, store=SQLiteCursorStore(path)) as consumer:
        batch = next(consumer.batches())
        write(connection, batch)
        batch.commit(transaction=connection)
        connection.rollback()
        assert effects(path) == []
        with connection:
            write(connection, batch)
            batch.commit(transaction=connection)
    assert effects(path) == list(range(5))
    with consume(publisher, store=SQLiteCursorStore(path), follow=False) as consumer:
        assert ns(consumer) == []


def test_the_transaction_is_used_in_the_thread_that_commits(publisher: Publisher) -> None:
    numbers(publisher, 0, range(10))
    store, used = ThreadedStore(), []
    with consume(publisher, store=store, limit={"max_batch_events": 5}) as consumer:
        batches = consumer.batches()
        next(batches).commit(transaction=Transaction())
        batch = next(batches)

        def commit() -> None:
            used.append(threading.get_ident())
            batch.commit(transaction=Transaction())

        in_thread(commit).join()
    assert store.threads == [threading.get_ident(), *used]


def test_an_error_in_the_transaction_comes_as_a_store_error(publisher: Publisher) -> None:
    numbers(publisher, 0, range(5))
    store = ThreadedStore()
    failing = [True]

    def fail() -> None:
        if failing:
            failing.pop()
            raise sqlite3.OperationalError("database is locked")

    store.step = fail
    with consume(publisher, store=store) as consumer:
        batch = next(consumer.batches())
        with pytest.raises(StoreError) as raised:
            batch.commit(transaction=Transaction())
        assert isinstance(raised.value.__cause__, sqlite3.OperationalError)
        batch.commit(transaction=Transaction())
    assert store.threads == [threading.get_ident()] * 2


@pytest.mark.parametrize("threads", [1, 3])
def test_quarantined_events_are_stored_in_the_transaction(
    publisher: Publisher, path: str, threads: int
) -> None:
    numbers(publisher, 0, range(20))

    def handle(batch: SyncBatch) -> None:
        connection = sqlite3.connect(path)
        try:
            with connection:
                write(connection, batch)
                if any(n % 7 == 3 for n in ns(batch)):
                    raise ValueError("poison")
                batch.commit(transaction=connection)
        finally:
            connection.close()

    store = SQLiteCursorStore(path)
    with consume(publisher, store=store, follow=False) as consumer:
        consumer.run(handle, threads=threads, on_failure=Quarantine())
        quarantined = consumer.status().partitions[0].quarantined
    assert effects(path) == [n for n in range(20) if n % 7 != 3]
    assert quarantined == 3
    connection = sqlite3.connect(path)
    count = connection.execute("SELECT count(*) FROM feedapi_quarantine").fetchone()
    connection.close()
    assert count == (3,)


# ---------------------------------------------------------------------- beside the iteration


def test_status_health_and_topology_are_asked_from_any_thread(publisher: Publisher) -> None:
    numbers(publisher, 0, range(10))
    consumer = consume(publisher)
    assert not consumer.health().ready
    assert consumer.status().partitions == {}
    with consumer:
        next(iter(consumer))
        seen: list[object] = []

        def look() -> None:
            seen.extend((consumer.status().partitions[0].state, consumer.health().ready))
            seen.append(list(consumer.topology()))

        in_thread(look).join()
        state, *others = seen
        assert state in (PartitionState.READING, PartitionState.CAUGHT_UP)  # it reads ahead
        assert others == [True, [0]]
    assert list(consumer.status().partitions) == [0]
    assert not consumer.health().ready


@pytest.mark.parametrize("way", ["events", "batches", "run", "run with threads"])
def test_stop_ends_each_way_to_consume(publisher: Publisher, way: str) -> None:
    numbers(publisher, 0, range(5))
    with consume(publisher) as consumer:

        def stop() -> None:
            wait_until(lambda: consumer.status().partitions[0].caught_up)
            consumer.stop()

        in_thread(stop)
        if way == "events":
            assert ns(consumer) == list(range(5))
        elif way == "batches":
            for batch in consumer.batches():
                batch.commit()
        else:
            consumer.run(lambda batch: None, threads=1 if way == "run" else 2)
    with consume(publisher, store=consumer.store, follow=False) as consumer:
        assert ns(consumer) == []


def test_stop_may_be_called_in_a_signal_handler(publisher: Publisher) -> None:
    numbers(publisher, 0, range(5))
    with consume(publisher) as consumer:
        before = signal.signal(signal.SIGUSR1, lambda *_: consumer.stop(grace=30))
        try:
            for event in consumer:
                if event.json()["n"] == 4:
                    signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert not consumer.cut_short


def test_stop_ends_the_entry_that_waits_for_the_feed(publisher: Publisher) -> None:
    publisher.fail(503, on="discovery", times=None)
    consumer = consume(publisher)

    def stop() -> None:
        wait_until(lambda: len(publisher.requests) > 3)
        consumer.stop()

    in_thread(stop)
    with consumer:
        assert list(consumer) == []


@pytest.mark.parametrize("method", ["open", "_serve"])
def test_stop_ends_an_entry_whose_event_loop_does_not_run_yet(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    numbers(publisher, 0, range(5))
    consumer, begins = consume(publisher), getattr(LoopThread, method)

    def stopped(thread: LoopThread) -> Any:
        consumer.stop()
        return begins(thread)

    monkeypatch.setattr(LoopThread, method, stopped)
    for _ in range(2):
        with consumer:
            assert next(iter(consumer), None) is None
    monkeypatch.undo()
    with consumer:
        assert next(iter(consumer)).json() == {"entity": "a", "n": 0}


def test_callbacks_of_share_run_in_the_event_loop_and_may_ask_for_the_status(
    publisher: Publisher,
) -> None:
    numbers(publisher, 0, range(5))
    told: list[object] = []

    async def on_assigned(partitions: object) -> None:
        told.append(consumer.status().feed)
        with pytest.raises(RuntimeError, match="own event loop"):
            next(iter(consumer))
        with pytest.raises(RuntimeError, match="own event loop"):
            consumer.__exit__(None, None, None)

    consumer = consume(publisher, share=Share(on_assigned=on_assigned))
    with consumer:
        assert ns(next(consumer.batches())) == list(range(5))
        assert told == [consumer.feed]


def test_an_iteration_of_a_pinned_decoder_runs_it_in_the_callers_thread(
    publisher: Publisher,
) -> None:
    numbers(publisher, 0, range(5))
    with consume(
        publisher, follow=False, decoder=lambda raw: (raw, threading.get_ident())
    ) as consumer:
        assert {event.json()[1] for event in consumer} == {threading.get_ident()}
