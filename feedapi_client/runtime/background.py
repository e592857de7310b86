"""`Background`: the tasks of a consumer, beside the block of the application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio


class Background:
    """A task group in which each task has a cancel scope of its own.

    To end the tasks, these scopes are cancelled, and not the group. On asyncio a group that is
    cancelled also cancels the task that waits for it, which is the application's. When the
    application's own cancellation of that task comes in the same turn of the event loop, anyio
    (4.16) may take both for its own, and the application's is lost.
    """

    def __init__(self) -> None:
        self._group = anyio.create_task_group()
        self._scopes: set[anyio.CancelScope] = set()

    async def open(self) -> None:
        """Enter the group, in the task of the application."""
        await self._group.__aenter__()

    def start_soon(self, work: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Start a task."""
        scope = anyio.CancelScope()
        self._scopes.add(scope)

        async def run() -> None:
            try:
                with scope:
                    await work(*args)
            finally:
                self._scopes.discard(scope)

        self._group.start_soon(run, name=getattr(work, "__qualname__", str(work)))

    async def close(self) -> None:
        """Cancel the tasks and wait for them."""
        for scope in list(self._scopes):
            scope.cancel()
        await self._group.__aexit__(None, None, None)
