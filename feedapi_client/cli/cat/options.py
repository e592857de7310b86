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
        metavar="first|last|CURSOR|TIME",
        help=(
            "Where to begin; a cursor needs one --partition. Stored cursors come first. A time "
            "('2 hours ago', 14:30, ISO) needs --store with a journal: prints what came since, and "
            "stores nothing."
        ),
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
    int | None,
    typer.Option(
        "--limit",
        "-n",
        min=1,
        metavar="N",
        help=(
            "End after N events; with --store at the first cursor behind them, so that the next "
            "run goes on there."
        ),
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="TEMPLATE",
        help=(
            r"Print each event by a template, such as '%p %k %s\n': %p partition, %s payload, %S "
            "its bytes, %k key, %K its bytes, %h headers, %c cursor behind it, %i number."
        ),
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key", metavar="FIELD", help="The field of the payload that %k is; a.b for a nested one."
    ),
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
