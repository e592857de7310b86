"""The options of ``feedapi run`` that no other command has."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from feedapi_client.cli.common.options import finite


class OnFailure(StrEnum):
    """What becomes of a batch whose handler raises."""

    RAISE = "raise"
    RETRY = "retry"
    QUARANTINE = "quarantine"


class Start(StrEnum):
    """Where a new consumer begins."""

    FIRST = "first"
    LAST = "last"


class LogFormat(StrEnum):
    """How log records are written."""

    TEXT = "text"
    JSON = "json"


HandlerPath = Annotated[
    str,
    typer.Option(
        "--handler",
        metavar="MODULE:FUNCTION",
        help=(
            "The application's 'async def handle(batch)', searched in this directory too; or a "
            "function without parameters that returns an asynchronous context manager which gives "
            "the handler."
        ),
    ),
]
Store = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="FEEDAPI_STORE",
        metavar="STORE",
        help=(
            "Where cursors are kept: an SQLite file, a database URL, redis://…, or env:NAME for "
            "one in an environment variable."
        ),
    ),
]
Name = Annotated[
    str,
    typer.Option("--name", envvar="FEEDAPI_NAME", metavar="NAME", help="The consumer's name."),
]
OnFailureOption = Annotated[
    OnFailure,
    typer.Option(
        "--on-failure",
        help=(
            "When the handler raises: end with exit code 3; or call it again, --attempts times; "
            "or then put the failing event into quarantine."
        ),
    ),
]
Attempts = Annotated[
    int,
    typer.Option(
        "--attempts",
        min=0,
        metavar="N",
        help="Calls of a handler that fails, with --on-failure retry or quarantine; 0: no limit.",
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        "--grace",
        min=0,
        callback=finite,
        metavar="SECONDS",
        help="Time to finish and commit what is in flight after SIGTERM, SIGINT and SIGHUP.",
    ),
]
MaxConcurrency = Annotated[
    int,
    typer.Option(
        "--max-concurrency", min=1, metavar="N", help="Partitions that are handled at once."
    ),
]
StartOption = Annotated[
    Start, typer.Option("--start", help="Where a new consumer begins. Stored cursors come first.")
]
Follow = Annotated[
    bool,
    typer.Option(
        "--follow/--no-follow", help="Go on at the end of the feed, or end there with exit code 0."
    ),
]
Shared = Annotated[
    bool,
    typer.Option(
        "--share",
        help="Divide the partitions with other processes of this store and name, on any machine.",
    ),
]
Workers = Annotated[
    int,
    typer.Option(
        "--workers",
        min=1,
        metavar="N",
        help=(
            "Processes on this machine that share the feed. Their monitors have consecutive "
            "ports. One that fails ends the others."
        ),
    ),
]
Park = Annotated[
    bool,
    typer.Option(
        "--park",
        help="Go on with the others when the feed can't continue one partition.",
    ),
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option("--log-format", help="Log records on stderr: text, or JSON, one a line."),
]
EXIT_CODES = (
    "Exit codes: 0 the end of the feed (--no-follow), or ended by SIGTERM or Ctrl-C with all "
    "in flight committed; 1 the feed or the store failed; 2 the command line is wrong, or the "
    "handler can't be imported; 3 the handler failed; 4 another consumer of this name has taken "
    "over; 130, 143 ended by Ctrl-C or SIGTERM, and what was in flight was cancelled after "
    "--grace: it is read again; 70 a bug in this program."
)
