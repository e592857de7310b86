"""`SyncFeedConsumer.run`: order, threads, and handlers that fail."""

from __future__ import annotations

import contextvars
import threading
from collections import defaultdict

import anyio
import anyio.lowlevel
import pytest

from feedapi_client import Quarantine, Retry, SyncBatch
from feedapi_client.testing import Publisher
from tests.consumer.helpers import RecordingStore, fill, numbers
from tests.sync.helpers import consume, ns

pytestmark = pytest.mark.usefixtures("nothing_is_left")
SMALL = {"max_batch_events": 5}


def no_handler(batch: SyncBatch) -> None:
    raise AssertionError("it is never called")


@pytest.mark.parametrize("threads", [1, 3])
def test_r04_batches_of_a_partition_are_handled_in_order_one_at_a_time(
    wide: Publisher, threads: int
) -> None:
    fill(wide, 300)
    handled: dict[int, list[int]] = defaultdict(list)
    inside: set[int] = set()

    def handle(batch: SyncBatch) -> None:
        assert batch.partition not in inside
        inside.add(batch.partition)
        handled[batch.partition] += ns(batch)
        inside.remove(batch.partition)

    with consume(wide, follow=False, limit=SMALL) as consumer:
        consumer.run(handle, threads=threads)
    assert all(each == sorted(each) for each in handled.values())
    assert sorted(n for each in handled.values() for n in each) == list(range(300))


def test_partitions_are_handled_at_once_in_threads_that_end_with_it(wide: Publisher) -> None:
    fill(wide, 100, entities=20)
    together = threading.Event()
    inside: set[str] = set()

    def handle(batch: SyncBatch) -> None:
        if len(batch):
            inside.add(threading.current_thread().name)
            if len(inside) == 3:
                together.set()
            assert together.wait(60)

    with consume(wide, follow=False, limit=SMALL) as consumer:
        consumer.run(handle, threads=3)
        assert len(inside) == 3
        assert not inside & {thread.name for thread in threading.enumerate()}


def test_one_thread_is_the_calling_one(publisher: Publisher) -> None:
    numbers(publisher, 0, range(20))
    seen: set[int] = set()
    with consume(publisher, follow=False, limit=SMALL) as consumer:
        consumer.run(lambda batch: seen.add(threading.get_ident()))
    assert seen == {threading.get_ident()}


@pytest.mark.parametrize("threads", [1, 2])
def test_r05_a_batch_is_committed_when_its_handler_returns(
    publisher: Publisher, store: RecordingStore, threads: int
) -> None:
    numbers(publisher, 0, range(20))
    with consume(publisher, store=store, follow=False, limit=SMALL) as consumer:
        consumer.run(lambda batch: None, threads=threads)
    with consume(publisher, store=store, follow=False) as consumer:
        consumer.run(no_handler, threads=threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_handler_raises_is_raised_by_run(publisher: Publisher, threads: int) -> None:
    numbers(publisher, 0, range(20))
    error = ValueError("of the application")

    def handle(batch: SyncBatch) -> None:
        if 12 in ns(batch):
            raise error

    with consume(publisher, limit=SMALL) as consumer:
        with pytest.raises(ValueError, match="of the application") as raised:
            consumer.run(handle, threads=threads)
        assert raised.value is error
        assert ns(next(iter(consumer)) for _ in range(1)) == [10]


def test_other_handlers_finish_and_commit_when_one_raises(
    wide: Publisher, store: RecordingStore
) -> None:
    fill(wide, 100)
    together = threading.Barrier(2, timeout=60)
    failed = threading.Event()
    handled: list[int] = []

    def handle(batch: SyncBatch) -> None:
        if not len(batch) or failed.is_set():
            return
        if together.wait() == 0:
            failed.set()
            raise ValueError("of the application")
        failed.wait()
        handled.extend(ns(batch))

    with (
        consume(wide, store=store, limit=SMALL) as consumer,
        pytest.raises(ValueError, match="of the application"),
    ):
        consumer.run(handle, threads=2)
    assert len(handled) == 5
    with consume(wide, store=store, follow=False) as consumer:
        consumer.run(lambda batch: handled.extend(ns(batch)))
    assert sorted(handled) == list(range(100))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failing_handler_gets_its_batch_again(publisher: Publisher, threads: int) -> None:
    numbers(publisher, 0, range(10))
    attempts: list[list[int]] = []

    def handle(batch: SyncBatch) -> None:
        attempts.append(ns(batch))
        if len(attempts) < 3:
            raise ConnectionError("not yet")

    policy = Retry(attempts=5, base_delay=0.001, max_delay=0.001)
    with consume(publisher, follow=False) as consumer:
        consumer.run(handle, threads=threads, on_failure=policy)
    assert attempts == [list(range(10))] * 3


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failing_event_is_quarantined(publisher: Publisher, threads: int) -> None:
    numbers(publisher, 0, range(20))
    handled: list[int] = []

    def handle(batch: SyncBatch) -> None:
        if 13 in ns(batch):
            raise ValueError("poison")
        handled.extend(ns(batch))

    with consume(publisher, follow=False) as consumer:
        consumer.run(handle, threads=threads, on_failure=Quarantine())
    assert handled == [n for n in range(20) if n != 13]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_handler_that_exits_ends_the_program(publisher: Publisher, threads: int) -> None:
    numbers(publisher, 0, range(10))

    def handle(batch: SyncBatch) -> None:
        raise SystemExit(3)

    with consume(publisher) as consumer:
        with pytest.raises(SystemExit) as raised:
            consumer.run(handle, threads=threads, on_failure=Retry(attempts=None))
        assert raised.value.code == 3
        assert ns([next(iter(consumer))]) == [0]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_handler_may_run_an_event_loop_and_sees_the_callers_context(
    publisher: Publisher, threads: int
) -> None:
    numbers(publisher, 0, range(10))
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("the caller's")
    seen: list[str] = []

    async def nothing() -> None:
        await anyio.lowlevel.checkpoint()

    def handle(batch: SyncBatch) -> None:
        anyio.run(nothing)
        seen.append(variable.get())

    with consume(publisher, follow=False) as consumer:
        consumer.run(handle, threads=threads)
    assert set(seen) == {"the caller's"}


async def asynchronous(batch: SyncBatch) -> None: ...


def test_an_asynchronous_handler_is_refused(publisher: Publisher) -> None:
    numbers(publisher, 0, range(10))
    with consume(publisher) as consumer:
        with pytest.raises(TypeError, match="without async"):
            consumer.run(asynchronous)
        for threads in (1, 2):
            with pytest.raises(TypeError, match="returned a coroutine"):
                consumer.run(
                    lambda batch: asynchronous(batch),  # noqa: PLW0108 - not seen to be one
                    threads=threads,
                    on_failure=Quarantine(),
                )
        assert ns([next(iter(consumer))]) == [0]


def test_other_arguments_are_checked_before_anything_is_delivered(publisher: Publisher) -> None:
    numbers(publisher, 0, range(10))
    with consume(publisher) as consumer:
        for threads in (0, -1):
            with pytest.raises(ValueError, match="threads must be at least 1"):
                consumer.run(no_handler, threads=threads)
        with pytest.raises(TypeError, match="threads must be"):
            consumer.run(no_handler, threads=1.5)  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError), match="on_failure"):
            consumer.run(no_handler, on_failure="sometimes")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="the handler must be a function"):
            consumer.run(None)  # type: ignore[arg-type]
