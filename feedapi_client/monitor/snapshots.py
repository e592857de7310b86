"""Snapshots of consumers, and the two places where a monitor takes them.

Those are the event loop of the consumers, and another thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from inspect import isawaitable
from typing import Any, Protocol

import anyio
import anyio.lowlevel

from feedapi_client.consumer import FeedConsumer
from feedapi_client.model import Partition
from feedapi_client.runtime.waiting import place_of_thread
from feedapi_client.status import ConsumerStatus, Health, Problem, ProblemName

_MAX_AGE = 0.5
"""Seconds for which a snapshot is used again: its cost does not grow with the number of readers."""
_TIMEOUT = 2.0
"""Seconds after which an event loop that does not answer counts as blocked."""
_CALL_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One consumer at one moment."""

    time: datetime
    name: str
    status: ConsumerStatus
    health: Health
    topology: Mapping[int, Partition]


@dataclass(frozen=True, slots=True)
class ConsumerSnapshots:
    """All consumers of a monitor, and what is wrong with the event loop that they run in.

    With a blocked event loop the snapshots are the last ones that could be taken.
    """

    snapshots: Sequence[Snapshot]
    blocked: Problem | None = None
    live: bool = True
    """False once the event loop has been blocked for longer than `Limits.stall_timeout`."""


def take_snapshots(consumers: Sequence[FeedConsumer]) -> list[Snapshot]:
    """Return a snapshot of each consumer. To be called in their event loop."""
    return [
        Snapshot(
            datetime.now(UTC),
            consumer.key.name,
            consumer.status(),
            consumer.health(),
            consumer.topology(),
        )
        for consumer in consumers
    ]


class Source(Protocol):
    """Gives access to consumers from where the monitor runs."""

    async def observe(self) -> ConsumerSnapshots:
        """Return snapshots that are at most half a second old."""
        ...

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a function, or coroutine function, called in their event loop.

        Raises TimeoutError when that takes too long.
        """
        ...


class SameLoop:
    """The monitor runs in the event loop of the consumers, mounted in an application."""

    def __init__(self, consumers: Sequence[FeedConsumer]) -> None:
        self._consumers = consumers
        self._snapshots: list[Snapshot] = []
        self._taken = -_MAX_AGE

    async def observe(self) -> ConsumerSnapshots:
        """See `Source.observe`."""
        now = time.monotonic()
        if now - self._taken >= _MAX_AGE:
            self._snapshots, self._taken = take_snapshots(self._consumers), now
        return ConsumerSnapshots(self._snapshots)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """See `Source.call`."""
        with anyio.fail_after(_CALL_TIMEOUT):
            result = function(*args)
            return await result if isawaitable(result) else result


class Inbox:
    """Takes functions from any thread, and runs them in the event loop that it was made in.

    A portal of anyio does so too, but its calls block the calling thread for as long as the event
    loop is blocked.
    """

    def __init__(self) -> None:
        self._loop: Any = anyio.lowlevel.current_token().native_token
        self._calls: deque[Callable[[], Any]] = deque()
        self._filled = anyio.Event()

    def put(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have a function, or coroutine function, called. To be called from another thread."""
        future: Future[Any] = Future()
        self._calls.append(partial(_answer, future, function, *args))
        if isinstance(self._loop, asyncio.AbstractEventLoop):
            self._loop.call_soon_threadsafe(self._wake)
        else:
            self._loop.run_sync_soon(self._wake)
        return future

    async def run(self) -> None:
        """Call the functions, each in a task of its own, until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                await self._filled.wait()
                self._filled = anyio.Event()
                while self._calls:
                    tasks.start_soon(self._calls.popleft())

    def _wake(self) -> None:
        self._filled.set()


async def _answer(future: Future[Any], function: Callable[..., Any], *args: Any) -> None:
    """Call a function for another thread, which may have given up."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args)
        future.set_result(await result if isawaitable(result) else result)
    except Exception as error:  # noqa: BLE001 - raised there
        future.set_exception(error)
    finally:
        if not future.done():
            future.set_exception(TimeoutError("the monitor is being closed"))


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

    async def observe(self) -> ConsumerSnapshots:
        """See `Source.observe`."""
        async with self._lock:
            asked = time.monotonic()
            if asked - self._taken < _MAX_AGE:
                return ConsumerSnapshots(self._snapshots)
            try:
                self._snapshots = await self._call(_TIMEOUT, take_snapshots, self._consumers)
            except TimeoutError:
                if self._unanswered is None:
                    self._unanswered = asked
                return self._blocked(time.monotonic() - self._unanswered)
            self._taken, self._unanswered = time.monotonic(), None
            return ConsumerSnapshots(self._snapshots)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """See `Source.call`."""
        return await self._call(_CALL_TIMEOUT, function, *args)

    async def _call(self, timeout: float, function: Callable[..., Any], *args: Any) -> Any:
        future = self._inbox.put(function, *args)
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout)

    def _blocked(self, seconds: float) -> ConsumerSnapshots:
        where = place_of_thread(self._thread)
        text = f"the event loop has not answered for {seconds:.0f} s; it is at {where}"
        since = datetime.now(UTC) - timedelta(seconds=seconds)
        problem = Problem(ProblemName.EVENT_LOOP_BLOCKED, None, since, text)
        return ConsumerSnapshots(self._snapshots, problem, live=seconds < self._stall_timeout)
