"""``feedapi cursors``: look at stored cursors, and repair them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

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
from feedapi_client.cli.common.run_async import run_async

TABLE = "feedapi_cursors"

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Look at stored cursors, and repair them. Stop the consumer first: one that runs on ends with an error at its next commit.",
)

Partition = Annotated[int, typer.Argument(min=0, max=32767, metavar="PARTITION")]


class Status(StrEnum):
    """What a position can be set to."""

    OPEN = "open"
    DRAINED = "drained"
    SUPERSEDED = "superseded"


@app.command("ls")
def ls(
    store: Store,
    feed: Feed = None,
    name: Name = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", metavar="URL", help="Ask this feed how far behind each cursor of it is."
        ),
    ] = None,
    json: Json = False,
    table: Table = TABLE,
    auth_env: AuthEnv = None,
    header_env: HeaderEnv = None,
    v1_partitions: V1Partitions = None,
) -> None:
    """List positions: for each feed and consumer the cursor of each partition, and with --url whether there is more behind it."""
    from feedapi_client.cli.common.http_client import headers_from
    from feedapi_client.cli.cursors import selection as work
    from feedapi_client.cli.cursors.export_format import print_feeds
    from feedapi_client.cli.cursors.lag import Lookup

    lookup = None if url is None else Lookup(url, headers_from(auth_env, header_env), v1_partitions)
    print_feeds(run_async(work.listed, work.Target(store, table, feed, name), lookup), json=json)


@app.command("set")
def set_cursor(
    partition: Partition,
    cursor: Annotated[
        str,
        typer.Argument(
            metavar="CURSOR", help="Reading goes on behind this place; _first for the beginning."
        ),
    ],
    store: Store,
    feed: Feed = None,
    name: Name = None,
    filters: Filters = None,
    status: Annotated[
        Status, typer.Option(help="drained: read to the end. superseded: others went on from here.")
    ] = Status.OPEN,
    table: Table = TABLE,
) -> None:
    """Set the cursor of a partition. With a whole URL as --feed also for a feed that the store does not know yet."""
    from feedapi_client.cli.cursors import selection as work

    if not cursor or not cursor.isascii() or not cursor.isprintable():
        raise typer.BadParameter("a cursor is printable ASCII")
    key = run_async(
        work.set_position,
        work.Target(store, table, feed, name, filters),
        partition,
        cursor,
        status.value,
    )
    print(f"{key}: partition {partition} is at {cursor!r}")


@app.command("reset")
def reset(
    store: Store,
    feed: Feed = None,
    name: Name = None,
    partitions: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", metavar="ID", help="Only this partition. Repeatable."),
    ] = None,
    yes: Yes = False,
    table: Table = TABLE,
) -> None:
    """Forget positions. Without any the consumer starts anew; a single partition begins again at its first event, or where its lineage says."""
    from feedapi_client.cli.cursors import selection as work

    target = work.Target(store, table, feed, name)
    if not yes:
        key, positions = run_async(work.chosen, target)
        doomed = positions.keys() & set(partitions) if partitions else positions.keys()
        typer.confirm(f"{key}: forget {len(doomed)} of {len(positions)} positions?", abort=True)
    key, count = run_async(work.reset, target, partitions)
    print(f"{key}: {count} positions forgotten")


@app.command("export")
def export(
    store: Store,
    feed: Feed = None,
    name: Name = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to a file instead of stdout."),
    ] = None,
    table: Table = TABLE,
) -> None:
    """Print positions as JSON that 'import' reads, here or into another store."""
    from feedapi_client.cli.cursors import selection as work
    from feedapi_client.cli.cursors.export_format import dump

    text = dump(run_async(work.listed, work.Target(store, table, feed, name), None))
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="What 'export' printed; - for stdin.")
    ],
    store: Store,
    yes: Yes = False,
    table: Table = TABLE,
) -> None:
    """Make exported positions the current ones; those of other partitions stay. The file is made if there is none."""
    from feedapi_client.cli.cursors import selection as work
    from feedapi_client.cli.cursors.export_format import parse_export

    if source == "-":
        import sys

        text = sys.stdin.read()
    else:
        text = Path(source).read_text(encoding="utf-8")
    feeds = parse_export(text)
    target = work.Target(store, table)
    if not yes and source != "-" and (replaced := run_async(work.already_there, target, feeds)):
        typer.confirm(
            f"{replaced} positions are there already and will be replaced. Go on?", abort=True
        )
    run_async(work.import_positions, target, feeds)
    for key, positions in feeds.items():
        print(f"{key}: {len(positions)} positions imported")


@app.command("rewind")
def rewind(
    to: Annotated[
        str,
        typer.Option("--to", metavar="TIME", help="'2 hours ago', 14:30 (today), or an ISO time."),
    ],
    store: Store,
    feed: Feed = None,
    name: Name = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would change.")
    ] = False,
    yes: Yes = False,
    table: Table = TABLE,
) -> None:
    """Take a consumer back to a time, by the store's journal (SQLite and SQL stores with journal=Journal(), 'feedapi cat --journal')."""
    from feedapi_client.cli.common.times import parse_time
    from feedapi_client.cli.cursors import selection as work
    from feedapi_client.cli.cursors.export_format import print_changes

    try:
        when = parse_time(to)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    target = work.Target(store, table, feed, name)
    if dry_run or not yes:
        key, now, then = run_async(work.rewound, target, when)
        print_changes(key, when, now, then)
        if dry_run:
            return
        typer.confirm("Stop the consumer first. Rewind?", abort=True)
    key, positions = run_async(work.rewind, target, when)
    print(
        f"{key}: {len(positions)} positions are those of {when.isoformat(sep=' ', timespec='seconds')}"
    )
