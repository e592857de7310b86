"""`SyncFeedConsumer.run` and `run_by_key`: order, threads, and handlers that fail."""

from __future__ import annotations

import asyncio
import contextvars
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import pytest

from feedapi_client import (
    CommitOrderError,
    Event,
    Quarantine,
    Retry,
    SQLiteCursorStore,
    SyncBatch,
    SyncFeedConsumer,
)
from feedapi_client.quarantine.quarantine_store import MemoryQuarantineStore
from feedapi_client.testing import Publisher
from tests.consumer.helpers import (
    RecordingStore,
    assert_each_entity_in_order_and_once,
    fill,
    numbers,
)
from tests.sync.helpers import consume, ns, wait_until
from tests.sync.test_interruption import CtrlC, stack_of_main

pytestmark = pytest.mark.usefixtures("nothing_is_left")
SMALL = {"max_batch_events": 5}
Delivered = SyncBatch | Event


def entity(event: Event) -> str:
    return str(event.json()["entity"])


def number(event: Event) -> int:
    return int(event.json()["n"])


def events_of(delivered: Delivered) -> list[Event]:
    return [delivered] if isinstance(delivered, Event) else list(delivered.events)


def numbers_of(delivered: Delivered) -> list[int]:
    return ns(events_of(delivered))


class Way(NamedTuple):
    """`run` or `run_by_key`, with so many threads."""

    method: str
    threads: int

    @property
    def by_key(self) -> bool:
        return self.method == "run_by_key"

    def run(self, consumer: SyncFeedConsumer, handle: Any, **options: Any) -> None:
        options = {"threads": self.threads, **options}
        if self.by_key:
            consumer.run_by_key(handle, **{"key": entity, **options})
        else:
            consumer.run(handle, **options)

    def handled(self, publisher: Publisher, store: RecordingStore) -> list[int]:
        """What another consumer of the store still gets."""
        found: list[int] = []
        with consume(publisher, store=store, follow=False) as consumer:
            self.run(consumer, lambda delivered: found.extend(numbers_of(delivered)))
        return found

    def __str__(self) -> str:
        return f"{self.method}, {self.threads} threads"


ALONE = [Way("run", 1), Way("run_by_key", 1)]
IN_THREADS = [Way("run", 3), Way("run_by_key", 3)]
alone = pytest.mark.parametrize("way", ALONE, ids=str)
in_threads = pytest.mark.parametrize("way", IN_THREADS, ids=str)
each_way = pytest.mark.parametrize("way", ALONE + IN_THREADS, ids=str)


def no_handler(_: Delivered) -> None:
    raise AssertionError("it is never called")


@each_way
def test_r04_r05_what_is_handled_is_in_order_one_at_a_time_and_committed(
    wide: Publisher, store: RecordingStore, way: Way
) -> None:
    fill(wide, 300, entities=12)
    payloads: list[Any] = []
    inside: set[object] = set()

    def handle(delivered: Delivered) -> None:
        key = entity(delivered) if isinstance(delivered, Event) else delivered.partition
        assert key not in inside
        inside.add(key)
        payloads.extend(event.json() for event in events_of(delivered))
        inside.remove(key)

    with consume(wide, store=store, follow=False, limit=SMALL) as consumer:
        way.run(consumer, handle)
    assert_each_entity_in_order_and_once(payloads, wide)
    with consume(wide, store=store, follow=False) as consumer:
        way.run(consumer, no_handler)


@in_threads
def test_partitions_or_keys_are_handled_at_once_in_threads_that_end_with_it(
    publisher: Publisher, wide: Publisher, way: Way
) -> None:
    feed = publisher if way.by_key else wide
    fill(feed, 99, entities=3 if way.by_key else 20)
    together = threading.Event()
    inside: set[str] = set()

    def handle(delivered: Delivered) -> None:
        if numbers_of(delivered):
            inside.add(threading.current_thread().name)
            if len(inside) == 3:
                together.set()
            assert together.wait(60)

    with consume(feed, follow=False, limit=SMALL) as consumer:
        way.run(consumer, handle)
        assert len(inside) == 3
        assert not inside & {thread.name for thread in threading.enumerate()}


@alone
def test_one_thread_is_the_calling_one(publisher: Publisher, way: Way) -> None:
    numbers(publisher, 0, range(20))
    seen: set[int] = set()
    with consume(publisher, follow=False, limit=SMALL) as consumer:
        way.run(consumer, lambda _: seen.add(threading.get_ident()))
    assert seen == {threading.get_ident()}


@each_way
@pytest.mark.parametrize("error", [ValueError("of the application"), SystemExit(3)])
def test_what_a_handler_raises_is_raised_and_its_events_come_again(
    publisher: Publisher, way: Way, error: BaseException
) -> None:
    """An exit of the program is nothing that is tried again."""
    numbers(publisher, 0, range(20))

    def handle(delivered: Delivered) -> None:
        if 12 in numbers_of(delivered):
            raise error

    policy: Any = Retry(attempts=None) if isinstance(error, SystemExit) else "raise"
    with consume(publisher, limit=SMALL) as consumer:
        with pytest.raises(type(error)) as raised:
            way.run(consumer, handle, on_failure=policy)
        assert raised.value is error
        assert ns([next(iter(consumer))]) == [10]


@in_threads
def test_r05_other_handlers_finish_and_commit_when_one_raises(
    publisher: Publisher, wide: Publisher, store: RecordingStore, way: Way
) -> None:
    feed = publisher if way.by_key else wide
    fill(feed, 100, entities=4 if way.by_key else 5)
    together, failed = threading.Barrier(2, timeout=60), threading.Event()
    handled: list[int] = []

    def handle(delivered: Delivered) -> None:
        if not numbers_of(delivered) or failed.is_set():
            return
        if together.wait() == 0:
            failed.set()
            raise ValueError("of the application")
        failed.wait()
        handled.extend(numbers_of(delivered))

    with (
        consume(feed, store=store, limit=SMALL) as consumer,
        pytest.raises(ValueError, match="of the application"),
    ):
        way.run(consumer, handle, threads=2)
    assert len(handled) == (1 if way.by_key else 5)
    rest = way.handled(feed, store)
    assert {*handled, *rest} == set(range(100))
    assert way.by_key or len(handled) + len(rest) == 100


@each_way
@pytest.mark.parametrize("passes", [True, False])
def test_a_failing_handler_is_called_again_and_then_its_event_is_quarantined(
    publisher: Publisher, way: Way, passes: bool
) -> None:
    fill(publisher, 10)
    attempts: list[list[int]] = []
    handled: list[int] = []

    def handle(delivered: Delivered) -> None:
        if 3 in numbers_of(delivered):
            attempts.append(numbers_of(delivered))
            if len(attempts) < 3 or not passes:
                raise ConnectionError("not yet")
        handled.extend(numbers_of(delivered))

    quarantine = MemoryQuarantineStore()
    policy = Retry(attempts=3, base_delay=0.001, max_delay=0.001, then=Quarantine(to=quarantine))
    with consume(publisher, follow=False) as consumer:
        way.run(consumer, handle, on_failure=policy)
    assert attempts[:3] == [[3] if way.by_key else list(range(10))] * 3
    assert sorted(handled) == [n for n in range(10) if passes or n != 3]
    assert len(asyncio.run(quarantine.page())) == (0 if passes else 1)


@each_way
def test_r20_a_cancelled_error_that_a_handler_lets_out_is_its_failure(
    publisher: Publisher, way: Way
) -> None:
    numbers(publisher, 0, range(10))
    calls: list[object] = []

    def handle(delivered: Delivered) -> None:
        calls.append(delivered)
        if len(calls) == 1:
            raise asyncio.CancelledError

    with consume(publisher, follow=False) as consumer:
        with pytest.raises(RuntimeError, match="the handler let a CancelledError out"):
            way.run(consumer, handle)
        calls.clear()
        way.run(consumer, handle, on_failure="retry")
    assert len(calls) > 1


@each_way
def test_a_handler_may_run_an_event_loop_and_sees_the_callers_context(
    publisher: Publisher, way: Way
) -> None:
    numbers(publisher, 0, range(10))
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("the caller's")
    seen: list[str] = []

    def handle(_: Delivered) -> None:
        anyio.run(anyio.lowlevel.checkpoint)
        seen.append(variable.get())

    with consume(publisher, follow=False) as consumer:
        way.run(consumer, handle)
    assert set(seen) == {"the caller's"}


# ---------------------------------------------------------------------- what is refused


async def asynchronous(_: Any) -> None: ...


ARGUMENTS: list[tuple[str | None, dict[str, Any], str]] = [
    (None, {"handle": asynchronous}, "without async"),
    (None, {"handle": None}, "the handler must be a function"),
    (None, {"threads": 0}, "threads must be at least 1"),
    (None, {"threads": -1}, "threads must be at least 1"),
    (None, {"threads": 1.5}, "threads must be"),
    (None, {"on_failure": "sometimes"}, "sometimes"),
    ("run_by_key", {"key": "entity"}, "key"),
    ("run_by_key", {"max_in_flight": 0}, "max_in_flight"),
]


@alone
@pytest.mark.parametrize(("method", "arguments", "text"), ARGUMENTS)
def test_what_can_not_be_used_is_refused_before_anything_is_delivered(
    publisher: Publisher, way: Way, method: str | None, arguments: dict[str, Any], text: str
) -> None:
    way = way if method is None else Way(method, 1)
    numbers(publisher, 0, range(3))
    with consume(publisher) as consumer:
        with pytest.raises((TypeError, ValueError), match=text):
            way.run(consumer, **{"handle": no_handler, **arguments})
        assert ns([next(iter(consumer))]) == [0]
    with pytest.raises(RuntimeError, match="not open"):
        way.run(consumer, no_handler)


@each_way
def test_a_handler_that_returns_an_awaitable_is_refused(publisher: Publisher, way: Way) -> None:
    numbers(publisher, 0, range(3))
    with consume(publisher) as consumer:
        with pytest.raises(TypeError, match=r"def handle\("):
            # Nothing shows before the call that it is asynchronous.
            way.run(consumer, lambda each: asynchronous(each), on_failure="quarantine")  # noqa: PLW0108
        assert ns([next(iter(consumer))]) == [0]


# ---------------------------------------------------------------------- the end


@in_threads
def test_r20_ctrl_c_lets_threads_finish_and_saves_what_is_done(
    publisher: Publisher, wide: Publisher, ctrl_c: CtrlC, store: RecordingStore, way: Way
) -> None:
    feed = publisher if way.by_key else wide
    fill(feed, 100, entities=4 if way.by_key else 5)
    started, go_on = threading.Semaphore(0), threading.Event()
    handled: list[int] = []

    def handle(delivered: Delivered) -> None:
        if numbers_of(delivered):
            started.release()
            go_on.wait()
            handled.extend(numbers_of(delivered))

    with consume(feed, store=store, limit=SMALL) as consumer:
        interrupting = ctrl_c(lambda: started.acquire() and started.acquire())

        def let_go() -> None:
            interrupting.join()
            wait_until(lambda: "wait_for_end" in stack_of_main())
            go_on.set()

        thread = threading.Thread(target=let_go)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            way.run(consumer, handle, threads=2)
        thread.join()
    assert len(handled) == (2 if way.by_key else 10)
    rest = way.handled(feed, store)
    assert {*handled, *rest} == set(range(100))
    assert way.by_key or len(handled) + len(rest) == 100


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
    assert 1 in Way("run_by_key", 1).handled(publisher, store)


# ---------------------------------------------------------------------- what is done


@pytest.mark.parametrize("threads", [1, 4])
def test_r05_an_event_is_done_in_the_transaction_of_its_thread(
    wide: Publisher, tmp_path: Path, threads: int
) -> None:
    fill(wide, 60, entities=6)
    path = tmp_path / "app.db"
    calls: list[Event] = []
    ends = True

    def handle(event: Event) -> None:
        calls.append(event)
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
    assert len(calls) == len(set(ns(calls)))
    for event in calls:
        with pytest.raises(CommitOrderError):
            event.done()
