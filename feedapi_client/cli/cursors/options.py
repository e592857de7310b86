"""The options and arguments of ``feedapi cursors`` that no other command has."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Status(StrEnum):
    """The statuses that a position can be set to."""

    OPEN = "open"
    DRAINED = "drained"
    SUPERSEDED = "superseded"


LagUrl = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Ask this feed how far behind its cursors are."),
]
Partition = Annotated[int, typer.Argument(min=0, max=32767, metavar="PARTITION")]
Cursor = Annotated[
    str,
    typer.Argument(
        metavar="CURSOR", help="Reading goes on after this place; _first for the beginning."
    ),
]
SetStatus = Annotated[
    Status,
    typer.Option(help="drained: read to the end. superseded: its successors went on from here."),
]
OnlyPartitions = Annotated[
    list[int] | None,
    typer.Option(
        "--partition",
        "-p",
        min=0,
        max=32767,
        metavar="ID",
        help="Only this partition. Repeatable.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write to a file instead of stdout."),
]
Source = Annotated[str, typer.Argument(metavar="FILE", help="What 'export' printed; - for stdin.")]
To = Annotated[
    str,
    typer.Option("--to", metavar="TIME", help="'2 hours ago', 14:30 (today), or an ISO time."),
]
ConsumerName = Annotated[
    str, typer.Option("--name", metavar="NAME", help="The consumer that the cursors belong to.")
]
MovedName = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Only the cursors of this consumer."),
]
OldUrl = Annotated[
    str, typer.Argument(metavar="OLD_URL", help="The feed's former URL, as 'ls' shows it.")
]
NewUrl = Annotated[
    str, typer.Argument(metavar="NEW_URL", help="The URL that consumers use from now on.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Delete cursors that NEW_URL has already.")
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Although the feed lists the partition as open, or neither it nor a cursor is known.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="No progress on stderr (shown only where stderr is a terminal)."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")]
