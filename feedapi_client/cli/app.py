"""All commands of ``feedapi``, each in a module that is imported when it is called."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import typer
from typer.main import get_command

from feedapi_client.cli.command import EXIT_CODES, HELP, CommandGroup

COMMANDS = {
    "discover": ("Read", "discover"),
    "cat": ("Read", "cat"),
    "run": ("Read", "run"),
    "cursors": ("Operate", "cursors"),
    "leases": ("Operate", "cursors"),
    "quarantine": ("Operate", "quarantine"),
    "status": ("Operate", "status"),
    "doctor": ("Operate", "doctor.command"),
    "demo": ("Try", "demo"),
    "serve": ("Try", "serve"),
    "relay": ("Adapters", "relay"),
    "ingest": ("Adapters", "ingest"),
}
"""The panel of each command in the help, and its module."""


class Root(CommandGroup):
    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        panel, module = COMMANDS[cmd_name]
        found = import_module(f"feedapi_client.cli.{module}")
        command: Any = get_command(getattr(found, cmd_name))
        command.name, command.rich_help_panel = cmd_name, panel
        return command


app = typer.Typer(
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
    epilog="\n".join(["\b", "Exit codes:", *map(" ".join, EXIT_CODES.items())]),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from feedapi_client import __version__

        print(f"feedapi {__version__}")
        raise typer.Exit


@app.callback()
def feedapi(
    verbose: bool = typer.Option(
        False, "--verbose", "-v", help="Log requests and decisions to stderr."
    ),
    version: bool = typer.Option(  # noqa: ARG001
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Consume FeedAPI feeds: partitioned events over plain HTTP, each event in order and once."""
    if verbose:
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=logging.INFO, format=form)
