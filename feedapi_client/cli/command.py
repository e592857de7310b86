"""A command is a function, whose keyword parameters are its options.

A parameter, or a field, whose type is a dataclass includes the options of that one. Its class
variable `panel` is the title above them in the help. With the class variable `environment` each
option of the dataclass takes its value from a variable FEEDAPI_OPTION where the command line has
none. What options say together is checked in `__post_init__`, which raises ValueError.
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
import typing
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from feedapi_client.cli.terminal import OnceAMinute, discard, say, write_records
from feedapi_client.errors import FeedError

if TYPE_CHECKING:
    from feedapi_client.consumer import FeedConsumer

T = TypeVar("T")
Pairs = dict[Any, Any] | None
"""The type of a repeatable option each value of which is parsed to a part of a dictionary."""

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
_GONE = """
cat --checkpoints: --format with %c prints the cursor behind each event
cat --format %k, cat --format %K: give %s to jq, which finds a field of a payload
cat --from TIME: 'cursors rewind --to TIME' takes back a copy of the store, for cat --store
cat --journal: feedapi run --journal DAYS keeps a history, cat goes on with one
cat --key: jq finds a field of a payload; the key of --cert is --cert-key
cursors ls --url: give the feed's URL as an argument, and --lag
cursors upgrade: 'cursors move' moves what is stored under another key
cursors --feed: give the feed as an argument, without --feed
cursors export --output, -o: stdout goes to a file by > FILE
demo --dialect: feedapi serve --dialect is a publisher of each dialect
demo --plain: the demo prints lines of text only
demo --seed: feedapi_client.testing.simulate has histories that repeat
doctor --all: --json has all checks, and why one was not done
doctor --max-bytes: --max-requests bounds what an examination asks and receives
doctor --partition, -p: of many partitions it reads some of each kind
leases --feed: give the feed as an argument, without --feed
quarantine --feed: give the feed as an argument, without --feed
quarantine show --raw: the payload is .data of what 'quarantine show' prints
relay --no-compact: it is --stream-option compact=false
relay --no-encryption: it is --stream-option encryption=false
relay --auto-pause-always: it is --stream-option auto_pause_unless_subscribed=false
run --concurrency: it is --max-concurrency, which counts events where there is a --key
run --start: it is --from, as in every command
run --workers: start each process by itself, with --share
serve --bearer-env: Publisher(bearer=...) of feedapi_client.testing asks for a token
serve --entities: Publisher of feedapi_client.testing publishes events of your own
serve --max-events: --rate 0 publishes no more than the history
serve --rotate-every: Publisher of feedapi_client.testing has rotate_token()
status --name: a monitor shows the consumers of its process
status --store: 'cursors ls URL --lag --store STORE' shows how far a consumer came
status --v1-partitions: 'cursors ls URL --lag --store STORE' asks such a feed
"""
_STREAM_OPTIONS = (
    "group retention_bytes retention_messages retention_seconds cleaner_seconds segment_bytes "
    "segment_seconds compact compact_goroutines encryption auto_pause_seconds "
    "auto_pause_unless_subscribed"
)
REMOVED = {
    each if " " in each else f"{words.partition(' --')[0]} {each}": successor
    for words, successor in (line.split(": ", 1) for line in _GONE.strip().split("\n"))
    for each in words.split(", ")
} | {
    f"relay --{name.replace('_', '-')}": f"it is --stream-option {name}=VALUE"
    for name in _STREAM_OPTIONS.split()
}
"""What does the work of commands and options that are gone."""

HELP = {"help_option_names": ["-h", "--help"]}
_LOG_FORMAT = re.compile(r"--log-format[= ](\w+)")
_PARAGRAPH = re.compile(r"(?<!\n)\n(?!\n)")
_URL = re.compile(r"([A-Za-z][\w+.-]*://)[^\s'\")]+")
"""An argument in the wrong place that a usage error quotes: it may hold a password."""


class CommandError(Exception):
    """Ends a command with this text as its one line on stderr, and with an exit code."""

    def __init__(self, text: str, exit_code: int = FAILURE) -> None:
        super().__init__(text)
        self.exit_code = exit_code


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
    """Return a field, or default of a parameter, that is an option, by default of its name.

    It has to be given where the default is ``...``. `parse` makes the value, each one of a list; a
    ValueError says what is wrong with it. `settings` are what else Typer takes, such as `min`.
    """

    def parsed(value: Any) -> Any:
        with _usage_errors():  # a default may be of any type
            return parse(value) if parse is not None and isinstance(value, str) else value

    settings |= {"metavar": metavar or None, "help": help}
    settings |= {"parser": parsed} if parse is not None else {}
    given = {} if default is ... else {"default": default}
    return dataclasses.field(metadata={"cli": (make, flags.split(), settings)}, **given)


def argument(metavar: str, help: str = "", *, default: Any = ..., **settings: Any) -> Any:
    return option(metavar, help, default=default, make=typer.Argument, **settings)


def flag(help: str, flags: str = "", **settings: Any) -> Any:
    """Return an option without a value, off by default. See `option`."""
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


def _declared(kind: Callable[..., Any]) -> Iterator[tuple[str, Any, Any]]:
    hints, own = typing.get_type_hints(kind), getattr(kind, "__dataclass_fields__", {})
    for name, parameter in inspect.signature(kind).parameters.items():
        yield name, hints[name], own.get(name, parameter.default)


_annotated: Any = Annotated


def parameters(kind: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    for name, hint, field in _declared(kind):
        if dataclasses.is_dataclass(hint):
            yield from parameters(typing.cast("type", hint))
            continue
        make, flags, settings = field.metadata["cli"]
        settings, named = {"show_envvar": False, **settings}, settings["metavar"]
        if make is typer.Option:
            flags = flags or [f"--{name.replace('_', '-')}"]
            settings.setdefault("rich_help_panel", getattr(kind, "panel", None))
            named = flags[0].partition("/")[0]
        if getattr(kind, "environment", False):
            variable = "_".join(["FEEDAPI", *re.findall(r"\w+", named)])
            settings.setdefault("envvar", variable.upper())
        if float in (hint, *typing.get_args(hint)):
            # Of no other: Typer 0.19 fails with one, for a repeatable option without values.
            settings["callback"] = _finite
        info = make(*flags, **settings)
        missing = field.default is dataclasses.MISSING
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if missing else field.default,
            annotation=_annotated[list[Any] | None if hint == Pairs else hint, info],
        )


def arguments(kind: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values as arguments: those of a dataclass as one, which checks them."""
    given = {name: values.get(name) for name, _, _ in _declared(kind)}
    for name, hint, field in _declared(kind):
        if dataclasses.is_dataclass(hint):
            given[name] = build(hint, values)
        elif hint == Pairs:
            pairs = dict[Any, Any]()
            for key, value in (item for each in values[name] or () for item in each.items()):
                if pairs.setdefault(key, value) != value:
                    flag = (field.metadata["cli"][1] or [f"--{name.replace('_', '-')}"])[0]
                    raise typer.BadParameter(f"{flag} has two values for {key}")
            given[name] = pairs or None
    return given


def build(kind: Any, values: dict[str, Any]) -> Any:
    given = arguments(kind, values)
    with _usage_errors():
        return kind(**given)


def command(
    *examples: str, group: typer.Typer | None = None, **settings: Any
) -> Callable[[Callable[..., Any]], typer.Typer]:
    """Make a command of a function, with these examples of its arguments.

    Its docstring is the help, its result the exit code. The command gets its name, in the group or
    by itself.
    """

    def made(function: Callable[..., Any]) -> typer.Typer:
        def call(**values: Any) -> None:
            if code := _run(function, arguments(function, values)):
                raise typer.Exit(code)

        found = [*parameters(function)]
        call.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
        # Typer asks for both, and takes the annotations of the signature where this has none.
        call.__annotations__ = {}
        own = group if group is not None else typer.Typer(add_completion=False)
        own.command(
            cls=FeedCommand,
            help=_PARAGRAPH.sub(" ", inspect.getdoc(function) or ""),
            epilog=_below(examples, found),
            **{"name": function.__name__.rstrip("_"), "context_settings": HELP, **settings},
        )(call)
        return own

    return made


def _below(examples: Sequence[str], found: list[inspect.Parameter]) -> str:
    """Return what stands below the options. A paragraph that begins with \\b is not wrapped."""
    lines = ["\b", "Examples:", *(f"feedapi {example}" for example in examples)]
    names = [info.envvar for each in found for info in each.annotation.__metadata__]
    known = ", ".join(filter(None, names))
    text = f"From the environment, where the command line says nothing: {known}."
    if all(names):
        text = "Each option has an environment variable: --give-up-after has FEEDAPI_GIVE_UP_AFTER."
    return "\n".join(lines if examples else []) + (f"\n\n{text}" if known else "")


def command_group(help: str) -> typer.Typer:
    # With a callback it is a group, even of one command.
    settings: Any = {"callback": lambda: None, "no_args_is_help": True, "add_completion": False}
    return typer.Typer(cls=CommandGroup, help=help, context_settings=HELP, **settings)


class _PlainFlags:
    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return found


class FeedCommand(_PlainFlags, TyperCommand):
    """A command whose first argument may come from the environment, although others follow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Without a URL among them the next argument would be taken for it.
        own = [each for each in self.params if each.param_type_name == "argument"]
        url = os.environ.get("FEEDAPI_URL") if len(own) > 1 else None
        web = any(each.lower().startswith(("http://", "https://")) for each in args)
        if url and not web and getattr(own[0], "envvar", None) == "FEEDAPI_URL":
            args = [url, *args]
        return super().parse_args(ctx, args)


class CommandGroup(_PlainFlags, TyperGroup):
    """The group of all commands: an error is one line on stderr, without a box around it."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Any:
        words = [*(sys.argv[1:] if args is None else args)]
        try:
            code = super().main(words, prog_name, **{**extra, "standalone_mode": False})
        except typer.Abort as abort:
            # The prompt turns Ctrl-C into this exception; "no" and the end of stdin give it too.
            say("aborted")
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
            failed = _ended_by(error)
            code = code or failed
        sys.exit(code)


def _run(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    said = logging.lastResort or logging.NullHandler()  # warnings, unless all records are written
    said.addFilter(repeated := OnceAMinute())
    try:
        if inspect.iscoroutinefunction(function):
            return run_async(function, **given)
        return function(**given)
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT
    except Exception as error:
        if isinstance(error, (typer.Exit, typer.Abort)) or _is_usage_error(error):
            raise
        return _ended_by(error)
    finally:
        said.removeFilter(repeated)


def run_async(function: Callable[..., Coroutine[Any, Any, T]], *args: Any, **given: Any) -> T:
    """Run a coroutine function on asyncio. Raises the first exception of a group."""
    import anyio

    with _first_error():
        return anyio.run(partial(function, *args, **given))


@contextmanager
def _first_error() -> Iterator[None]:
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def _ended_by(error: Exception) -> int:
    """Say on one line why the command ended, and return its exit code."""
    text, code = str(error), getattr(error, "exit_code", FAILURE)
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        discard(sys.stdout)  # a reader such as `head` has all it wants
        return 0
    if os.environ.get("FEEDAPI_DEBUG"):
        raise error
    if isinstance(error, OSError):
        text = error.strerror or text
        text = f"{error.filename}: {text}" if error.filename else text
    elif not isinstance(error, (CommandError, FeedError)) and not (
        isinstance(error, ImportError) and "pip install" in text  # it names the extra
    ):
        # Only the type of any other error: its text may hold a payload or a secret.
        text = f"internal error: {type(error).__name__} (set FEEDAPI_DEBUG=1 to see where)"
        code = INTERNAL_ERROR
    say(text, logging.ERROR)
    return int(code)


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
    if type(error).__name__ == "NoArgsIsHelpError":
        return USAGE  # with rich, the help is printed when this error is made
    path = "feedapi" if getattr(error, "ctx", None) is None else error.ctx.command_path
    text = error.format_message().rstrip(".").replace(": Value error, ", ": ")
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
        return SIGNALLED + self.number if self.number else 0

    def end(self, number: signal.Signals, scope: Any, grace: float | None) -> None:
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
