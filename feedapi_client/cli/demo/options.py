"""The options of ``feedapi demo``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from feedapi_client.cli.common.options import finite


class Dialect(StrEnum):
    """The dialects that have splits."""

    V2_DRAFT = "v2-draft"
    V2_TOKEN = "v2-token"  # noqa: S105 - a dialect's name


class Sabotage(StrEnum):
    """Ways to save the cursor outside the transaction of the effects."""

    CURSOR_FIRST = "cursor-first"
    CURSOR_LAST = "cursor-last"


DialectOption = Annotated[
    Dialect, typer.Option("--dialect", help="The dialect that the publisher uses.")
]
Events = Annotated[
    int, typer.Option(min=100, max=1_000_000, metavar="N", help="Events to publish.")
]
Seconds = Annotated[
    float,
    typer.Option(min=0.5, max=3600, callback=finite, metavar="S", help="Time to publish them in."),
]
Crashes = Annotated[
    int,
    typer.Option(
        min=0, max=100, metavar="N", help="How often the consumer crashes in the middle of a batch."
    ),
]
Seed = Annotated[
    int | None, typer.Option(metavar="N", help="Makes the publisher's pages reproducible.")
]
InstanceCount = Annotated[
    int,
    typer.Option(
        "--instances",
        min=1,
        max=16,
        metavar="N",
        help=(
            "Processes that share the feed. Instead of crashes, every other one is killed "
            "and the others are stopped; another one replaces it."
        ),
    ),
]
Plain = Annotated[
    bool,
    typer.Option(
        "--plain", help="Lines of text, no live view (as always when stdout is no terminal)."
    ),
]
SabotageOption = Annotated[
    Sabotage | None,
    typer.Option(
        "--sabotage",
        help=(
            "Save the cursor outside the transaction, before or after the effects: "
            "the proof has to fail."
        ),
    ),
]
