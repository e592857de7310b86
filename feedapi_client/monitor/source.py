"""The two places from which a monitor looks at consumers: their event loop, and another thread."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from inspect import isawaitable
from pathlib import Path
from typing import Any

import anyio

from feedapi_client.consumer import FeedConsumer
from feedapi_client.monitor.inbox import Inbox
from feedapi_client.monitor.snapshot import Observation, Snapshot, take
from feedapi_client.status import Problem, ProblemName

_MAX_AGE = 0.5
"""Seconds for which a snapshot is used again: its cost does not grow with the number of readers."""
_TIMEOUT = 2.0
"""Seconds after which an event loop that does not answer counts as blocked."""
_CALL_TIMEOUT = 10.0
_FRAMES = 12


class SameLoop:
    """The monitor runs in the event loop of the consumers, mounted in an application."""

    def __init__(self, consumers: Sequence[FeedConsumer]) -> None:
        self._consumers = consumers
        self._snapshots: list[Snapshot] = []
        self._taken = -_MAX_AGE

    async def observe(self) -> Observation:
        """See `Source.observe`."""
        now = time.monotonic()
        if now - self._taken >= _MAX_AGE:
            self._snapshots, self._taken = take(self._consumers), now
        return Observation(self._snapshots)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """See `Source.call`."""
        with anyio.fail_after(_CALL_TIMEOUT):
            result = function(*args)
            return await result if isawaitable(result) else result


class OtherThread:
    """The monitor runs in a thread of its own, on asyncio, and asks the consumers' event loop.

    So it answers also while that event loop is blocked, and says where.

    Arguments:
        inbox: runs in that event loop what is put into it.
        thread: the identifier of the thread that it runs in.
    """

    def __init__(self, consumers: Sequence[FeedConsumer], inbox: Inbox, thread: int) -> None:
        self._consumers = consumers
        self._inbox = inbox
        self._thread = thread
        self._stall_timeout = min(consumer.limits.stall_timeout for consumer in consumers)
        self._snapshots: list[Snapshot] = []
        self._taken = -_MAX_AGE
        self._unanswered: float | None = None
        self._lock = asyncio.Lock()

    async def observe(self) -> Observation:
        """See `Source.observe`."""
        async with self._lock:
            asked = time.monotonic()
            if asked - self._taken < _MAX_AGE:
                return Observation(self._snapshots)
            try:
                self._snapshots = await self._call(_TIMEOUT, take, self._consumers)
            except TimeoutError:
                if self._unanswered is None:
                    self._unanswered = asked
                return self._blocked(time.monotonic() - self._unanswered)
            self._taken, self._unanswered = time.monotonic(), None
            return Observation(self._snapshots)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """See `Source.call`."""
        return await self._call(_CALL_TIMEOUT, function, *args)

    async def _call(self, timeout: float, function: Callable[..., Any], *args: Any) -> Any:
        future = self._inbox.put(function, *args)
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout)

    def _blocked(self, seconds: float) -> Observation:
        where = stack(self._thread)
        text = f"the event loop has not answered for {seconds:.0f} s; it is at {where}"
        since = datetime.now(UTC) - timedelta(seconds=seconds)
        problem = Problem(ProblemName.EVENT_LOOP_BLOCKED, None, since, text)
        return Observation(self._snapshots, problem, live=seconds < self._stall_timeout)


def stack(thread: int) -> str:
    """Return where a thread is, innermost first: functions, files and lines, and no values."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "an unknown place"
    frames = traceback.extract_stack(frame, limit=_FRAMES)
    return ", called by ".join(
        f"{each.name} ({Path(each.filename).name}:{each.lineno})" for each in reversed(frames)
    )
