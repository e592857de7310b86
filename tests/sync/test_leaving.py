"""Leaving a `SyncFeedConsumer`, at any time and in any way: nothing is left running."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import httpx
import pytest

from feedapi_client import (
    AuthenticationError,
    NegotiationError,
    SQLiteCursorStore,
    SyncFeedConsumer,
)
from feedapi_client.testing import Publisher
from tests.consumer.helpers import RETRY, SHORT, fill, numbers
from tests.sync.helpers import consume, in_thread, ns, wait_until

pytestmark = pytest.mark.usefixtures("nothing_is_left")


class LeaveError(Exception):
    """Of the application."""


def test_before_anything_is_read(publisher: Publisher) -> None:
    numbers(publisher, 0, range(100))
    for _ in range(3):
        with consume(publisher):
            pass


@pytest.mark.parametrize("follow", [True, False])
def test_in_the_middle_of_an_iteration(wide: Publisher, path: str, follow: bool) -> None:
    fill(wide, 200)
    with consume(wide, store=SQLiteCursorStore(path), follow=follow) as consumer:
        for number, _ in enumerate(consumer):
            if number == 120:
                break
        for batch in consumer.batches():
            batch.commit()
            break


def test_by_an_exception_in_each_way_to_consume(wide: Publisher) -> None:
    fill(wide, 200)

    def fail(_: object) -> None:
        raise LeaveError

    for threads in (1, 4):
        with pytest.raises(LeaveError), consume(wide) as consumer:
            consumer.run(fail, threads=threads)
    for way in (iter, SyncFeedConsumer.batches):
        with pytest.raises(LeaveError), consume(wide) as consumer:
            fail(next(way(consumer)))


def test_at_the_end_and_after_an_error_of_the_feed(publisher: Publisher) -> None:
    numbers(publisher, 0, range(10))
    with consume(publisher, follow=False) as consumer:
        assert len(ns(consumer)) == 10
    publisher.fail(401, times=None)
    with pytest.raises(AuthenticationError), consume(publisher, retry=SHORT) as consumer:
        ns(consumer)


def test_after_an_entry_that_failed(publisher: Publisher) -> None:
    publisher.fail(400, on="discovery", times=None)
    consumer = consume(publisher)
    for _ in range(2):
        with pytest.raises(NegotiationError):
            consumer.__enter__()
    assert not consumer.health().ready


def test_while_another_thread_waits(publisher: Publisher) -> None:
    ended: list[BaseException] = []
    with consume(publisher) as consumer:

        def wait() -> None:
            try:
                next(iter(consumer))
            except RuntimeError as error:
                ended.append(error)

        thread = in_thread(wait)
        wait_until(lambda: publisher.counters["fetch"])
    thread.join()
    assert "not open" in str(ended[0])


def test_while_handlers_run_in_threads_of_another_threads_run(wide: Publisher) -> None:
    fill(wide, 100)
    started, go_on = threading.Semaphore(0), threading.Event()

    def handle(_: object) -> None:
        started.release()
        go_on.wait()

    with consume(wide) as consumer:

        def run() -> None:
            with pytest.raises(RuntimeError, match="not open"):
                consumer.run(handle, threads=2)

        thread = in_thread(run)
        started.acquire()

        def let_go() -> None:
            wait_until(lambda: consumer._loop is None)
            go_on.set()

        in_thread(let_go)
    thread.join()


def test_the_callers_http_client_is_closed_with_it(publisher: Publisher) -> None:
    numbers(publisher, 0, range(3))
    http = httpx.AsyncClient()
    with consume(publisher, http=http, follow=False) as consumer:
        assert ns(consumer) == [0, 1, 2]
        assert not http.is_closed
    assert http.is_closed


def test_a_consumer_that_is_forgotten_ends_by_itself(publisher: Publisher) -> None:
    numbers(publisher, 0, range(10))
    consumer = consume(publisher)
    consumer.__enter__()
    iterator = iter(consumer)
    del consumer
    assert ns([next(iterator)]) == [0]
    del iterator
    gc.collect()  # the fixture waits for the end of the thread


# asyncio's debug mode warns about every callback that takes 0.1 s, as on a machine that is busy.
NEVER_LEFT = """
import logging
import sys
from feedapi_client import SQLiteCursorStore, SyncFeedConsumer

logging.getLogger("asyncio").setLevel(logging.ERROR)
consumer = SyncFeedConsumer(sys.argv[1], store=SQLiteCursorStore(sys.argv[2]))
consumer.__enter__()
print(next(iter(consumer)).json())
"""


def test_a_program_that_never_leaves_it_ends(publisher: Publisher, path: str) -> None:
    numbers(publisher, 0, range(10))
    assert publisher.url is not None
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", NEVER_LEFT, publisher.url, path],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "'n': 0" in done.stdout


def test_one_thread_serves_a_consumer_while_it_is_open(wide: Publisher) -> None:
    before = set(threading.enumerate())
    with consume(wide, retry=RETRY) as consumer:
        fill(wide, 50)
        next(consumer.batches())
        names = {thread.name for thread in set(threading.enumerate()) - before}
    assert "feedapi default" in names
