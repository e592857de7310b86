"""`SyncFeedConsumer` where other things run: notebooks, forks, green threads."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable

import pytest
import trio

from feedapi_client import SQLiteCursorStore
from feedapi_client.runtime.loop_thread import NotOpenError
from feedapi_client.testing import Publisher
from tests.consumer.helpers import numbers
from tests.sync.helpers import consume, ns

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize("run", [asyncio.run, lambda coroutine: trio.run(lambda: coroutine)])
def test_it_works_where_an_event_loop_runs_as_in_a_notebook(
    publisher: Publisher, path: str, run: Callable[[object], object]
) -> None:
    numbers(publisher, 0, range(10))
    read: list[int] = []

    async def cell() -> None:
        with consume(publisher, store=SQLiteCursorStore(path), follow=False) as consumer:
            read.extend(ns(consumer))

    run(cell())
    assert read == list(range(10))


def in_child(work: Callable[[], object]) -> int:
    """Call a function in a forked process, as a worker of Celery's prefork pool does."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_after_a_fork_one_that_was_made_before_can_be_entered(
    publisher: Publisher, path: str
) -> None:
    numbers(publisher, 0, range(10))
    consumer = consume(publisher, store=SQLiteCursorStore(path), follow=False)

    def task() -> None:
        with consumer:
            assert ns(consumer) == list(range(10))

    assert in_child(task) == 0
    with consumer:
        assert ns(consumer) == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_after_a_fork_one_that_was_entered_before_refuses_and_can_be_left(
    publisher: Publisher, path: str
) -> None:
    numbers(publisher, 0, range(10))
    store = SQLiteCursorStore(path)
    with consume(publisher, store=store, limit={"max_batch_events": 5}) as consumer:
        events = iter(consumer)
        assert ns([next(events)]) == [0]

        def task() -> None:
            ns(next(events) for _ in range(4))  # those of the batch that was delivered before
            with pytest.raises(NotOpenError, match="opened in another process"):
                next(events)
            consumer.stop()
            consumer.__exit__(None, None, None)

        assert in_child(task) == 0
        assert ns(next(events) for _ in range(9)) == list(range(1, 10))
