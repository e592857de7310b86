"""How a handler failed, in words that may be logged: the types of errors, and frames (R19).

The text of an exception may quote the event that it is about, or a password. It is kept in the
quarantine record only. Errors of this library say nothing that must not be shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

import anyio
import tenacity

from feedapi_client.causes import StrayCancellationError
from feedapi_client.errors import FeedError
from feedapi_client.model import FeedKey
from feedapi_client.protocol.text import counted

_FRAMES = 20
_LINKS = 5
"""Exceptions of a chain of causes that are shown."""
_WAY_TO_HANDLER = (
    *(str(Path(inspect.getfile(each)).parent) for each in (anyio, asyncio, tenacity)),
    inspect.getfile(contextlib),
    str(Path(__file__).parents[1]),
)
"""Files whose frames before the handler's own say nothing about its failure."""


class _Note(str):
    """A note of this library at an error of the application, which may have notes of its own."""

    __slots__ = ()


def note_limit(error: Exception, feed: FeedKey, partition: int, limit: int) -> None:
    where = f"feed {feed.url}, partition {partition}"
    many = counted(limit, "event in a row was", "events in a row were")
    error.add_note(_Note(f"{where}: {many} quarantined before this one"))


def failure_line(error: BaseException) -> str:
    name = type(error).__qualname__
    ours = isinstance(error, (FeedError, StrayCancellationError))
    notes = [each for each in getattr(error, "__notes__", ()) if isinstance(each, _Note)]
    return "; ".join([f"{name}: {error}" if ours else name, *notes])


def failure_traceback(error: BaseException) -> str:
    """Return the error with its traceback, and those of its causes, the first one first.

    A traceback begins at the handler, where the error came through it.
    """
    parts = []
    for each in reversed(list(_chain(error))):
        found = traceback.extract_tb(each.__traceback__)
        own = dropwhile(lambda frame: frame.filename.startswith(_WAY_TO_HANDLER), found)
        frames = "".join(traceback.format_list([*own][-_FRAMES:] or found[-_FRAMES:]))
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
