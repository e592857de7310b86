"""Calls that an application makes in threads, run in the loop's own thread at a virtual time.

A clock that jumps ahead whenever every task waits would not wait for a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from feedapi_client.testing.simulator.loop import LONGEST_CALL


@contextmanager
def threads_in_virtual_time(random: Random) -> Iterator[None]:
    """Run what is passed to `anyio.to_thread.run_sync` inline, at a time drawn from `random`.

    Not thread-safe: the function is replaced for the whole process until the block ends.
    """

    async def run_sync(
        func: Callable[..., Any],
        *args: Any,
        abandon_on_cancel: bool = False,
        cancellable: bool | None = None,
        limiter: anyio.CapacityLimiter | None = None,
    ) -> Any:
        abandoned = abandon_on_cancel or bool(cancellable)
        await anyio.lowlevel.checkpoint()
        async with limiter or anyio.Lock():
            # As with a real thread: a call that has begun is finished, and its result may come
            # after its caller was cancelled.
            with anyio.CancelScope(shield=not abandoned):
                await anyio.sleep(random.uniform(0.0, LONGEST_CALL))
                result = func(*args)
                await anyio.sleep(random.uniform(0.0, LONGEST_CALL))
                return result
        raise AssertionError("unreachable: nothing here cancels these scopes")

    module: Any = anyio.to_thread
    original, module.run_sync = module.run_sync, run_sync
    try:
        yield
    finally:
        module.run_sync = original
