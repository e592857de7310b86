"""Prepare stdin, stdout and stderr of a command, and flush what was printed."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

from feedapi_client.cli.exit_codes import FAILURE

_STDERR = 2
_ERRORS = "backslashreplace"


def prepare_streams() -> None:
    """Let stdout and stderr take any text, whatever their encoding, and make stdin readable.

    A character that the encoding does not have is escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)
    if sys.stdin is None:  # closed by the caller
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for the whole process


def encodable(text: str) -> str:
    """Return the text with what stdout's encoding does not have escaped, as a print would.

    For what is written by others, who may take another encoding: Typer's help.
    """
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, _ERRORS).decode(encoding)


def flush_stdout() -> OSError | None:
    """Flush stdout. Return the error of an output that can't be written, None for success."""
    try:
        sys.stdout.flush()
    except OSError as error:
        discard(sys.stdout)
        return error
    return None


def discard(stream: TextIO) -> None:
    """Drop what the stream still holds, because Python would write it once more at its exit."""
    with suppress(OSError, ValueError):
        descriptor = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


def require_streams() -> None:
    """Exit with code 1 when the caller closed stdout. A closed stderr becomes the null device.

    Another file could get the free descriptor, and be written to instead.
    """
    if sys.stderr is None:
        null = os.open(os.devnull, os.O_WRONLY)
        if null != _STDERR:
            os.dup2(null, _STDERR)
            os.close(null)
        sys.stderr = open(_STDERR, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stderr.write("feedapi: stdout is closed\n")
        raise SystemExit(FAILURE)
