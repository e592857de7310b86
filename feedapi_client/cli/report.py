"""How the command line ends: one line on stderr and an exit code, never a traceback.

Set the environment variable FEEDAPI_DEBUG to see tracebacks.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from typer.core import TyperGroup

from feedapi_client.errors import FeedError

T = TypeVar("T")

FAILED = 1
"""The feed, the cursor store or the output failed, or the demo's proof did."""
USAGE = 2
"""The command line is wrong."""
INTERRUPTED = 130
"""Ctrl-C; 143 after SIGTERM."""
BROKEN = 70
"""A fault of this program."""

EXIT_CODES = """Exit codes: 0 done; 1 the feed, the cursor store or the output failed, or a proof did; 2 the command line is wrong;
130 ended by Ctrl-C, 143 by SIGTERM, in both cases after the batch in hand; 70 a fault of this program (FEEDAPI_DEBUG=1 shows where)."""


class CommandError(Exception):
    """Ends a command with this line."""


class Commands(TyperGroup):
    """A group of commands whose errors are one line each."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what it raises becomes a line and an exit code."""
        with _reported():
            return super().invoke(ctx)

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        *,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Parse and run. Usage errors are one line too, which Typer alone would draw a box around."""
        if not standalone_mode:
            return super().main(args, prog_name, standalone_mode=False, **extra)
        try:
            code = super().main(args, prog_name, standalone_mode=False, **extra)
        except typer.Abort:
            _complain("aborted")
            sys.exit(FAILED)
        except Exception as error:
            # Typer brings its own copy of click, or uses the installed one: both have this face.
            if not hasattr(error, "format_message"):
                raise
            sys.exit(_usage(error))
        sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "feedapi"
    if type(error).__name__ == "NoArgsIsHelpError":
        # Making the error has printed the help; without rich the help is its message.
        print(error.format_message().strip(), file=sys.stderr)
        return USAGE
    _complain(f"{error.format_message().rstrip('.')} ({path} --help says more)")
    return int(error.exit_code)


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if _passes(error) or os.environ.get("FEEDAPI_DEBUG"):
            raise
        line, code = explain(error)
        _complain(line)
        raise typer.Exit(code) from None


def _passes(error: Exception) -> bool:
    return isinstance(error, (typer.Exit, typer.Abort)) or hasattr(error, "format_message")


def explain(error: Exception) -> tuple[str, int]:
    """The line for an error, and its exit code."""
    if isinstance(error, (FeedError, CommandError)):
        return str(error), FAILED
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        return "the output was closed", FAILED
    if isinstance(error, OSError):
        return (
            f"{error.filename}: {error.strerror}"
            if error.filename
            else f"{error.strerror or error}",
            FAILED,
        )
    # Of anything else only the type: its text may hold what must not be shown.
    return f"internal error: {type(error).__name__} (set FEEDAPI_DEBUG=1 to see where)", BROKEN


def _complain(text: str) -> None:
    print(f"feedapi: {one_line(text)}", file=sys.stderr)


def one_line(text: str) -> str:
    """The text without line breaks and without anything that a terminal would obey."""
    return "".join(
        char if char.isprintable() else " " if char.isspace() else f"\\x{ord(char):02x}"
        for char in " ".join(text.split())
    )


def run(function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run a coroutine function on asyncio; of the errors of a task group the first is raised."""
    import anyio

    try:
        return anyio.run(function, *args)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
