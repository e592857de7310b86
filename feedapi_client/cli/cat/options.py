"""The options of ``feedapi cat`` that no other command has."""

from __future__ import annotations

from typing import Annotated

import typer

Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Go on at the end of the feed, until Ctrl-C.")
]
Start = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="first|last|CURSOR",
        help="Where to begin; a cursor needs one --partition. Stored cursors come first.",
    ),
]
Partitions = Annotated[
    list[int] | None,
    typer.Option(
        "--partition",
        "-p",
        min=0,
        max=32767,
        metavar="ID",
        help="Read only this partition, without waiting for its parents. Repeatable.",
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        help=(
            "Keep cursors in this SQLite file (or database URL, or env:NAME), "
            "and go on from there next time."
        ),
    ),
]
Name = Annotated[
    str, typer.Option("--name", metavar="NAME", help="The consumer that the cursors belong to.")
]
KeepJournal = Annotated[
    bool,
    typer.Option("--journal", help="Keep a week of cursor history, for 'feedapi cursors rewind'."),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Print payloads alone, byte for byte as they were sent.")
]
Checkpoints = Annotated[
    bool,
    typer.Option("--checkpoints", help="Print each cursor too, after the events that it covers."),
]
Limit = Annotated[
    int | None, typer.Option("--limit", "-n", min=1, metavar="N", help="End after N events.")
]
V1Headers = Annotated[
    list[str] | None,
    typer.Option(
        "--v1-header", metavar="NAME", help="Event headers to ask a v1 feed for; _all for all."
    ),
]
PageSizeHint = Annotated[
    int | None, typer.Option("--page-size-hint", min=1, metavar="N", help="Events per response.")
]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream", help="Hold responses open, where the feed offers that; with --follow."
    ),
]
Unordered = Annotated[
    bool,
    typer.Option(
        "--unordered", help="Read all partitions at once, without waiting for their parents."
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="No progress on stderr (shown only where stderr is a terminal)."
    ),
]
