"""Calls that are cancelled after a few steps, by anyio or natively, and made again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeVar

import anyio

from feedapi_client.runtime.loop import finish
from tests.simulation.clock import sleep

T = TypeVar("T")


class RandomCancellation:
    """Cancels a share of the calls that are made through it.

    Arguments:
        share: from 0 to 1.
        native: whether they are cancelled natively (asyncio), or by anyio's scopes.
    """

    def __init__(self, share: float, random: Random, *, native: bool) -> None:
        self._share = share
        self._random = random
        self._native = native

    async def call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await `call()`, which is now and then cancelled after a few steps and made again."""
        while self._random.random() < self._share:
            steps = self._random.randint(0, 20)
            ended = await (self._natively if self._native else self._by_scope)(call, steps)
            if ended:
                return ended[0]
        return await call()

    async def _by_scope(self, call: Callable[[], Awaitable[T]], steps: int) -> list[T]:
        ended: list[T] = []
        failed: list[Exception] = []

        async def cancel_later() -> None:
            await self._few_steps(steps)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel_later)
            try:
                ended.append(await call())
            except Exception as error:
                failed.append(error)
            tasks.cancel_scope.cancel()
        if failed:
            raise failed[0]
        return ended

    async def _natively(self, call: Callable[[], Awaitable[T]], steps: int) -> list[T]:
        async def called() -> list[T]:
            try:
                return [await call()]
            except StopAsyncIteration as end:
                raise _Ended from end

        task = asyncio.ensure_future(called())
        try:
            await self._few_steps(steps, task)
        finally:
            try:
                if not task.done():
                    task.cancel()
                    await finish(_wait_for(task))  # it may finish a save first, as R20 says
            finally:
                if not task.cancelled():
                    task.exception()  # looked at, also where this call itself is cancelled
        try:
            return [] if task.cancelled() else task.result()
        except _Ended:
            raise StopAsyncIteration from None

    async def _few_steps(self, steps: int, task: asyncio.Future[Any] | None = None) -> None:
        """Let other tasks run for some steps, or until `task` has ended."""
        for _ in range(steps):
            if task is not None and task.done():
                return
            await sleep(0.003 if self._random.random() < 0.25 else 0.0)


async def _wait_for(task: asyncio.Future[list[T]]) -> None:
    await asyncio.wait([task])


class _Ended(Exception):  # noqa: N818 - not an error: no coroutine can raise StopAsyncIteration
    """The iteration is at its end."""
