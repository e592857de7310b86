"""The commands of ``feedapi cursors`` and their options. Each one's work is in its own module."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from feedapi_client.cli.common.errors import CommandGroup
from feedapi_client.cli.common.options import (
    AuthEnv,
    Feed,
    Filters,
    HeaderEnv,
    Json,
    Name,
    Store,
    Table,
    V1Partitions,
    Yes,
)

if TYPE_CHECKING:
    from feedapi_client.cli.cursors.selection import Selection

TABLE = "feedapi_cursors"

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help=(
        "Show stored cursors, and repair them. Stop the consumer first: a running one ends with "
        "an error at its next commit."
    ),
)


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
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")]


@app.command("ls")
def ls(
    store: Store,
    feed: Feed = None,
    name: Name = None,
    url: LagUrl = None,
    json: Json = False,
    table: Table = TABLE,
    auth_env: AuthEnv = None,
    header_env: HeaderEnv = None,
    v1_partitions: V1Partitions = None,
) -> None:
    """List positions: the cursor of each partition, for each feed and consumer.

    With --url also whether there is more after each cursor.
    """
    from feedapi_client.cli.common.feed_url import checked_url
    from feedapi_client.cli.common.http_client import headers_from_environment
    from feedapi_client.cli.cursors.lag import LagLookup
    from feedapi_client.cli.cursors.ls import print_positions

    lookup = None
    if url is not None:
        headers = headers_from_environment(auth_env, header_env)
        lookup = LagLookup(checked_url(url, "--url"), headers, v1_partitions)
    print_positions(_selection(store, table, feed, name), lookup, json=json)


@app.command("set")
def set_(
    partition: Partition,
    cursor: Cursor,
    store: Store,
    feed: Feed = None,
    name: Name = None,
    filters: Filters = None,
    status: SetStatus = Status.OPEN,
    table: Table = TABLE,
) -> None:
    """Set the cursor of a partition.

    With a complete URL as --feed also for a feed that the store does not know yet.
    """
    from feedapi_client.cli.cursors.set import set_cursor
    from feedapi_client.model import Position

    selection = _selection(store, table, feed, name, filters)
    set_cursor(selection, partition, Position(cursor, status.value))


@app.command("reset")
def reset(
    store: Store,
    feed: Feed = None,
    name: Name = None,
    partitions: OnlyPartitions = None,
    yes: Yes = False,
    table: Table = TABLE,
) -> None:
    """Forget positions.

    Without any, the consumer starts anew. A single partition begins again at its first event, or
    where its lineage says.
    """
    from feedapi_client.cli.cursors.reset import reset_positions

    reset_positions(_selection(store, table, feed, name), partitions, confirm=not yes)


@app.command("export")
def export(
    store: Store,
    feed: Feed = None,
    name: Name = None,
    output: Output = None,
    table: Table = TABLE,
) -> None:
    """Print positions as JSON that 'import' reads, into this or another store."""
    from feedapi_client.cli.cursors.export import export_positions

    export_positions(_selection(store, table, feed, name), output)


@app.command("import")
def import_(source: Source, store: Store, yes: Yes = False, table: Table = TABLE) -> None:
    """Make exported positions the current ones. Those of other partitions stay.

    A store that does not exist is created.
    """
    from feedapi_client.cli.cursors.import_ import import_positions

    import_positions(_selection(store, table), source, confirm=not yes)


@app.command("rewind")
def rewind(
    to: To,
    store: Store,
    feed: Feed = None,
    name: Name = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    table: Table = TABLE,
) -> None:
    """Take a consumer back to the positions of a time.

    Needs the journal of the store: 'feedapi cat --journal', or a SQLite or SQL store with
    journal=Journal().
    """
    from feedapi_client.cli.cursors.rewind import rewind_positions

    selection = _selection(store, table, feed, name)
    rewind_positions(selection, to, dry_run=dry_run, confirm=not yes)


def _selection(
    store: str,
    table: str,
    feed: str | None = None,
    name: str | None = None,
    filters: list[str] | None = None,
) -> Selection:
    from feedapi_client.cli.common.feed_choice import FeedChoice
    from feedapi_client.cli.cursors.selection import Selection

    return Selection(store, table, FeedChoice(feed, name, filters))
