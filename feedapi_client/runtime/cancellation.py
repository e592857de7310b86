"""What is finished although the task around it is cancelled (R20), and what runs beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio


async def finish(
    call: Coroutine[Any, Any, None], *, hurry: Callable[[], None] | None = None
) -> None:
    """Await `call` to its end, and pass on a cancellation that came meanwhile.

    `hurry` is called when one comes, and may shorten what `call` waits for.

    A cancel scope of anyio can shield it, but nothing shields an asyncio task from a native
    cancellation (`asyncio.wait_for`, `Task.cancel`): that would end the call wherever it is. On
    asyncio it therefore runs in a task of its own. A caller that was cancelled natively gets no
    other error: the call has to deal with its failures itself.
    """
    if hurry is None:
        await _finish(call, lambda: None)
    else:
        await hurried(_finish(call, hurry), hurry)


async def hurried(work: Awaitable[None], hurry: Callable[[], None]) -> None:
    """Await `work`, which is shielded, and call `hurry` when the scope around it is cancelled."""
    over = False

    async def watch() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            if not over:
                hurry()

    async def to_the_end() -> None:
        nonlocal over
        try:
            await work
        finally:
            over = True

    await beside(watch, to_the_end())


async def _finish(call: Coroutine[Any, Any, None], hurry: Callable[[], None]) -> None:
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
                hurry()
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


async def beside(
    background: Callable[[], Coroutine[Any, Any, None]], work: Awaitable[None]
) -> None:
    """Await `work` while `background` runs, and then cancel that.

    Raises what `work` raises, without a group around it and with its cause.
    """
    error: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(background)
        try:
            await work
        except (Exception, KeyboardInterrupt) as failure:  # noqa: BLE001 - raised below
            error = failure
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error
