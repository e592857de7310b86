"""`InThreads`: the same step for several feeds. Imports no Spark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

_MAX_THREADS = 16

T = TypeVar("T")
R = TypeVar("R")


class InThreads:
    """Does a step for several feeds at the same time, so that they don't wait for each other.

    Arguments:
        name: of the threads, which end with the object.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    def map(self, step: Callable[[T], R], feeds: Sequence[T]) -> list[R]:
        """Return what the step returns for each feed, in their order.

        Raises what the step raises for the first of them that fails.
        """
        if len(feeds) < 2:
            return [step(feed) for feed in feeds]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_MAX_THREADS, self._name)
        running = [self._pool.submit(step, feed) for feed in feeds]
        wait(running)  # no step goes on when an error is raised
        return [one.result() for one in running]
