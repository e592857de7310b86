"""``feedapi ingest``: passes its arguments on to `feedapi_client.spark.ingest`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import NoReturn

import typer

from feedapi_client.cli.command import CommandError, argument, command
from feedapi_client.cli.terminal import report


@dataclass(frozen=True, kw_only=True)
class IngestArguments:
    """Options of ``feedapi ingest``: those of its own parser."""

    words: list[str] | None = argument("ARGUMENTS", default=None)


@command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def ingest(o: IngestArguments) -> int:
    """Ingest a feed exactly once into Spark tables: Parquet or Delta (extra spark)."""
    words = o.words or []
    try:
        adapter = import_module("feedapi_client.spark.ingest")
    except ImportError as missing:
        # Without a name a module is there that can't be loaded, and no extra would help.
        install = "pip install 'feedapi-client[spark]'"
        if {"--help", "-h"} & set(words):
            print(f"{ingest.registered_commands[0].help}\n\nInstall it: {install}")
            return 0
        if install in str(missing) or missing.name is None:
            raise CommandError(str(missing)) from None
        raise CommandError(f"{missing.name} is not installed: {install}") from None
    parser = adapter.parser()
    parser.error = _wrong_usage  # a wrong argument is reported as by every other command
    parser.parse_args(words)
    code: int = adapter.main(words, partial(report, escaped=True))
    return code


def _wrong_usage(message: str) -> NoReturn:
    raise typer.BadParameter(message)
