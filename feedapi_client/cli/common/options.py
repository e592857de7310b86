"""Options that several commands share."""

from __future__ import annotations

import math
from typing import Annotated

import typer

Url = Annotated[
    str, typer.Argument(metavar="URL", help="The feed. Its query is sent with every request.")
]
AuthEnv = Annotated[
    str | None,
    typer.Option(
        "--auth-env",
        metavar="NAME",
        help="Environment variable that holds the value of the Authorization header.",
    ),
]
HeaderEnv = Annotated[
    list[str] | None,
    typer.Option(
        "--header-env",
        metavar="HEADER=NAME",
        help="A request header, its value in an environment variable. Repeatable.",
    ),
]
CaFile = Annotated[
    str | None,
    typer.Option(
        "--ca-file",
        envvar="FEEDAPI_CA_FILE",
        metavar="FILE",
        help="Trust the certificates in this PEM file, in place of the public ones.",
    ),
]
V1Partitions = Annotated[
    int | None,
    typer.Option(
        "--v1-partitions",
        min=1,
        max=32768,
        metavar="N",
        help="Number of partitions of a ZeroEventHub (v1) feed, which does not list them.",
    ),
]
Filters = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="NAME=VALUE",
        help="Only events that the feed's filter selects. Repeatable.",
    ),
]
EventTypes = Annotated[
    list[str] | None,
    typer.Option("--event-type", metavar="TYPE", help="Only events of this type. Repeatable."),
]
SkipEventTypes = Annotated[
    list[str] | None,
    typer.Option("--skip-event-type", metavar="TYPE", help="No events of this type. Repeatable."),
]


def finite(value: float) -> float:
    """Return the value of an option. Raises `typer.BadParameter` for nan and infinity."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number of this kind")
    return value


GiveUpAfter = Annotated[
    float,
    typer.Option(
        "--give-up-after",
        min=0,
        callback=finite,
        metavar="SECONDS",
        help="Maximum time to retry while the feed can't be reached.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Lineage = Annotated[
    list[str] | None,
    typer.Option(
        "--lineage",
        metavar="CHILD:PARENT",
        help="Read CHILD after PARENT, where the feed leaves that out (1:0). Repeatable.",
    ),
]
Store = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="FEEDAPI_STORE",
        metavar="STORE",
        help=(
            "An SQLite file, a database URL (postgresql+psycopg://…), redis://…, "
            "or env:NAME for one in an environment variable."
        ),
    ),
]
Table = Annotated[
    str,
    typer.Option(
        "--table",
        metavar="NAME",
        help="The table, or SCHEMA.TABLE, in a database given by URL; the key prefix in Redis.",
    ),
]
Feed = Annotated[
    str | None,
    typer.Option(
        "--feed",
        metavar="URL",
        help="The feed, or a part of its URL; needed when the store holds several.",
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="NAME", help="The consumer; needed when the store holds several."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")]


def edges(values: list[str] | None) -> dict[int, int]:
    """Return the values of ``--lineage`` as `FeedConsumer` takes them, from child to parent.

    Raises `typer.BadParameter` for another form, and for a child with two parents.
    """
    from feedapi_client.lineage.missing_edges import parse_lineage

    try:
        return parse_lineage(",".join(values)) if values else {}
    except ValueError as error:
        raise typer.BadParameter(f"--lineage {error}") from None


def pairs(
    values: list[str] | None, option: str, form: str = "NAME=VALUE, each NAME once"
) -> dict[str, str]:
    """Return the values of a repeatable NAME=VALUE option as a dictionary.

    `form` says in messages what the option takes.

    Raises `typer.BadParameter` for a value of another form and for a name given twice.
    """
    found = {
        name: value
        for name, equals, value in (text.partition("=") for text in values or ())
        if name and equals
    }
    if len(found) < len(values or ()):
        raise typer.BadParameter(f"{option} takes {form}")
    return found
