"""Write data to stdout, and notice when its reader goes away."""

from __future__ import annotations

import os
import re
import select
import stat
import sys

import anyio
import anyio.to_thread

from feedapi_client.cli.escape import escape_json

_POLL_INTERVAL = 0.5
_CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f\x7f]")


class OutputClosedError(Exception):
    """The reader of stdout has closed it."""


async def write(data: bytes) -> None:
    """Write data to stdout and flush it.

    Runs in a thread, so that a slow reader does not hold up signals and the progress line. Raises
    `OutputClosedError` when the reader is gone, and OSError for any other failure.
    """
    if data:
        await anyio.to_thread.run_sync(_write, for_terminal(data) if sys.stdout.isatty() else data)


async def watch_reader() -> None:
    """Wait until the reader of a pipe is gone, then raise `OutputClosedError`.

    Without this, a reader that goes away is noticed only at the next write. Returns at once where
    stdout is no pipe.
    """
    pipe = _pipe()
    if pipe is None:
        return
    poll = select.poll()
    poll.register(pipe, 0)
    while not poll.poll(0):  # noqa: ASYNC110 - the event loop can't wait for this event
        await anyio.sleep(_POLL_INTERVAL)
    raise OutputClosedError


def for_terminal(data: bytes) -> bytes:
    r"""Return lines of JSON with ``\u`` escapes for what a terminal would act upon.

    A payload may hold such characters: JSON forbids only those below U+0020 within a string.
    """
    if data.isascii() and not _CONTROL.search(data):
        return data
    lines = data.decode("utf-8", "backslashreplace").split("\n")
    return "\n".join(escape_json(line, "utf-8") for line in lines).encode()


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
    # Not with sys.stdout: when Python runs unbuffered it writes only a part of the data, and after
    # a failure it keeps the rest and tries again when Python exits.
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another process made the terminal non-blocking
            select.select([], [descriptor], [])


def _descriptor() -> int | None:
    """The file descriptor of stdout, None where stdout is no file."""
    try:
        return sys.stdout.fileno()
    except (OSError, ValueError):
        return None


def _pipe() -> int | None:
    """The file descriptor of stdout, None where it is no pipe or the system can't watch it."""
    descriptor = _descriptor()
    if descriptor is None or not hasattr(select, "poll"):
        return None
    mode = os.fstat(descriptor).st_mode
    return descriptor if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None
