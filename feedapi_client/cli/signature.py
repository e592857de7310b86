"""Commands whose options are the fields of a dataclass.

A command is a function of one argument, a frozen dataclass. Each field is an option or an argument,
annotated as Typer wants it: it is declared once, and the function reads it by its name. A field
whose type is another dataclass includes the fields of that one, so that options that commands share
are declared once for all of them. Its class variable `panel` is the title above them in the help.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand
from typer.main import get_command

from feedapi_client.cli.feed_options import CONNECTION, EVENTS
from feedapi_client.cli.std_streams import encodable

_LINE_BREAK = re.compile(r"(?<!\n)\n(?!\n)")
_OPTIONS = "Options"
_SHARED_PANELS = (EVENTS, CONNECTION)

_LAG = (
    "feedapi cursors ls --store STORE --url URL shows how far a consumer came, and watch repeats it"
)
_TO_A_FILE = "stdout goes to a file by > FILE"
REMOVED = {
    "cat --checkpoints": "--format with %c prints the cursor behind each event",
    "cat --format %k": "give %s to jq, which finds a field of a payload",
    "cat --format %K": "give %s to jq, which finds a field of a payload",
    "cat --from TIME": (
        "take a copy of the store back (feedapi cursors rewind --to TIME --store COPY), then print "
        "what comes behind (feedapi cat URL --store COPY)"
    ),
    "cat --journal": "feedapi run --journal DAYS keeps a history, cat goes on with one",
    "cat --key": (
        "jq finds a field of a payload, as in feedapi cat URL | jq .data.id; the key of --cert is "
        "--cert-key"
    ),
    "run --workers": (
        "start each process by itself, with --share: under systemd, Compose or Kubernetes, or by "
        "xargs -P"
    ),
    "cursors export --output": _TO_A_FILE,
    "cursors export -o": _TO_A_FILE,
    "doctor --max-bytes": "--max-requests bounds what an examination asks and receives",
    "serve --entities": "Publisher of feedapi_client.testing publishes events of your own",
    "serve --max-events": "--rate 0 publishes no more than the history",
    "status --name": "a monitor shows the consumers of its process",
    "status --store": _LAG,
    "status --v1-partitions": _LAG,
}
"""What does the work of options that are gone, by command and option."""


def command_of(function: Callable[[Any], Any], name: str, epilog: str, **settings: Any) -> Any:
    """Return the command that calls the function with its options.

    The function's docstring is the help. What it returns is the exit code; None is 0. A coroutine
    function runs on asyncio. A function of a `typer.Context` gets that.
    """
    (kind,) = _hints(function, without="return").values()
    single = typer.Typer(
        rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False
    )
    register = single.command(
        name, cls=PlainHelpCommand, help=_help(function), epilog=epilog, **settings
    )
    register(function if kind is typer.Context else _callback(function, kind))
    return get_command(single)


def _help(function: Callable[..., Any]) -> str:
    # Each paragraph on one line, for the terminal to wrap.
    return _LINE_BREAK.sub(" ", inspect.getdoc(function) or "")


def _callback(function: Callable[[Any], Any], kind: type) -> Callable[..., None]:
    def callback(**values: Any) -> None:
        options = _build(kind, values)
        if inspect.iscoroutinefunction(function):
            from feedapi_client.cli.reporting import run_async

            code = run_async(function, options)
        else:
            code = function(options)
        if code:
            raise typer.Exit(code)

    parameters = list(_parameters(kind))
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    # Typer asks for both, and takes the annotations of the signature where this has none.
    callback.__annotations__ = {}
    return callback


def _hints(thing: Any, *, without: str = "") -> dict[str, Any]:
    hints = get_type_hints(thing, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != without}


def _parameters(kind: type) -> Iterator[inspect.Parameter]:
    """Return a parameter for each field of the dataclass and of those that it includes."""
    hints, panel = _hints(kind), getattr(kind, "panel", None)
    for field in fields(kind):
        hint = hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _parameters(hint)
            continue
        for option in getattr(hint, "__metadata__", ()):
            if panel is not None:
                option.rich_help_panel = panel
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=hint,
        )


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _build(kind: type, values: dict[str, Any]) -> Any:
    """Return the dataclass with these values, and those that it includes."""
    hints = _hints(kind)
    return kind(
        **{
            field.name: _build(hints[field.name], values)
            if is_dataclass(hints[field.name])
            else values[field.name]
            for field in fields(kind)
        }
    )


class PlainHelpCommand(TyperCommand):
    """A command whose help is plain text, wrapped to the width of the terminal."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments. An option that is gone is an error that names its successor."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Typer uses its own copy of click or the installed one: no common class.
            option = getattr(error, "option_name", None)
            words = ctx.command_path.partition(" ")[2]
            if (successor := REMOVED.get(f"{words} {option}")) is not None:
                error.message, error.possibilities = f"{option} is gone: {successor}", None  # type: ignore[attr-defined]
            raise

    def get_help(self, ctx: Any) -> str:
        """Return the help as stdout can encode it."""
        return encodable(super().get_help(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words behind the name of the command, as the help shows them."""
        arguments = [each for each in self.get_params(ctx) if each.param_type_name == "argument"]
        return ["[OPTIONS]", *(str(each.metavar or each.name).upper() for each in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, those of a panel under its title."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is None:
                continue
            if each.param_type_name == "argument":
                panels.setdefault("Arguments", []).append((each.metavar or each.name, record[1]))
            else:
                panel = getattr(each, "rich_help_panel", None) or _OPTIONS
                panels.setdefault(panel, []).append(record)
        for title in sorted(panels, key=_rank):
            with formatter.section(title):
                formatter.write_dl(panels[title])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the examples, each on a line of its own, and what else is below the options."""
        write_epilog(self.epilog, formatter)


def write_epilog(epilog: str | None, formatter: Any) -> None:
    """Write paragraphs; a command line is not wrapped, so that it can be copied."""
    for paragraph in (epilog or "").split("\n\n"):
        if paragraph.startswith("feedapi "):
            formatter.write(f"  {paragraph}\n")
        elif paragraph:
            formatter.write_paragraph()
            formatter.write_text(paragraph)


def _rank(title: str) -> int:
    """Return where a panel comes: those that many commands share come last."""
    return _SHARED_PANELS.index(title) if title in _SHARED_PANELS else -1
