"""Where a task or a thread stands, for a log record: functions, files and lines, no values."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anyio

_FRAMES = 25
_INNERMOST = 5


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


def place_of_thread(id: int) -> str:
    """Return where a thread is: its innermost frames in one line."""
    frame = frame_of_thread(id)
    if frame is None:
        return "an unknown place"
    return ", called by ".join(
        f"{each.name} ({Path(each.filename).name}:{each.lineno})"
        for each in reversed(traceback.extract_stack(frame, limit=_INNERMOST))
    )


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
