"""Threads: worker threads for drivers that block, and the one that a transaction belongs to.

With `SyncFeedConsumer` the thread of the application that opened a transaction waits in
`CallerThread.wait`, while the store's `save` runs in the event loop of another one, which sends it
functions to run: ``in_callers_thread(function)``. Where nobody has lent a thread, the function is
called at once.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

T = TypeVar("T")
Connection = TypeVar("Connection")

_limiter: RunVar[anyio.CapacityLimiter] = RunVar("feedapi_store_threads")


async def in_thread(function: Callable[[], T], *, abandon: bool = False) -> T:
    """Call a function in a worker thread.

    Not in one of anyio's limited number: the application's handlers may have taken all of those,
    and wait for this call. A cancellation, a native one too, waits for the thread unless `abandon`
    is set: the caller rolls back, and what the thread would write then is a new transaction's.
    """
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(math.inf)
        _limiter.set(limiter)
    call = partial(anyio.to_thread.run_sync, abandon_on_cancel=abandon, limiter=limiter)
    return await (call(function) if abandon else _to_its_end(call(function)))


async def _to_its_end(call: Coroutine[Any, Any, T]) -> T:
    try:
        natively = asyncio.current_task() is not None
    except RuntimeError:
        natively = False  # trio
    if not natively:
        return await call
    thread, cancelled = asyncio.ensure_future(call), None
    with anyio.CancelScope(shield=True):
        while not thread.done():
            try:
                await asyncio.wait([thread])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is None:
        return thread.result()
    thread.exception()  # looked at, so that asyncio does not report it as forgotten
    raise cancelled


async def transact_in_thread(
    begin: Callable[[], AbstractContextManager[Connection]], work: Callable[[Connection], T]
) -> T:
    """Roll back when nobody waits for the thread any more.

    Cancellation: the transaction is not committed later. A native one waits for a commit that has
    begun; a cancel scope, such as that of a time limit, does not.
    """
    decided = threading.Lock()  # held by what comes first: the commit, or the end of the wait
    over = threading.Event()

    def call() -> T:
        try:
            with begin() as connection:
                result = work(connection)
                if not decided.acquire(blocking=False):
                    raise InterruptedError("nobody waits for this transaction any more")
                return result
        finally:
            over.set()

    try:
        return await in_thread(call, abandon=True)
    except BaseException:
        if not decided.acquire(blocking=False):
            while not over.is_set() and anyio.current_effective_deadline() > -math.inf:
                with suppress(asyncio.CancelledError):
                    await in_thread(over.wait, abandon=True)
        raise


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
    """Ctrl-C may lose what was taken from the inbox: what must be known is kept beside it."""

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
