"""The application's processes: how they end, and start again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import anyio
import anyio.lowlevel

from feedapi_client.errors import (
    AmbiguousLineageError,
    CommitOrderError,
    FeedError,
    FencedError,
    LineageError,
    LostPartitionError,
)
from tests.simulation.clock import sleep
from tests.simulation.loop import OWNER, process_tasks
from tests.simulation.oracle import Oracle
from tests.simulation.process import RESTART_SECONDS, HandlerError, Process
from tests.simulation.shared import SharedSession
from tests.simulation.store import ConnectionLostError, SimulatedDatabase
from tests.simulation.trace import Trace

__all__ = ["Process", "ProcessEvent", "Supervisor"]

ProcessEvent = Literal[
    "kill",
    "down",
    "cancel",
    "cancel-natively",
    "stop",
    "stop-in-time",
    "leave",
    "reenter",
    "pause",
    "freeze",
    "rest",
]
_NEVER_RIGHT = (CommitOrderError, LineageError, LostPartitionError)
"""Errors that no fault of the simulation justifies."""
_END_SECONDS = 600.0
"""Within this time a process that was cancelled has ended. Its last save may take long."""
_LAST_STEPS = 20
"""Steps in which the last tasks of a process may end: those that close abandoned generators."""


class Supervisor:
    """Starts a process, and another one whenever it has ended.

    Arguments:
        start: makes the next process.
        running: all processes that run at present, also those of other supervisors.
        native: whether tasks can be cancelled natively (asyncio).
    """

    def __init__(
        self,
        start: Callable[[], Process],
        running: list[Process],
        *,
        oracle: Oracle,
        database: SimulatedDatabase,
        trace: Trace,
        native: bool,
        now: Callable[[], float],
    ) -> None:
        self.process: Process | None = None
        self.over = False
        self.rightly_stopped = False
        """Whether a process ended with an error that no consumer could avoid: see `_failed`."""
        self.calm_since = float("inf")
        """When all faults had ended; some time later no error is justified any more."""
        self._start = start
        self._running = running
        self._oracle = oracle
        self._database = database
        self._trace = trace
        self._native = native
        self._now = now
        self._down_until = 0.0
        self._scope = anyio.CancelScope()
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Live until `end`."""
        while not self.over:
            while self._now() < self._down_until:
                await sleep(self._down_until - self._now())
            process = self.process = self._start()
            self._trace.add("a process starts")
            calm = self._oracle.calm
            if await self.live(process) and calm and process.reads_to_the_end:
                if self._oracle.is_ambiguous(process.positions()):
                    self.rightly_stopped = True  # parked (R9)
                else:
                    self._oracle.read_to_the_end(process.positions())
            self.process = None
            await sleep(RESTART_SECONDS)

    async def live(self, process: Process) -> bool:
        """Run one process. Return whether it ended by itself and without an error."""
        ended = False
        self._begin(process)
        try:
            with anyio.CancelScope() as self._scope:
                try:
                    if self._native:
                        ended = await self._in_a_task(process)
                    else:
                        await process.run()
                        ended = True
                except Exception as error:
                    self._failed(process, error)
        finally:
            self._running.remove(process)
            self._oracle.traffic(process.transport)
        if self._native:
            await self._look_for_tasks(process)
        return ended

    def _begin(self, process: Process) -> None:
        self._running.append(process)
        if len(self._running) > 1:
            for one in self._running:
                one.overlaps = True

    async def _look_for_tasks(self, process: Process) -> None:
        """Check that none is left. trio has none outside of the block that started them."""
        for _ in range(_LAST_STEPS):
            if not process_tasks(process.number):
                return
            await anyio.lowlevel.checkpoint()
        for task in process_tasks(process.number):
            self._oracle.violated("leak", f"a task is still running: {task!r}")

    async def _in_a_task(self, process: Process) -> bool:
        token = OWNER.set(process.number)
        self._task = asyncio.ensure_future(process.run())
        OWNER.reset(token)
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            await self._end(self._task)
            error = None if self._task.cancelled() else self._task.exception()
            if isinstance(error, Exception):
                self._failed(process, error)  # it came first, and nobody else looks at it
            raise
        await self._end(self._task)
        if self._task.cancelled():
            return False
        self._task.result()
        return True

    async def _end(self, task: asyncio.Task[None]) -> None:
        """Cancel the task and wait for its end. Once has to be enough (R20)."""
        with anyio.CancelScope(shield=True):
            task.cancel()
            _, going_on = await asyncio.wait([task], timeout=_END_SECONDS)
            if going_on:
                self._oracle.violated("cancel", "a process that was cancelled goes on")
            while going_on:
                task.cancel()
                _, going_on = await asyncio.wait([task], timeout=_END_SECONDS)

    def _failed(self, process: Process, error: Exception) -> None:
        self._trace.add("the process ends with {}: {}", type(error).__name__, error)
        if process.session.dead:
            return
        if isinstance(error, AmbiguousLineageError):
            if self._oracle.is_ambiguous(process.positions()):
                self.rightly_stopped = True
                return
            if process.overlaps:
                return  # the other one's saves, which this one does not know, would fence it
        if type(error) is LineageError and self._is_unlisted(process):
            return
        if type(error) is LineageError and process.hears_of_a_rollback:
            return  # R11: a deployment that takes longer than `refused_for` looks like one
        if isinstance(error, LineageError) and self._oracle.rolled_back(process.positions()):
            return  # R11: and what was published meanwhile may have no known ancestor
        if isinstance(error, CommitOrderError) and process.commits_too_late:
            return
        careless = process.rolled_back
        by_itself = not self._database.failures and not process.overlaps and not careless
        fenced = isinstance(error, FencedError) and (by_itself or process.shares)
        expected = isinstance(error, (FeedError, ConnectionLostError, HandlerError))
        # Fenced by a process that ran beside it, it can learn that late: from its next save.
        overtaken = isinstance(error, FencedError) and not process.shares
        overtaken = overtaken and (process.overlaps or self._oracle.changed)
        late = self._now() > self.calm_since and not overtaken
        if fenced or late or not expected or isinstance(error, _NEVER_RIGHT):
            self._oracle.violated("error", f"{type(error).__name__}: {error}")

    def _is_unlisted(self, process: Process) -> bool:
        """Return whether a partition that the application names need not be listed (any more)."""
        named = {*(process.partitions or ()), *(process.lineage or ())}
        known = process.positions()
        # Another process of the name may have saved them after this one had loaded its positions.
        loaded = () if process.overlaps else known
        if not self._oracle.is_unlisted(named, loaded, self._now()):
            return False
        gone = self._oracle.chosen is not None and self._oracle.is_gone(named, known)
        self.rightly_stopped = self.rightly_stopped or gone
        return True

    # ------------------------------------------------------------------ what happens to it

    def happens(self, what: ProcessEvent, seconds: float = 0.0) -> None:
        """Let something happen to the process that runs now, if one does."""
        process = self.process
        if what == "rest":
            self._down_until = self._now() + seconds
        if process is None:
            return
        if what == "rest":
            self._scope.cancel()
        elif what in ("kill", "down"):
            process.die()
            self._scope.cancel()
            self._down_until = self._now() + seconds
        elif what == "cancel-natively" and self._task is not None:
            self._task.cancel()
        elif what in ("cancel", "cancel-natively"):
            self._scope.cancel()
        elif what == "freeze" and isinstance(process.session, SharedSession):
            process.paused_until = process.session.frozen_until = self._now() + seconds
        elif what == "pause":
            process.paused_until = self._now() + 10.0
        elif process.consumer is not None:
            process.leaving = what if what == "leave" or what == "reenter" else None
            process.stop(seconds if what == "stop-in-time" else None)

    def end(self) -> None:
        """Cancel the process, and start none any more."""
        self.over = True
        self._scope.cancel()
