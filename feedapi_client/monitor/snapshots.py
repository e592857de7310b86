"""Snapshots of consumers, taken in their event loop, for readers in that or in another thread.

Another thread, which answers also while that event loop is blocked, never calls into it: it says
what it wants, and the event loop pushes that when it comes by. Its age says whether it does.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import StoreError
from feedapi_client.model import Partition
from feedapi_client.quarantine.quarantine_store import QuarantineStore, quarantine_beside
from feedapi_client.status import ConsumerStatus, Health, Problem, ProblemName

_MAX_AGE = 0.5
"""Seconds for which a snapshot is used again: its cost does not grow with the number of readers."""
_TIMEOUT = 2.0
"""Seconds after which an event loop that does not answer counts as blocked."""
_TICK = 0.05
"""Seconds after which the event loop looks whether something is wanted."""
_QUARANTINED_SHOWN = 20
_QUARANTINED_SECONDS = 10.0
"""Seconds for which the quarantined events that were read are shown again."""
_QUARANTINE_TIMEOUT = 5.0
_INNERMOST = 5

T = TypeVar("T")


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
    """Of all consumers; with a blocked event loop they are the last that could be taken."""

    snapshots: Sequence[Snapshot]
    taken: float
    blocked: Problem | None = None
    live: bool = True
    """False once the event loop has been blocked for longer than `Limits.stall_timeout`."""


def take_snapshots(consumers: Sequence[FeedConsumer]) -> list[Snapshot]:
    """Return a snapshot of each consumer, in their event loop."""
    return [
        Snapshot(datetime.now(UTC), each.key.name, each.status(), each.health(), each.topology())
        for each in consumers
    ]


class _Pushed(Generic[T]):
    """A value that is taken in one event loop, and read there or in another thread."""

    def __init__(self, take: Callable[[], Awaitable[T]], first: T) -> None:
        self._take = take
        self._error: Exception | None = None
        self.value = first
        self.taken = float("-inf")
        self.pushed = False
        """Whether the event loop pushes it. If not, it is read there."""
        self.wanted = False

    async def read(self, max_age: float, timeout: float) -> None:
        """Renew what is too old. Raises TimeoutError, and what taking it raised."""
        asked = time.monotonic()
        if asked - self.taken < max_age:
            return
        if not self.pushed:
            await self.renew()
        else:
            self.wanted = True
            with anyio.fail_after(timeout):
                while self.taken < asked:  # noqa: ASYNC110 - pushed by another thread
                    await anyio.sleep(_TICK / 2)
        if self._error is not None:
            raise self._error

    async def renew(self) -> None:
        self._error = None
        try:
            self.value = await self._take()
        except Exception as error:  # noqa: BLE001 - raised where it is read
            self._error = error
        self.taken = time.monotonic()


class Snapshots:
    """What a monitor shows of its consumers, at most half a second old."""

    def __init__(
        self, consumers: Sequence[FeedConsumer], quarantine: QuarantineStore | None
    ) -> None:
        if not consumers:
            raise TypeError("a monitor needs a consumer")
        self._consumers, self._quarantine = consumers, quarantine
        self._stall_timeout = min(consumer.limits.stall_timeout for consumer in consumers)
        self._thread = 0
        self._beat = 0.0
        """When the event loop last looked whether something is wanted."""
        self._snapshots = _Pushed[list[Snapshot]](self._take, [])
        self._quarantined = _Pushed[list[dict[str, Any] | None]](self._take_quarantined, [])

    def push(self, tasks: TaskGroup) -> None:
        """Serve a monitor in another thread, from the event loop of the consumers."""
        self._thread, self._beat = threading.get_ident(), time.monotonic()
        self._snapshots.pushed = self._quarantined.pushed = True
        tasks.start_soon(self._push, tasks)

    async def _push(self, tasks: TaskGroup) -> None:
        while True:
            self._beat = time.monotonic()
            for each in (self._snapshots, self._quarantined):
                if each.wanted:
                    each.wanted = False
                    tasks.start_soon(each.renew)
            await anyio.sleep(_TICK)

    async def look(self) -> ConsumerSnapshots:
        pushed = self._snapshots
        try:
            await pushed.read(_MAX_AGE, _TIMEOUT)
        except TimeoutError:
            seconds = time.monotonic() - self._beat
            where = _place_of_thread(self._thread)
            text = f"the event loop has not answered for {seconds:.0f} s; it is at {where}"
            since = datetime.now(UTC) - timedelta(seconds=seconds)
            problem = Problem(ProblemName.EVENT_LOOP_BLOCKED, None, since, text)
            live = seconds < self._stall_timeout
            return ConsumerSnapshots(pushed.value, pushed.taken, problem, live)
        return ConsumerSnapshots(pushed.value, pushed.taken)

    async def quarantined(self) -> Sequence[Mapping[str, Any] | None]:
        """Return the oldest events of each consumer, no payload; None where that can't be said."""
        try:
            timeout = 2 * _QUARANTINE_TIMEOUT
            await self._quarantined.read(_QUARANTINED_SECONDS, timeout)
        except TimeoutError:
            return [None] * len(self._consumers)
        return self._quarantined.value

    async def _take(self) -> list[Snapshot]:
        return take_snapshots(self._consumers)

    async def _take_quarantined(self) -> list[dict[str, Any] | None]:
        found: list[dict[str, Any] | None] = []
        for consumer in self._consumers:
            found.append(None)
            with anyio.move_on_after(_QUARANTINE_TIMEOUT):
                found[-1] = await self._read_quarantined(consumer)
        return found

    async def _read_quarantined(self, consumer: FeedConsumer) -> dict[str, Any] | None:
        try:
            store = self._quarantine or quarantine_beside(consumer.store)
            events = await store.page(consumer.key, limit=_QUARANTINED_SHOWN + 1)
        except StoreError:
            return None  # no quarantine beside these cursors, or nothing was put there ever
        shown = ("id", "partition", "error_type", "time")
        return {
            "more": len(events) > _QUARANTINED_SHOWN,
            "events": [
                {name: getattr(event, name) for name in shown}
                for event in events[:_QUARANTINED_SHOWN]
            ],
        }


def frame_of_thread(id: int) -> FrameType | None:
    """Return the frame in which a thread is; None when there is no such thread."""
    # CPython 3.11 makes the frames while it holds a lock that a thread needs to end. If garbage is
    # collected meanwhile, such a thread may get its turn: the process then stands still for ever
    # (gh-106883).
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(id)
    finally:
        if collects:
            gc.enable()


def _place_of_thread(id: int) -> str:
    frame = frame_of_thread(id)
    if frame is None:
        return "an unknown place"
    return ", called by ".join(
        f"{each.name} ({Path(each.filename).name}:{each.lineno})"
        for each in reversed(traceback.extract_stack(frame, limit=_INNERMOST))
    )
