"""How a command runs and fails: one line on stderr and an exit code.

Set the environment variable FEEDAPI_DEBUG to see tracebacks instead.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from typer.core import TyperGroup

from feedapi_client.cli.escape import shown, shown_line
from feedapi_client.cli.exit_codes import (
    FAILURE,
    INTERNAL_ERROR,
    INTERRUPTED,
    UNREACHABLE,
    USAGE,
)
from feedapi_client.cli.std_streams import discard, flush_stdout, prepare_streams
from feedapi_client.errors import FeedError

T = TypeVar("T")

_URL = re.compile(r"([A-Za-z][\w+.-]*://)[^\s'\")]+")
"""An argument in the wrong place that a usage error quotes: it may hold a password."""


class CommandError(Exception):
    """Ends a command with this text as its one line on stderr, and exit code 1."""


class UnreachableError(CommandError):
    """Ends a command because the feed can't be reached, with the exit code for that."""


class UsageError(CommandError):
    """Ends a command because of what its command line names, with the exit code for that."""


class CommandGroup(TyperGroup):
    """A group of commands that reports each error on one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Errors are printed and become an exit code."""
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
        """Parse the arguments, run the command, and exit.

        A usage error is printed on one line too. Typer alone would draw a box around it.
        """
        if not standalone_mode:
            return super().main(args, prog_name, standalone_mode=False, **extra)
        prepare_streams()
        code = self._run(args, prog_name, **extra)
        if (error := flush_stdout()) is not None and not _is_closed_output(error):
            line, failure = explain(error)
            say(line)
            code = code or failure
        sys.exit(code)

    def _run(self, args: Sequence[str] | None, prog_name: str | None, **extra: Any) -> int:
        """Parse the arguments, run the command, and return the exit code."""
        try:
            _check_encoding(sys.argv[1:] if args is None else args)
            code = super().main(args, prog_name, standalone_mode=False, **extra)
        except typer.Abort as abort:
            say("aborted")
            # The prompt turns Ctrl-C into this exception; "no" and the end of stdin give it too.
            interrupted = isinstance(abort.__context__, KeyboardInterrupt)
            return INTERRUPTED if interrupted else FAILURE
        except Exception as error:
            if not _is_usage_error(error):
                raise
            return _report_usage_error(error)
        return code if isinstance(code, int) else 0


def _check_encoding(args: Sequence[str]) -> None:
    """Raise `typer.BadParameter` for an argument whose bytes are not valid UTF-8.

    Python keeps such bytes as surrogates, which neither a URL nor a database takes.
    """
    for argument in args:
        if not argument.isascii() and any("\ud800" <= char <= "\udfff" for char in argument):
            raise typer.BadParameter(f"an argument is not valid UTF-8: {shown(argument)}")


def explain(error: Exception) -> tuple[str, int]:
    """Return the line to print for an error, and the exit code."""
    if isinstance(error, UnreachableError):
        return str(error), UNREACHABLE
    if isinstance(error, UsageError):
        return str(error), USAGE
    if isinstance(error, (FeedError, CommandError)):
        return str(error), FAILURE
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return f"{error.filename}: {error.strerror}" if error.filename else reason, FAILURE
    # Only the type of any other error: its text may hold a payload or a secret.
    line = f"internal error: {type(error).__name__} (set FEEDAPI_DEBUG=1 to see where)"
    return line, INTERNAL_ERROR


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if isinstance(error, (typer.Exit, typer.Abort)) or _is_usage_error(error):
            raise
        if _is_closed_output(error):
            # A reader such as `head` has all it wants. That is no failure, as for `feedapi cat`.
            discard(sys.stdout)
            raise typer.Exit from None
        if os.environ.get("FEEDAPI_DEBUG"):
            raise
        line, code = explain(error)
        say(line)
        raise typer.Exit(code) from None


def _is_closed_output(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EPIPE


def _is_usage_error(error: Exception) -> bool:
    # Typer uses its own copy of click or the installed one. The exceptions of both have this
    # method, but no common class.
    return hasattr(error, "format_message")


def _report_usage_error(error: Any) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "feedapi"
    if type(error).__name__ == "NoArgsIsHelpError":
        # With rich, the help is printed when this error is made. Without rich, it is the message.
        print(error.format_message().strip(), file=sys.stderr)
        return USAGE
    text = _URL.sub(r"\1...", error.format_message().rstrip("."))
    say(f"{text} ({path} --help says more)")
    return int(error.exit_code)


def say(text: str) -> None:
    """Print a line on stderr, in one piece: log records of other threads come before or after.

    A stderr that can't be written changes nothing.
    """
    try:
        sys.stderr.write(f"feedapi: {shown_line(text)}\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def report(text: str) -> None:
    """Print what was done. It is done, and no error, where stdout can't be written."""
    try:
        print(text, flush=True)
    except OSError as error:
        discard(sys.stdout)
        if not _is_closed_output(error):
            say(f"stdout can't be written ({error.strerror}), but this is done: {text}")


def run_async(function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run a coroutine function on asyncio and return its result.

    Raises what the function raises. Of an exception group, the first exception is raised, because
    a command reports one error.
    """
    import anyio

    try:
        return anyio.run(function, *args)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
