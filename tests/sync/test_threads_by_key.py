"""`SyncFeedConsumer.run_by_key`: each key in order, keys at once in threads."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from feedapi_client import CommitOrderError, Event, SQLiteCursorStore
from feedapi_client.testing import Publisher
from tests.consumer.helpers import (
    RecordingStore,
    assert_each_entity_in_order_and_once,
    fill,
    numbers,
)
from tests.sync.helpers import consume

pytestmark = pytest.mark.usefixtures("nothing_is_left")
CtrlC = Callable[[Callable[[], object]], threading.Thread]


def entity(event: Event) -> str:
    return str(event.json()["entity"])


def number(event: Event) -> int:
    found: int = event.json()["n"]
    return found


def no_handler(event: Event) -> None:
    raise AssertionError("it is never called")


@pytest.mark.parametrize("threads", [1, 4])
def test_r04_each_key_is_handled_in_order_one_at_a_time(
    wide: Publisher, store: RecordingStore, threads: int
) -> None:
    fill(wide, 300, entities=12)
    payloads: list[Any] = []
    inside: set[str] = set()

    def handle(event: Event) -> None:
        key = entity(event)
        assert key not in inside
        inside.add(key)
        payloads.append(event.json())
        inside.remove(key)

    for _ in range(2):
        with consume(wide, store=store, follow=False) as consumer:
            consumer.run_by_key(handle, key=entity, threads=threads)
    assert_each_entity_in_order_and_once(payloads, wide)


def test_r05_a_handler_that_raises_ends_it_and_the_others_finish(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 40, entities=4)
    inside = threading.Barrier(3, timeout=60)
    failed = threading.Event()
    handled: list[int] = []

    def handle(event: Event) -> None:
        if number(event) < 3:
            inside.wait()
            if number(event) == 0:
                failed.set()
                raise ValueError("of the application")
            failed.wait()
        handled.append(number(event))

    with consume(publisher, store=store) as consumer:
        with pytest.raises(ValueError, match="of the application"):
            consumer.run_by_key(handle, key=entity, threads=3)
        assert {1, 2} <= set(handled)
    again: list[int] = []
    with consume(publisher, store=store, follow=False) as consumer:
        consumer.run_by_key(lambda event: again.append(number(event)), key=entity)
    assert 0 in again
    assert set(handled) | set(again) == set(range(40))


def test_after_the_grace_period_of_a_stop_a_handler_is_left_behind(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 4, entities=4)
    go_on = threading.Event()
    hangs: list[threading.Thread] = []

    def handle(event: Event) -> None:
        if number(event) == 1:
            hangs.append(threading.current_thread())
            consumer.stop(grace=0.05)
            go_on.wait()

    with consume(publisher, store=store) as consumer:
        consumer.run_by_key(handle, key=entity, threads=2)
        assert consumer.cut_short
    go_on.set()
    hangs[0].join(60)
    again: list[int] = []
    with consume(publisher, store=store, follow=False) as consumer:
        consumer.run_by_key(lambda event: again.append(number(event)), key=entity)
    assert 1 in again


def test_what_can_not_be_used_is_refused_before_anything_is_delivered(
    publisher: Publisher,
) -> None:
    numbers(publisher, 0, range(3))

    async def asynchronous(event: Event) -> None:
        raise AssertionError

    with consume(publisher) as consumer:
        with pytest.raises(TypeError, match=r"def handle\(event\)"):
            consumer.run_by_key(asynchronous, key=entity)
        with pytest.raises(TypeError, match="threads"):
            consumer.run_by_key(no_handler, key=entity, threads=1.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="threads"):
            consumer.run_by_key(no_handler, key=entity, threads=0)
        with pytest.raises(TypeError, match="key"):
            consumer.run_by_key(no_handler, key="entity")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="max_in_flight"):
            consumer.run_by_key(no_handler, key=entity, max_in_flight=0)
        with pytest.raises(ValueError, match="sometimes"):
            consumer.run_by_key(no_handler, key=entity, on_failure="sometimes")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="not open"):
        consumer.run_by_key(no_handler, key=entity)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_handler_that_returns_an_awaitable_is_refused(publisher: Publisher, threads: int) -> None:
    numbers(publisher, 0, range(3))

    async def asynchronous() -> None:
        raise AssertionError

    with consume(publisher) as consumer, pytest.raises(TypeError, match=r"def handle\(event\)"):
        consumer.run_by_key(lambda event: asynchronous(), key=entity, threads=threads)


@pytest.mark.parametrize("threads", [1, 4])
def test_r05_an_event_is_done_in_the_transaction_of_its_thread(
    wide: Publisher, tmp_path: Path, threads: int
) -> None:
    fill(wide, 60, entities=6)
    path = tmp_path / "app.db"
    calls: list[int] = []
    ends = True

    def handle(event: Event) -> None:
        calls.append(number(event))
        with closing(sqlite3.connect(path, timeout=60)) as connection, connection:
            connection.execute("CREATE TABLE IF NOT EXISTS effects (entity TEXT, n INTEGER)")
            connection.execute("INSERT INTO effects VALUES (?, ?)", (entity(event), number(event)))
            event.done(transaction=connection)
        if ends and number(event) == 30:
            raise LookupError("behind the commit, which counts")
        if ends and number(event) == 40:
            raise SystemExit  # as an interruption: nothing more is delivered

    def consume_all() -> None:
        with consume(wide, store=SQLiteCursorStore(path), follow=False) as consumer:
            consumer.run_by_key(handle, key=entity, event_id=number, threads=threads)

    with pytest.raises(SystemExit):
        consume_all()
    ends = False
    consume_all()
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT entity, n FROM effects ORDER BY rowid").fetchall()
    payloads = [{"entity": entity, "n": n} for entity, n in rows]
    assert_each_entity_in_order_and_once(payloads, wide)
    assert len(calls) == len(set(calls))


def test_done_outside_of_a_handler_is_refused(wide: Publisher, tmp_path: Path) -> None:
    fill(wide, 10, entities=6)
    kept: list[Event] = []

    def handle(event: Event) -> None:
        kept.append(event)
        event.done()

    with consume(wide, store=SQLiteCursorStore(tmp_path / "app.db"), follow=False) as consumer:
        consumer.run_by_key(handle, key=entity, event_id=number, threads=4)
        for event in kept:
            with pytest.raises(CommitOrderError):
                event.done()
    assert len(kept) == 10
