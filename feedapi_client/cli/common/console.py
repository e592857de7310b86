"""Write styled text to the terminal."""

from __future__ import annotations

import errno
import os
import sys

from rich.console import Console
from rich.text import Text

from feedapi_client.cli.common.escape import shown, shown_line

_WIDTH_WITHOUT_TERMINAL = 200


class _Console(Console):
    """A console that reports a closed pipe as a write to it does. Rich's own exits with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr.

    Where that is no terminal, lines are wide enough for tables not to be wrapped.
    """
    stream = sys.stderr if stderr else sys.stdout
    return _Console(
        stderr=stderr, highlight=False, width=None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL
    )


def plain(text: object, style: str = "") -> Text:
    """Return text from elsewhere, shown as it is: without markup and control characters, cut."""
    return Text(shown(text), style=style)


def plain_line(text: object, style: str = "") -> Text:
    """Return a whole line as `plain` does, cut far later."""
    return Text(shown_line(text), style=style)
