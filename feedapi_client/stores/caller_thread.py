"""A synchronous transaction is used in the thread that it belongs to.

A synchronous connection (`sqlite3.Connection`, psycopg's `Connection`, SQLAlchemy's `Session`,
Django's) belongs to the thread of the application that opened its transaction. A program with
`SyncFeedConsumer` calls ``batch.commit(transaction=...)`` in that thread, while the store's `save`
runs in the event loop of another one. So the loop lends itself the waiting thread:

1. The caller's thread waits in `CallerThread.wait` for the end of the call.
2. A store that is given a synchronous transaction does with it what it has to do in one ordinary
   function, and awaits ``in_callers_thread(function)``.
3. `wait` runs that function, in the caller's thread, and passes its result or its exception back.

Where nobody has lent a thread, as in a program with async, `in_callers_thread` calls the function
at once: there the caller's thread is the one of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_SECONDS = 0.5
"""How often a thread that waits looks for signals.

A signal that strikes between CPython's look for signals and the beginning of the wait does not end
that wait. Windows never interrupts a thread that waits without end.
"""


async def in_callers_thread(
    function: Callable[[], T],
    *,
    otherwise: Callable[[Callable[[], T]], Awaitable[T]] | None = None,
) -> T:
    """Call a function in the thread that the transaction of this save belongs to.

    Arguments:
        function: what the store does with the transaction.
        otherwise: awaited with the function where nobody has lent a thread; by default the function
            is called at once. For drivers that would block an event loop for long.

    Raises what the function raises, or `InterruptedCallError`.

    Cancellation: a function that has begun goes on, and its result is dropped. The call whose
    thread it is ends only after it.
    """
    caller = _lent.get()
    if caller is not None:
        return await caller.run(function)
    return function() if otherwise is None else await otherwise(function)


def is_thread_lent() -> bool:
    return _lent.get() is not None


class InterruptedCallError(Exception):
    """The thread did not finish the function: it was interrupted, as by Ctrl-C."""


class CallerThread:
    """A thread that waits for the event loop of another one, and runs functions meanwhile.

    Several threads may wait for the same: then each function is run by one of them.

    Ctrl-C may strike anywhere in the waiting thread, also when it has just taken something from
    the inbox, which is lost then. So what the thread and the loop have to know is kept beside it.

    Attributes:
        is_over: whether the threads may go on. Who sets it, instead of calling `over`, can't be
            interrupted; the threads see it a little later.

    Concurrency: `wait` and `wait_for_end` are called in the waiting thread, `over` in any, the
    others in the event loop. asyncio only.
    """

    def __init__(self) -> None:
        self._inbox: SimpleQueue[_Errand | None] = SimpleQueue()
        self._awaited: set[_Errand] = set()
        self.is_over = False
        self._refuses = False

    async def run(self, function: Callable[[], T]) -> T:
        errand = _Errand(function)
        self._awaited.add(errand)
        try:
            if self._refuses:
                errand.refuse()
            else:
                self._inbox.put(errand)
            result: T = await errand.result
        finally:
            self._awaited.discard(errand)
        return result

    def refuse(self) -> None:
        self._refuses = True
        for errand in self._awaited:
            errand.refuse()

    def over(self) -> None:
        self.is_over = True
        self._inbox.put(None)

    @contextmanager
    def lent(self) -> Iterator[None]:
        token = _lent.set(self)
        try:
            yield
        finally:
            _lent.reset(token)

    def wait(self) -> None:
        """Run functions until `over`. When an interruption is raised, `refuse` has to follow."""
        while (errand := self._next()) is not None:
            errand.run()
        self._inbox.put(None)  # for the next thread

    def wait_for_end(self) -> None:
        while not self.is_over:
            self._next()

    def _next(self) -> _Errand | None:
        while True:
            with suppress(Empty):
                return self._inbox.get(timeout=LOOK_SECONDS)
            if self.is_over:
                return None


_lent: ContextVar[CallerThread | None] = ContextVar("feedapi_caller_thread", default=None)


class _Errand:
    """A function to run in another thread, and its result, which the event loop waits for."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self._loop.create_future()

    def run(self) -> None:
        try:
            value = self._function()
        except Exception as error:  # noqa: BLE001 - raised in the event loop
            self._reply(self.result.set_exception, error)
        else:
            self._reply(self.result.set_result, value)

    def refuse(self) -> None:
        if not self.result.done():
            error = InterruptedCallError("the calling thread was interrupted")
            self.result.set_exception(error)

    def _reply(self, reply: Callable[[Any], None], value: Any) -> None:
        def deliver() -> None:
            if not self.result.done():  # it is if the wait was cancelled
                reply(value)

        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(deliver)
