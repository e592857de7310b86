"""Ctrl-C while the main thread waits for a `SyncFeedConsumer`, and what remains usable."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Mapping

import anyio
import pytest

from feedapi_client import CommitOrderError, Position, Retry, SQLiteCursorStore, SyncBatch
from feedapi_client.monitor.snapshots import frame_of_thread
from feedapi_client.testing import Publisher
from tests.consumer.helpers import RecordingStore, Transaction, fill, numbers
from tests.sync.helpers import (
    ThreadedStore,
    consume,
    effects,
    ns,
    wait_for_ctrl_c,
    wait_until,
    write,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")
CtrlC = Callable[[Callable[[], object]], threading.Thread]


@pytest.mark.parametrize("way", ["events", "batches"])
def test_while_it_waits_for_events_it_is_raised_and_the_loop_can_go_on(
    publisher: Publisher, ctrl_c: CtrlC, way: str
) -> None:
    with consume(publisher) as consumer:
        events, batches = iter(consumer), consumer.batches()

        def take() -> list[int]:
            if way == "events":
                return ns([next(events)])
            batch = next(batch for batch in batches if len(batch))
            batch.commit()
            return ns(batch)

        for n in range(3):
            publisher.clear_requests()
            ctrl_c(lambda: len(publisher.requests) > 3)
            with pytest.raises(KeyboardInterrupt):
                take()
            numbers(publisher, 0, [n])
            assert take() == [n]


def test_it_ends_the_block(publisher: Publisher, ctrl_c: CtrlC) -> None:
    def program() -> None:
        with consume(publisher) as consumer:
            ns(consumer)

    ctrl_c(lambda: publisher.counters["fetch"] > 2)
    with pytest.raises(KeyboardInterrupt):
        program()


def test_it_ends_an_entry_that_waits_for_the_feed(publisher: Publisher, ctrl_c: CtrlC) -> None:
    publisher.fail(503, on="discovery", times=None)
    consumer = consume(publisher)
    ctrl_c(lambda: len(publisher.requests) > 3)
    with pytest.raises(KeyboardInterrupt):
        consumer.__enter__()


def test_r20_a_save_that_has_begun_is_through_before_it_is_raised(
    publisher: Publisher, ctrl_c: CtrlC, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(5))
    saving, go_on = threading.Event(), threading.Event()

    async def slow(positions: Mapping[int, Position]) -> None:
        saving.set()
        await anyio.to_thread.run_sync(go_on.wait)

    with consume(publisher, store=store) as consumer:
        batch = next(consumer.batches())
        store.before_save = slow
        before = len(store.saves)
        interrupting = ctrl_c(saving.is_set)

        def let_go() -> None:
            interrupting.join()
            go_on.set()

        thread = threading.Thread(target=let_go)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            batch.commit()
        assert len(store.saves) == before + 1
        thread.join()
        store.before_save = None


def test_within_the_callers_transaction_it_leaves_that_to_be_rolled_back(
    publisher: Publisher, ctrl_c: CtrlC
) -> None:
    numbers(publisher, 0, range(5))
    store = ThreadedStore()
    in_statement = threading.Event()

    def statement() -> None:
        in_statement.set()
        wait_for_ctrl_c()

    store.step = statement
    with consume(publisher, store=store) as consumer:
        batch = next(consumer.batches())
        ctrl_c(in_statement.is_set)
        transaction = Transaction()
        with pytest.raises(KeyboardInterrupt):
            batch.commit(transaction=transaction)
        assert transaction.changes == []
        store.step = lambda: None
        batch.commit(transaction=transaction)
        assert len(transaction.changes) == 1


def test_in_a_handler_in_the_calling_thread_it_ends_run(
    publisher: Publisher, ctrl_c: CtrlC, path: str, connection: sqlite3.Connection
) -> None:
    numbers(publisher, 0, range(10))
    handling = threading.Event()

    def handle(batch: SyncBatch) -> None:
        with connection:
            write(connection, batch)
            batch.commit(transaction=connection)
            if ns(batch)[-1] == 9:
                handling.set()
                wait_for_ctrl_c()

    ctrl_c(handling.is_set)
    store = SQLiteCursorStore(path)
    limit = {"max_batch_events": 5}
    with consume(publisher, store=store, limit=limit) as consumer:
        with pytest.raises(KeyboardInterrupt):
            consumer.run(handle, on_failure=Retry(attempts=None))
        assert effects(path) == list(range(5))
        handled: list[int] = []
        with consume(publisher, store=store, follow=False) as other:
            other.run(lambda batch: handled.extend(ns(batch)))
        assert handled == list(range(5, 10))


def test_a_second_one_leaves_handlers_behind_whose_commits_are_refused(
    wide: Publisher, ctrl_c: CtrlC, store: RecordingStore
) -> None:
    fill(wide, 100)
    started, go_on = threading.Semaphore(0), threading.Event()
    refused: list[CommitOrderError] = []

    def handle(batch: SyncBatch) -> None:
        if not len(batch):
            return
        started.release()
        go_on.wait()
        try:
            batch.commit()
        except CommitOrderError as error:
            refused.append(error)

    with consume(wide, store=store) as consumer:
        first = ctrl_c(lambda: started.acquire() and started.acquire())

        def again() -> bool:
            first.join()
            # The main thread waits for the handlers, no more for the end of the iteration.
            wait_until(lambda: "wait_for_end" in stack_of_main())
            return True

        ctrl_c(again)
        with pytest.raises(KeyboardInterrupt):
            consumer.run(handle, threads=2)
        assert refused == []
    go_on.set()
    wait_until(lambda: len(refused) == 2)
    read: list[int] = []
    with consume(wide, store=store, follow=False) as consumer:
        consumer.run(lambda batch: read.extend(ns(batch)))
    assert sorted(read) == list(range(100))


def stack_of_main() -> list[str]:
    """The names of the functions in which the main thread is."""
    ident = threading.main_thread().ident
    assert ident is not None
    frame = frame_of_thread(ident)
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names
