"""Commands whose arguments are parsed elsewhere, in the adapter that they belong to."""

from __future__ import annotations

from importlib import import_module

import typer

from feedapi_client.cli.report import CommandError

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Context settings of such a command: everything goes to the adapter, --help too."""


def forward(context: typer.Context, module: str, extra: str) -> None:
    """Call ``main(arguments)`` of the module, which returns the exit code. Raises `CommandError` when its extra is not installed."""
    try:
        adapter = import_module(module)
    except ImportError as missing:
        named = "pip install" in str(missing)
        raise CommandError(
            str(missing)
            if named
            else f"{missing.name} is not installed: pip install 'feedapi-client[{extra}]'"
        ) from None
    raise typer.Exit(adapter.main(context.args))


def ingest(context: typer.Context) -> None:
    """Ingest a feed into a table with Spark, exactly once: Parquet, Delta, Iceberg ... (extra spark)."""
    forward(context, "feedapi_client.spark.ingest", "spark")


def relay(context: typer.Context) -> None:
    """Put a feed's events onto a Liftbridge stream (extra liftbridge)."""
    forward(context, "feedapi_client.liftbridge.command", "liftbridge")
