"""How a handler failed, in words that may be logged: the types of errors, and frames (R19)."""

from __future__ import annotations

import traceback
from itertools import takewhile

from feedapi_client.causes import StrayCancellationError
from feedapi_client.errors import FeedError

_FRAMES = 20
_LINKS = 5
"""Exceptions of a chain of causes that are shown."""
_WAY_TO_HANDLER = {"feedapi_client", "anyio", "asyncio", "tenacity", "contextlib"}
"""Packages whose frames before the handler's own say nothing about its failure."""


class Note(str):
    """A note of this library at an error of the application, which may have notes of its own."""

    __slots__ = ()


def failure_line(error: BaseException) -> str:
    name = type(error).__qualname__
    ours = isinstance(error, (FeedError, StrayCancellationError))
    notes = [each for each in getattr(error, "__notes__", ()) if isinstance(each, Note)]
    return "; ".join([f"{name}: {error}" if ours else name, *notes])


def failure_traceback(error: BaseException) -> str:
    """Return the traceback from the handler on, below those of the causes."""
    parts: list[str] = []
    each: BaseException | None = error
    while each is not None and len(parts) < _LINKS:
        found = traceback.extract_tb(each.__traceback__)
        steps = traceback.walk_tb(each.__traceback__)
        packages = (frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in steps)
        way = len([*takewhile(_WAY_TO_HANDLER.__contains__, packages)])
        frames = traceback.format_list((found[way:] or found)[-_FRAMES:])
        head = "Traceback (most recent call last):\n"
        parts.insert(0, f"{head}{''.join(frames)}{failure_line(each)}")
        if isinstance(each, BaseExceptionGroup):
            each = each.exceptions[0]
        else:
            each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return "\n\nThen:\n\n".join(parts)
