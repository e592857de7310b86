"""Where a task stands, for a log record: functions, files and lines, no values."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import anyio

_FRAMES = 25


def stack_where(matches: Callable[[FrameType], bool]) -> str | None:
    """Return the stack of the first task that has a matching frame, the outermost frame first.

    Without the values of variables: they may be payloads. None if no task has one.
    """
    for task in anyio.get_running_tasks():
        frames = list(_frames(task.coro))
        if any(matches(frame) for frame in frames):
            return _text(frames)
    return None


def stack_in(function: Callable[..., Any], **variables: Any) -> str | None:
    """Return the stack of a task that is in `function`, whose variables have these values."""
    code: CodeType = function.__code__

    def matches(frame: FrameType) -> bool:
        if frame.f_code is not code:
            return False
        known = frame.f_locals
        return all(known.get(name) is value for name, value in variables.items())

    return stack_where(matches)


def stack_of_task(id: int | None) -> str | None:
    """Return the stack of the task that has this `anyio.TaskInfo.id`."""
    for task in anyio.get_running_tasks():
        if task.id == id:
            return _text(list(_frames(task.coro)))
    return None


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
