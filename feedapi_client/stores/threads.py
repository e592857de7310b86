"""Worker threads for drivers that block."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
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
    """When nobody waits for the thread any more, it rolls back."""
    left = threading.Event()

    def call() -> T:
        with begin() as connection:
            result = work(connection)
            if left.is_set():
                raise InterruptedError("nobody waits for this transaction any more")
            return result

    try:
        return await in_thread(call, abandon=True)
    except BaseException:
        left.set()
        raise
