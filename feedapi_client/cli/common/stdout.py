"""Events to lines, and lines to stdout."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Sequence
from operator import attrgetter

import anyio
import anyio.to_thread
import orjson

from feedapi_client.model import Batch, Event

_payload = attrgetter("_payload")
_LOOK_EVERY = 0.5


class OutputClosedError(Exception):
    """Nobody reads stdout any more."""


class Lines:
    """Batches as NDJSON.

    ``{"partition":2,"data":…}``, with ``headers`` where an event has some; `raw` gives the payload alone. With `checkpoints` each batch is followed by
    ``{"partition":2,"cursor":"…"}``. All payloads byte for byte as the publisher sent them.
    """

    def __init__(self, *, raw: bool, checkpoints: bool) -> None:
        self._raw = raw
        self._checkpoints = checkpoints

    def of(self, batch: Batch, events: Sequence[Event]) -> bytes:
        """The lines of these events of the batch, and its checkpoint if these are all of them."""
        lines = b""
        if events:
            lines = (
                b"\n".join(map(_payload, events)) + b"\n"
                if self._raw
                else self._wrapped(batch.partition, events)
            )
        if self._checkpoints and len(events) == len(batch.events):
            lines += orjson.dumps({"partition": batch.partition, "cursor": batch.cursor}) + b"\n"
        return lines

    def _wrapped(self, partition: int, events: Sequence[Event]) -> bytes:
        if any(event._headers for event in events):
            return b"".join([self._with_headers(event) for event in events])
        lead = b'{"partition":%d,"data":' % partition
        return lead + (b"}\n" + lead).join(map(_payload, events)) + b"}\n"

    def _with_headers(self, event: Event) -> bytes:
        headers = b'"headers":' + orjson.dumps(event._headers) + b"," if event._headers else b""
        return b'{"partition":%d,%s"data":%s}\n' % (event.partition, headers, event.raw)


class Stdout:
    """Writes to stdout in a thread, so that a slow reader stops neither signals nor the progress display."""

    async def write(self, data: bytes) -> None:
        """Write and flush. Raises `OutputClosedError` when the reader is gone, OSError for anything else."""
        if data:
            await anyio.to_thread.run_sync(_write, data)

    async def watch(self) -> None:
        """Raise `OutputClosedError` once the reader of a pipe is gone, although there is nothing to write."""
        pipe = _pipe()
        if pipe is None:
            return
        poll = select.poll()
        poll.register(pipe, 0)
        while not poll.poll(0):  # noqa: ASYNC110 - nothing else tells
            await anyio.sleep(_LOOK_EVERY)
        raise OutputClosedError


def _write(data: bytes) -> None:
    descriptor = _descriptor()
    try:
        if descriptor is None:
            sys.stdout.buffer.write(data)
        else:
            _write_all(descriptor, data)
    except BrokenPipeError:
        raise OutputClosedError from None
    except OSError as error:
        raise OSError(error.errno, f"writing to stdout failed: {error.strerror}") from None


def _write_all(descriptor: int, data: bytes) -> None:
    # Not by sys.stdout, which writes less than it was given when Python runs unbuffered, and keeps what failed for a second try when it ends.
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:  # somebody else made the terminal non-blocking
            select.select([], [descriptor], [])


def _descriptor() -> int | None:
    """Of stdout; None where that is no file."""
    try:
        return sys.stdout.fileno()
    except (OSError, ValueError):
        return None


def _pipe() -> int | None:
    """The descriptor of stdout where it is a pipe whose reader can be watched."""
    descriptor = _descriptor()
    if descriptor is None or not hasattr(select, "poll"):
        return None
    mode = os.fstat(descriptor).st_mode
    return descriptor if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None
