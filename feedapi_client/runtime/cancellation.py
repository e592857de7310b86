"""What is finished although the task around it is cancelled (R20)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import anyio


async def finish(call: Coroutine[Any, Any, None]) -> None:
    """Await `call` to its end, and pass on a cancellation that came meanwhile.

    A cancel scope of anyio can shield it, but nothing shields an asyncio task from a native
    cancellation (`asyncio.wait_for`, `Task.cancel`): that would end the call wherever it is. On
    asyncio it therefore runs in a task of its own. A caller that was cancelled natively gets no
    other error: the call has to deal with its failures itself.
    """
    with anyio.CancelScope(shield=True):
        if not _in_asyncio_task():
            return await call
        task = asyncio.ensure_future(call)
        cancelled = None
        while not task.done():
            try:
                await _end_of(task)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is None:
            return task.result()
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report it as forgotten
        raise cancelled


async def _end_of(task: asyncio.Task[None]) -> None:
    """Wait until a task has ended. A cancellation of the caller leaves it alone.

    It does what `asyncio.wait([task])` does, which takes several times as long for one task.
    """
    ended = asyncio.get_running_loop().create_future()

    def end(_: object) -> None:
        if not ended.done():
            ended.set_result(None)

    task.add_done_callback(end)
    try:
        await ended
    finally:
        task.remove_done_callback(end)


def _in_asyncio_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False  # trio
