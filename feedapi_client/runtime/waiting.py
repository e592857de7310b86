"""`Waits`: what a session waits for, each with a name, its last sign of life and its task.

And where a task stands, for a log record: functions, files and lines, no values.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import anyio

from feedapi_client.runtime.loop import coroutine_of, loop_clock, running_task
from feedapi_client.status import ProblemName

_FRAMES = 25


class Wait:
    """Something that is waited for.

    Attributes:
        name: the problem that it is when it lasts too long.
        text: what it is, for people, such as "saving cursors".
        partition: whose; None for what concerns all.
        began: when, on the clock of the event loop.
        task: whose stack says where it stands.
        restart: ends it, so that it is tried again; None for what must not be.
    """

    __slots__ = ("began", "name", "partition", "restart", "task", "text")

    def __init__(
        self,
        name: ProblemName,
        text: str,
        partition: int | None,
        began: float,
        restart: Callable[[], object] | None,
    ) -> None:
        self.name, self.text, self.partition, self.began = name, text, partition, began
        self.restart = restart
        self.task = running_task()


class Waits:
    def __init__(self) -> None:
        self.all: dict[Wait, None] = {}
        self._clock = loop_clock()

    @contextmanager
    def on(
        self,
        name: ProblemName,
        text: str,
        partition: int | None = None,
        *,
        restart: Callable[[], object] | None = None,
    ) -> Iterator[Wait]:
        wait = Wait(name, text, partition, self._clock(), restart)
        self.all[wait] = None
        try:
            yield wait
        finally:
            del self.all[wait]

    def of(self, name: ProblemName) -> Wait | None:
        return next((wait for wait in self.all if wait.name is name), None)


def stack_where(matches: Callable[[FrameType], bool]) -> str | None:
    """Return the stack of the first task that has a matching frame, the outermost frame first.

    Without the values of variables: they may be payloads. None if no task has one.
    """
    for task in anyio.get_running_tasks():
        frames = list(_frames(task.coro))
        if any(matches(frame) for frame in frames):
            return _text(frames)
    return None


def stack_of(task: Any) -> str | None:
    return None if task is None else _text(list(_frames(coroutine_of(task))))


def _frames(awaited: Any) -> Iterator[FrameType]:
    """The frames of a coroutine and of what it awaits.

    Async generators are left out where they hide behind the object that their ``__anext__`` gives.
    """
    while awaited is not None:
        for kind in ("cr", "gi", "ag"):
            if hasattr(awaited, f"{kind}_frame"):
                frame = getattr(awaited, f"{kind}_frame")
                if frame is not None:
                    yield frame
                below = "gi_yieldfrom" if kind == "gi" else f"{kind}_await"
                awaited = getattr(awaited, below)
                break
        else:
            return


def _text(frames: list[FrameType]) -> str:
    summary = traceback.StackSummary.extract(
        ((frame, frame.f_lineno) for frame in frames), capture_locals=False
    )
    return "".join(traceback.format_list(summary[-_FRAMES:]))
