"""A command is a function of a dataclass, whose fields are its options.

A field whose type is a dataclass includes the options of that one. The class variable `panel` is
the title above them in the help. With the class variable `environment` each option of the dataclass
takes its value from a variable FEEDAPI_OPTION where the command line has none. What options say
together is checked in `__post_init__`, which raises ValueError.
"""

from __future__ import annotations

import dataclasses
import errno
import inspect
import logging
import math
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from typer.core import TyperCommand, TyperGroup

from feedapi_client.cli.terminal import OnceAMinute, discard, say, shown, write_records
from feedapi_client.errors import FeedError

if TYPE_CHECKING:
    from feedapi_client.consumer import FeedConsumer

T = TypeVar("T")

FAILURE, USAGE, HANDLER_FAILED, FENCED, UNREACHABLE, INTERNAL_ERROR = 1, 2, 3, 4, 69, 70
SIGNALLED = 128
"""Plus the number of a signal: ended by it."""
EXIT_CODES = {
    "0": "done: the end of the feed, or ended by a signal with all in flight committed; also when "
    "the reader of the output closed the pipe",
    "1": "the feed, the cursor store or the output failed, a check or a proof did, an event failed "
    "again, or a question was answered with no",
    "2": "the command line is wrong, or what it names can't be used: a URL, a file, a time, a "
    "handler, the number of partitions",
    "3": "run: the handler failed",
    "4": "run: another consumer of this name has taken over",
    "69": "doctor: the feed can't be reached, or refuses the credentials",
    "70": "a bug in this program; FEEDAPI_DEBUG=1 shows where",
    "130, 143": "ended by Ctrl-C or SIGTERM; of run: what was in flight was cancelled after "
    "--grace, and is read again",
}
REMOVED = {
    "cat --checkpoints": "--format with %c prints the cursor behind each event",
    "cat --format %k": "give %s to jq, which finds a field of a payload",
    "cat --format %K": "give %s to jq, which finds a field of a payload",
    "cat --from TIME": "'cursors rewind --to TIME' takes back a copy of the store, for cat --store",
    "cat --journal": "feedapi run --journal DAYS keeps a history, cat goes on with one",
    "cat --key": "jq finds a field of a payload; the key of --cert is --cert-key",
    "cursors --feed": "give the feed as an argument, without --feed",
    "cursors ls --url": "give the feed's URL as an argument, and --lag",
    "cursors upgrade": "'cursors move' moves what is stored under another key",
    "cursors export --output": "stdout goes to a file by > FILE",
    "cursors export -o": "stdout goes to a file by > FILE",
    "demo --plain": "the demo prints lines of text only",
    "doctor --max-bytes": "--max-requests bounds what an examination asks and receives",
    "leases --feed": "give the feed as an argument, without --feed",
    "quarantine --feed": "give the feed as an argument, without --feed",
    **{
        f"relay --{each.replace('_', '-')}": f"it is --stream-option {each}=VALUE"
        for each in (
            *("group", "retention_bytes", "retention_messages", "retention_seconds"),
            *("cleaner_seconds", "segment_bytes", "segment_seconds", "compact"),
            *("compact_goroutines", "auto_pause_seconds", "auto_pause_unless_subscribed"),
            "encryption",
        )
    },
    "relay --no-compact": "it is --stream-option compact=false",
    "relay --no-encryption": "it is --stream-option encryption=false",
    "relay --auto-pause-always": "it is --stream-option auto_pause_unless_subscribed=false",
    "run --start": "it is --from, as in every command",
    "run --workers": "start each process by itself, with --share",
    "serve --entities": "Publisher of feedapi_client.testing publishes events of your own",
    "serve --max-events": "--rate 0 publishes no more than the history",
    "status --name": "a monitor shows the consumers of its process",
    "status --store": "'cursors ls URL --lag --store STORE' shows how far a consumer came",
    "status --v1-partitions": "'cursors ls URL --lag --store STORE' asks such a feed",
}
"""What does the work of commands and options that are gone."""

HELP = {"help_option_names": ["-h", "--help"]}
_annotated: Any = Annotated
_LOG_FORMAT = re.compile(r"--log-format[= ](\w+)")
_PARAGRAPH = re.compile(r"(?<!\n)\n(?!\n)")
_URL = re.compile(r"([A-Za-z][\w+.-]*://)[^\s'\")]+")
"""An argument in the wrong place that a usage error quotes: it may hold a password."""


class CommandError(Exception):
    """Ends a command with this text as its one line on stderr, and with an exit code."""

    def __init__(self, text: str, exit_code: int = FAILURE) -> None:
        super().__init__(text)
        self.exit_code = exit_code


# ---------------------------------------------------------------------- options as fields


def option(
    metavar: str = "",
    help: str = "",
    *,
    default: Any = None,
    flags: str = "",
    parse: Callable[[str], Any] | None = None,
    make: Any = typer.Option,
    **settings: Any,
) -> Any:
    """Return a field that is an option, by default with the name of the field.

    Arguments:
        default: ``...`` for an option that has to be given.
        parse: makes the value, each one of a list. A ValueError says what is wrong with it.
        settings: what else Typer takes, such as `min` and `envvar`.
    """
    settings |= {"metavar": metavar or None, "help": help}

    def parsed(value: Any) -> Any:
        with _usage_errors():  # a default may be of any type
            return parse(value) if parse is not None and isinstance(value, str) else value

    if parse is not None:
        settings["parser"] = parsed
    metadata = {"cli": (make, flags.split(), settings)}
    given = {} if default is ... else {"default": default}
    return dataclasses.field(metadata=metadata, **given)


def argument(metavar: str, help: str = "", *, default: Any = ..., **settings: Any) -> Any:
    """Return a field that is an argument. See `option`."""
    return option(metavar, help, default=default, make=typer.Argument, **settings)


def flag(help: str, flags: str = "", **settings: Any) -> Any:
    """Return a field that is an option without a value, off by default. See `option`."""
    return option(help=help, default=False, flags=flags, **settings)


@contextmanager
def _usage_errors() -> Iterator[None]:
    try:
        yield
    except (FeedError, ValueError) as error:
        raise typer.BadParameter(getattr(error, "message", str(error)).lstrip(": ")) from None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number of this kind")
    return value


def _one_of(words: Sequence[str]) -> Callable[[str], str]:
    def chosen(text: str) -> str:
        if text not in words:
            raise typer.BadParameter(f"{text!r} is none of {', '.join(words)}")
        return text

    return chosen


def parameters(kind: type) -> Iterator[inspect.Parameter]:
    """Return a parameter for each option of the dataclass and of those that it includes."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from parameters(hints[field.name])
            continue
        make, flags, settings = field.metadata["cli"]
        settings = {"rich_help_panel": getattr(kind, "panel", None), **settings}
        hint = hints[field.name]
        kinds = [each for each in (hint, *get_args(hint)) if get_origin(each) is Literal]
        if words := [word for each in kinds for word in get_args(each)]:
            hint, settings = str | None, {**settings, "parser": _one_of(words)}
            settings["metavar"] = settings["metavar"] or "|".join(words)
        if make is typer.Option and not flags:
            flags = [f"--{field.name.replace('_', '-')}"]
        if getattr(kind, "environment", False):
            words = re.findall(r"\w+", flags[0].partition("/")[0] if flags else settings["metavar"])
            settings.setdefault("envvar", "_".join(["FEEDAPI", *words]).upper())
        info = make(*flags, callback=_finite, show_envvar=False, **settings)
        missing = field.default is dataclasses.MISSING
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if missing else field.default,
            annotation=_annotated[hint, info],
        )


def build(kind: type, values: dict[str, Any]) -> Any:
    """Return the dataclass with these values, and those that it includes."""
    hints, given = get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            given[field.name] = build(hints[field.name], values)
        else:
            given[field.name] = values[field.name]
    with _usage_errors():
        return kind(**given)


# ---------------------------------------------------------------------- commands


def command(
    *examples: str, group: typer.Typer | None = None, **settings: Any
) -> Callable[[Callable[[Any], Any]], typer.Typer]:
    """Make a command of a function of a dataclass, with these examples of its arguments.

    Its docstring is the help, its result the exit code. The command gets its name, in the group or
    by itself.
    """

    def made(function: Callable[[Any], Any]) -> typer.Typer:
        hints = get_type_hints(function)
        (kind,) = (hint for name, hint in hints.items() if name != "return")

        def call(**values: Any) -> None:
            if code := _run(function, build(kind, values)):
                raise typer.Exit(code)

        found = [*parameters(kind)]
        call.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
        # Typer asks for both, and takes the annotations of the signature where this has none.
        call.__annotations__ = {}
        own = group if group is not None else typer.Typer(add_completion=False)
        own.command(
            cls=FeedCommand,
            help=_PARAGRAPH.sub(" ", inspect.getdoc(function) or ""),
            epilog=_below(examples, found, rule=getattr(kind, "environment", False)),
            **{"name": function.__name__.rstrip("_"), "context_settings": HELP, **settings},
        )(call)
        return own

    return made


def _below(examples: Sequence[str], found: list[inspect.Parameter], *, rule: bool) -> str:
    """Return what stands below the options. A paragraph that begins with \\b is not wrapped."""
    lines = ["\b", "Examples:", *(f"feedapi {example}" for example in examples)]
    names = [info.envvar for each in found for info in each.annotation.__metadata__ if info.envvar]
    text = f"From the environment, where the command line says nothing: {', '.join(names)}."
    if rule:
        text = "Each option has an environment variable: --give-up-after has FEEDAPI_GIVE_UP_AFTER."
    return "\n".join(lines if examples else []) + (f"\n\n{text}" if names else "")


def command_group(help: str) -> typer.Typer:
    """Return a group, for `command`."""
    # With a callback it is a group, even of one command.
    settings: Any = {"callback": lambda: None, "no_args_is_help": True, "add_completion": False}
    return typer.Typer(cls=CommandGroup, help=help, context_settings=HELP, **settings)


class _PlainFlags:
    """A command whose help shows no type for what takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return found


class FeedCommand(_PlainFlags, TyperCommand):
    """A command whose first argument may come from the environment, although others follow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments. Without a URL among them the next one would be taken for it."""
        arguments = [each for each in self.params if each.param_type_name == "argument"]
        url = os.environ.get("FEEDAPI_URL") if len(arguments) > 1 else None
        web = any(each.lower().startswith(("http://", "https://")) for each in args)
        if url and not web and getattr(arguments[0], "envvar", None) == "FEEDAPI_URL":
            args = [url, *args]
        return super().parse_args(ctx, args)


class CommandGroup(_PlainFlags, TyperGroup):
    """The group of all commands: an error is one line on stderr, without a box around it."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Any:
        """Parse the arguments, run the command, and exit."""
        extra["standalone_mode"] = False
        words = [*(sys.argv[1:] if args is None else args)]
        try:
            for each in words:
                if any("\ud800" <= char <= "\udfff" for char in each):
                    raise typer.BadParameter(f"an argument is not valid UTF-8: {shown(each)}")
            code = super().main(words, prog_name, **extra)
        except typer.Abort as abort:
            say("aborted")
            # The prompt turns Ctrl-C into this exception; "no" and the end of stdin give it too.
            interrupted = isinstance(abort.__context__, KeyboardInterrupt)
            code = SIGNALLED + signal.SIGINT if interrupted else FAILURE
        except Exception as error:
            if not _is_usage_error(error):
                raise
            given = _LOG_FORMAT.findall(" ".join(words)) or [os.environ.get("FEEDAPI_LOG_FORMAT")]
            if words[:1] == ["run"] and given[-1] == "json":
                write_records(json=True)
            code = _report_usage_error(error)
        try:
            sys.stdout.flush()
        except OSError as error:
            discard(sys.stdout)
            if error.errno != errno.EPIPE:
                line, failure = explain(error)
                say(line)
                code = code or failure
        sys.exit(code)


def _run(function: Callable[[Any], Any], options: Any) -> Any:
    """Call the function. Errors are one line on stderr, and become an exit code."""
    try:
        with _said_once():
            if inspect.iscoroutinefunction(function):
                return run_async(function, options)
            return function(options)
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT
    except Exception as error:
        if isinstance(error, (typer.Exit, typer.Abort)) or _is_usage_error(error):
            raise
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            discard(sys.stdout)  # a reader such as `head` has all it wants
            return 0
        if os.environ.get("FEEDAPI_DEBUG"):
            raise
        line, code = explain(error)
        say(line, logging.ERROR)
        return code


@contextmanager
def _said_once() -> Iterator[None]:
    """Write warnings of the library on stderr, unless --verbose or `run` write all records."""
    handler, repeated = logging.lastResort, OnceAMinute()
    if handler is not None:
        handler.addFilter(repeated)
    try:
        yield
    finally:
        if handler is not None:
            handler.removeFilter(repeated)


def run_async(function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run a coroutine function on asyncio. Raises the first exception of a group."""
    import anyio

    with _first_error():
        return anyio.run(function, *args)


@contextmanager
def _first_error() -> Iterator[None]:
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def explain(error: Exception) -> tuple[str, int]:
    """Return the line to print for an error, and the exit code."""
    if isinstance(error, (FeedError, CommandError)):
        return str(error), getattr(error, "exit_code", FAILURE)
    if isinstance(error, ImportError) and "pip install" in str(error):
        return str(error), FAILURE
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return f"{error.filename}: {reason}" if error.filename else reason, FAILURE
    # Only the type of any other error: its text may hold a payload or a secret.
    line = f"internal error: {type(error).__name__} (set FEEDAPI_DEBUG=1 to see where)"
    return line, INTERNAL_ERROR


@contextmanager
def refused(what: str = "") -> Iterator[None]:
    """Make a ValueError within the block one of the command line, about `what` is named there."""
    try:
        yield
    except ValueError as error:
        raise CommandError(f"{what}{error}", USAGE) from None


def _is_usage_error(error: Exception) -> bool:
    # Typer uses its own copy of click or the installed one. The exceptions of both have this
    # method, but no common class.
    return hasattr(error, "format_message")


def _report_usage_error(error: Any) -> int:
    path = "feedapi" if getattr(error, "ctx", None) is None else error.ctx.command_path
    if type(error).__name__ == "NoArgsIsHelpError":
        return USAGE  # with rich, the help is printed when this error is made
    text = error.format_message().rstrip(".")
    gone = getattr(error, "option_name", None) or text.removeprefix("No such command ").strip("'")
    words = path.partition(" ")[2]
    for place in (words, words.partition(" ")[0]):
        if (successor := REMOVED.get(f"{place} {gone}")) is not None:
            text = f"{gone} is gone: {successor}"
    text = _URL.sub(r"\1...", text)
    say(f"{text} ({path} --help says more)", logging.ERROR)
    return int(error.exit_code)


class Stopping:
    """What SIGINT and SIGTERM stop: `consumer`, or the block while it is None."""

    number = 0
    """The first signal that came, 0 without one."""
    consumer: FeedConsumer | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of what a signal cut short."""
        return SIGNALLED + self.number if self.number else 0

    def end(self, number: signal.Signals, scope: Any, grace: float | None) -> None:
        """Take a signal."""
        first, self.number = not self.number, self.number or number
        if self.consumer is None:
            scope.cancel()
        elif first:
            if grace is not None:
                say(f"{number.name}: ends after what is in flight, in at most {grace:g} s")
            self.consumer.stop(grace=grace)
        elif grace is not None and not self.consumer.cut_short:
            self.consumer.stop(grace=0)
        else:
            os._exit(SIGNALLED + number)  # sys.exit() waits for a write that may be blocked


@asynccontextmanager
async def stopping(grace: float | None = None) -> AsyncIterator[Stopping]:
    """End a consumer within the block by SIGINT and SIGTERM.

    The first ends it after what is in flight, the second cancels that, the third exits. Without
    `grace` the end takes as long as it needs, and the second exits. Of an exception group, the
    first exception is raised.
    """
    import anyio

    stop = Stopping()

    async def watch(scope: anyio.CancelScope, *, task_status: Any) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                stop.end(number, scope, grace)

    with _first_error():
        async with anyio.create_task_group() as tasks:
            if threading.current_thread() is threading.main_thread() and sys.platform != "win32":
                await tasks.start(watch, tasks.cancel_scope)
            yield stop
            tasks.cancel_scope.cancel()
