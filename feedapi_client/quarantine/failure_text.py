"""How a handler failed, in words that may be logged: the types of errors, and frames (R19).

The text of an exception may quote the event that it is about, or a password. It is kept in the
quarantine record only. Errors of this library say nothing that must not be shown.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from feedapi_client.causes import StrayCancellationError
from feedapi_client.errors import FeedError

_FRAMES = 20
_LINKS = 5
"""Exceptions of a chain of causes that are shown."""


def failure_line(error: BaseException) -> str:
    """Return the type of the error, and the text of one of this library."""
    name = type(error).__qualname__
    ours = isinstance(error, (FeedError, StrayCancellationError))
    return f"{name}: {error}" if ours else name


def failure_traceback(error: BaseException) -> str:
    """Return the error with its traceback, and those of its causes, the first one first."""
    parts = []
    for each in reversed(list(_chain(error))):
        frames = "".join(traceback.format_tb(each.__traceback__, limit=-_FRAMES))
        parts.append(f"Traceback (most recent call last):\n{frames}{failure_line(each)}")
    return "\n\nThen:\n\n".join(parts)


def _chain(error: BaseException) -> Iterator[BaseException]:
    each = error
    for _ in range(_LINKS):
        yield each
        if isinstance(each, BaseExceptionGroup):
            below: BaseException | None = each.exceptions[0]
        else:
            hidden = each.__suppress_context__ and each.__cause__ is None
            below = None if hidden else each.__cause__ or each.__context__
        if below is None:
            return
        each = below
