"""Ctrl-C, once or twice, at each place of the synchronous consumer where it can strike."""

from __future__ import annotations

import gc
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from feedapi_client import Retry, SQLiteCursorStore, SyncBatch, SyncFeedConsumer
from feedapi_client.testing import Publisher
from tests.consumer.helpers import SAFETY_LIMIT, numbers
from tests.sync.helpers import consume, effects, write
from tests.sync.interrupts import Interruptions, Rescue

pytestmark = pytest.mark.usefixtures("nothing_is_left", "ctrl_c")
Program = Callable[[SyncFeedConsumer, sqlite3.Connection], None]


def run(consumer: SyncFeedConsumer, connection: sqlite3.Connection) -> None:
    def handle(batch: SyncBatch) -> None:
        with connection:
            write(connection, batch)
            batch.commit(transaction=connection)

    consumer.run(handle, on_failure=Retry(attempts=None))


def batches(consumer: SyncFeedConsumer, connection: sqlite3.Connection) -> None:
    for batch in consumer.batches():
        with connection:
            write(connection, batch)
            batch.commit(transaction=connection)


def threads(consumer: SyncFeedConsumer, connection: sqlite3.Connection) -> None:
    def handle(batch: SyncBatch) -> None:
        lock.acquire()
        write(connection, batch)
        connection.commit()
        lock.release()

    lock = threading.Lock()
    consumer.run(handle, threads=2)


def interrupt(program: Callable[[], None], at: Interruptions) -> None:
    """Run a program, which has to end, by the interruptions if there were any."""
    before = threading.active_count()
    interrupted = False
    with Rescue() as rescue:
        try:
            program()
        except KeyboardInterrupt:
            interrupted = True
    assert not rescue.stack, (at.places, rescue.stack)
    assert interrupted == bool(at.places), at.places
    threads_end(before, at)


def threads_end(limit: int, at: Interruptions) -> None:
    deadline = time.monotonic() + SAFETY_LIMIT / 2
    while threading.active_count() > limit:
        assert time.monotonic() < deadline, (at.places, threading.enumerate())
        time.sleep(0.001)
        gc.collect()  # ends the consumer whose `__exit__` could not even begin


def database(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute("DROP TABLE IF EXISTS effects")
    connection.execute("CREATE TABLE effects (n INTEGER)")
    return connection


def check(publisher: Publisher, program: Program, path: str, at: Interruptions) -> None:
    """Run a program that is interrupted, and then once more to its end."""
    store = SQLiteCursorStore(path)
    limit = {"max_batch_events": 5}

    def interrupted() -> None:
        consumer = consume(publisher, store=store, limit=limit, follow=False)
        with at, consumer:
            program(consumer, connection)

    with closing(database(path)) as connection:
        interrupt(interrupted, at)
    with (
        closing(sqlite3.connect(path, check_same_thread=False)) as connection,
        consume(publisher, store=store, limit=limit, follow=False) as consumer,
    ):
        program(consumer, connection)
    if program is not threads:
        assert effects(path) == list(range(10)), at.places


@pytest.mark.slow
@pytest.mark.parametrize("program", [run, batches, threads])
def test_one_is_raised_wherever_it_strikes(
    publisher: Publisher, tmp_path: Path, program: Program
) -> None:
    numbers(publisher, 0, range(10))
    number, struck = 0, True
    while struck:
        at = Interruptions(number)
        check(publisher, program, str(tmp_path / f"{number}.db"), at)
        number, struck = number + 1, bool(at.places)
    assert number > 30


@pytest.mark.slow
@pytest.mark.parametrize("program", [run, batches, threads])
def test_a_second_one_is_raised_wherever_it_strikes(
    publisher: Publisher, tmp_path: Path, program: Program
) -> None:
    numbers(publisher, 0, range(10))
    twice = 0
    for number in range(0, 60, 5):
        for second in (0, 1, 2, 4):
            at = Interruptions(number, second)
            check(publisher, program, str(tmp_path / f"{number}-{second}.db"), at)
            twice += len(at.places) == 2
    assert twice > 15


@pytest.mark.parametrize("second", range(12))
def test_a_second_one_right_after_one_in_a_handler_leaves_nothing_that_waits(
    publisher: Publisher, path: str, connection: sqlite3.Connection, second: int
) -> None:
    numbers(publisher, 0, range(10))
    store = SQLiteCursorStore(path)
    at = Interruptions(second)

    def handle(batch: SyncBatch) -> None:
        with connection:
            write(connection, batch)
            batch.commit(transaction=connection)
            at.__enter__()
            raise KeyboardInterrupt

    def interrupted() -> None:
        with consume(publisher, store=store, limit={"max_batch_events": 5}) as consumer:
            try:
                consumer.run(handle, on_failure=Retry(attempts=None))
            finally:
                at.__exit__()

    before = threading.active_count()
    with Rescue() as rescue, pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not rescue.stack, (at.places, rescue.stack)
    threads_end(before + 1, at)
    assert effects(path) == []
