"""All commands of ``feedapi``.

A command is in the module of its name, and imported when it is called: ``cursors ls`` is in
``cursors_ls``. Here are their names and the lines that the help shows of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer

from feedapi_client.cli.examples import EXAMPLES, epilog
from feedapi_client.cli.exit_codes import HELP as EXIT_CODES
from feedapi_client.cli.reporting import CommandGroup
from feedapi_client.cli.signature import command_of, write_epilog
from feedapi_client.cli.std_streams import encodable

COMMANDS: dict[str, str] = {
    "demo": (
        "Publish, split, rotate, crash, consume; prove each entity's events came in order and once."
    ),
    "serve": (
        "Serve an example feed on the loopback interface, to try consumers with, until Ctrl-C."
    ),
    "discover": "Show a feed's dialect, flags and partitions, and the lineage of the partitions.",
    "doctor": (
        "Check a publisher: is this a sound FeedAPI feed? Each finding says what it costs a "
        "consumer."
    ),
    "cat": 'Print a feed\'s events, one line of JSON each: {"partition":2,"data":…}.',
    "run": "Consume a feed with the application's handler: the library without a main program.",
    "status": "Show what a consumer does now, live, like top.",
    "cursors": (
        "Show stored cursors, and repair them. Stop the consumer first: a running one ends with "
        "an error at its next commit."
    ),
    "leases": "Show which instance reads which partition, where several share a feed.",
    "quarantine": (
        "Show quarantined events, which the application failed to handle (a dead-letter queue), "
        "and replay or drop them."
    ),
    "ingest": ("Ingest a feed exactly once into Spark tables: Parquet or Delta (extra spark)."),
    "relay": (
        "Publish a feed's events to a Liftbridge stream, and commit cursors when they are acked."
    ),
    "cursors ls": "List positions: the cursor of each partition, for each feed and consumer.",
    "cursors show": (
        "Show the positions of one feed and consumer: an error where the choice leaves several."
    ),
    "cursors set": "Set the cursor of a partition.",
    "cursors reset": "Forget positions.",
    "cursors export": "Print positions as JSON that 'import' reads, into this or another store.",
    "cursors import": ("Make exported positions the current ones. Those of other partitions stay."),
    "cursors rewind": "Take a consumer back to the positions of a time.",
    "cursors skip": (
        "Read to the end of each partition without delivering, then save the cursors there."
    ),
    "cursors drain": (
        "Mark a closed partition as drained: what was not read of it is skipped, its children "
        "start."
    ),
    "cursors restore": (
        "Move cursors back to a partition, after its publisher was rolled back behind a split."
    ),
    "cursors move": (
        "Keep the cursors of a feed that moved: those of OLD_URL become those of NEW_URL."
    ),
    "cursors rename": ("Keep the cursors of a consumer that gets another name. Stop it first."),
    "leases ls": "List instances with their age and load, and the partitions that each one reads.",
    "quarantine ls": "List events: where they come from, and what went wrong.",
    "quarantine show": (
        "Print one event as JSON: where it comes from, the error, headers and payload."
    ),
    "quarantine drop": "Delete events for good.",
    "quarantine replay": "Call the application's handler with events once more.",
}
"""What each command does, as the first paragraph of its help says it."""

REMOVED = {
    "cursors upgrade": (
        "'cursors upgrade' is removed: nothing is stored in an earlier format; 'cursors move' "
        "moves what is stored under another key"
    ),
}
"""Commands that are gone, and what to use instead."""

MODULES = {
    "demo": "demo.demo",
    "doctor": "doctor.command",
    "relay": "relay_to_stream",
    "status": "live_status",
}
"""Modules that have not the name of their command."""
FUNCTIONS = {"status": "show_status"}
_HELP = {"help_option_names": ["-h", "--help"]}
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command that passes all arguments on to an adapter, --help included."""


class LazyCommands(Mapping[str, Any]):
    """The commands of a group, by name. Each is imported when it is asked for."""

    def __init__(self, path: str = "") -> None:
        self._path = path
        start = len(path)
        self._names = [
            words[start:]
            for words in COMMANDS
            if words.startswith(path) and " " not in words[start:]
        ]

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return _load(f"{self._path}{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def removed(self, name: str) -> str | None:
        """Return what to use in place of a command that is gone; None for any other name."""
        return REMOVED.get(f"{self._path}{name}")

    def help_of(self, name: str) -> str:
        """Return what the command does, without importing it."""
        return COMMANDS[f"{self._path}{name}"]


class LazyGroup(CommandGroup):
    """A group of commands whose help imports none of them."""

    def __init__(self, *, path: str = "", **settings: Any) -> None:
        super().__init__(**{**settings, "commands": None})
        self.lazy = LazyCommands(path)
        self.commands = self.lazy  # type: ignore[assignment]

    def get_help(self, ctx: Any) -> str:
        """Return the help as stdout can encode it."""
        return encodable(super().get_help(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command. Raises `typer.BadParameter` for one that is gone."""
        if (instead := self.lazy.removed(cmd_name)) is not None:
            raise typer.BadParameter(instead, ctx=ctx)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the names of the commands."""
        return list(self.lazy)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the names of the commands and what they do."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.lazy.help_of(name)) for name in self.lazy])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the exit codes."""
        write_epilog(self.epilog, formatter)


def _load(words: str) -> Any:
    """Import a command, or make the group of commands of this name."""
    name = words.rpartition(" ")[2]
    if any(other.startswith(f"{words} ") for other in COMMANDS):
        return LazyGroup(
            path=f"{words} ",
            name=name,
            help=COMMANDS[words],
            no_args_is_help=True,
            rich_markup_mode=None,
            context_settings=_HELP,
        )
    function = words.replace(" ", "_")
    module = import_module(f"feedapi_client.cli.{MODULES.get(words, function)}")
    function = getattr(module, FUNCTIONS.get(words, function))
    if words not in EXAMPLES:
        return command_of(function, name, "", context_settings=_PASS_ON, add_help_option=False)
    below = epilog(words) + (f"\n\n{EXIT_CODES}" if words == "run" else "")
    return command_of(function, name, below, context_settings=_HELP)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_HELP,
    epilog=EXIT_CODES,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from feedapi_client import __version__

        print(f"feedapi {__version__}")
        raise typer.Exit


@app.callback()
def feedapi(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log requests and decisions to stderr.")
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Consume FeedAPI feeds: partitioned events over plain HTTP, each event in order and once."""
    if verbose:
        import logging

        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
