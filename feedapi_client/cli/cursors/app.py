"""The commands of ``feedapi cursors`` and their options. Each one's work is in its own module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from feedapi_client.cli.common.errors import CommandGroup
from feedapi_client.cli.common.options import (
    AuthEnv,
    CaFile,
    EventTypes,
    Feed,
    Filters,
    GiveUpAfter,
    HeaderEnv,
    Json,
    Lineage,
    Name,
    SkipEventTypes,
    Store,
    Table,
    Url,
    V1Partitions,
    Yes,
    edges,
)
from feedapi_client.cli.cursors.options import (
    ConsumerName,
    Cursor,
    DryRun,
    Force,
    LagUrl,
    MovedName,
    NewUrl,
    OldUrl,
    OnlyPartitions,
    Output,
    Overwrite,
    Partition,
    Quiet,
    SetStatus,
    Source,
    Status,
    To,
)
from feedapi_client.cli.examples import epilog

if TYPE_CHECKING:
    from feedapi_client.cli.cursors.selection import Selection
    from feedapi_client.cli.cursors.target import Target

TABLE = "feedapi_cursors"

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help=(
        "Show stored cursors, and repair them. Stop the consumer first: a running one ends with "
        "an error at its next commit."
    ),
)


@app.command("ls", epilog=epilog("cursors ls"))
def ls(
    store: Store,
    feed: Feed = None,
    name: Name = None,
    url: LagUrl = None,
    json: Json = False,
    table: Table = TABLE,
    auth_env: AuthEnv = None,
    header_env: HeaderEnv = None,
    ca_file: CaFile = None,
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
        lookup = LagLookup(checked_url(url, "--url"), headers, v1_partitions, ca_file)
    print_positions(_selection(store, table, feed, name), lookup, json=json)


@app.command("set", epilog=epilog("cursors set"))
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


@app.command("reset", epilog=epilog("cursors reset"))
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


@app.command("export", epilog=epilog("cursors export"))
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


@app.command("import", epilog=epilog("cursors import"))
def import_(source: Source, store: Store, yes: Yes = False, table: Table = TABLE) -> None:
    """Make exported positions the current ones. Those of other partitions stay.

    A store that does not exist is created.
    """
    from feedapi_client.cli.cursors.import_ import import_positions

    import_positions(_selection(store, table), source, confirm=not yes)


@app.command("rewind", epilog=epilog("cursors rewind"))
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


@app.command("skip", epilog=epilog("cursors skip"))
def skip(
    url: Url,
    store: Store,
    partitions: OnlyPartitions = None,
    name: ConsumerName = "default",
    filters: Filters = None,
    event_types: EventTypes = None,
    skip_event_types: SkipEventTypes = None,
    v1_partitions: V1Partitions = None,
    lineage: Lineage = None,
    table: Table = TABLE,
    auth_env: AuthEnv = None,
    header_env: HeaderEnv = None,
    ca_file: CaFile = None,
    give_up_after: GiveUpAfter = 30.0,
    quiet: Quiet = False,
) -> None:
    """Read to the end of each partition without delivering, then save the cursors there.

    For a feed that can't say where its end is (_last), and to skip what a consumer missed. Goes on
    from the stored cursors. They are saved at the end, all at once: Ctrl-C before that changes
    nothing. A store that does not exist is created.
    """
    from feedapi_client.cli.cursors.skip import skip_to_end

    target = _target(
        (url, store, table, name),
        (filters, event_types, skip_event_types),
        (auth_env, header_env),
        ca_file=ca_file,
        v1_partitions=v1_partitions,
        lineage=edges(lineage),
        give_up_after=give_up_after,
    )
    skip_to_end(target, frozenset(partitions or ()), quiet=quiet)


@app.command("drain", epilog=epilog("cursors drain"))
def drain(
    url: Url,
    partition: Partition,
    store: Store,
    name: ConsumerName = "default",
    filters: Filters = None,
    event_types: EventTypes = None,
    skip_event_types: SkipEventTypes = None,
    v1_partitions: V1Partitions = None,
    force: Force = False,
    yes: Yes = False,
    table: Table = TABLE,
    auth_env: AuthEnv = None,
    header_env: HeaderEnv = None,
    ca_file: CaFile = None,
    give_up_after: GiveUpAfter = 30.0,
) -> None:
    """Mark a closed partition as drained: what was not read of it is skipped, its children start.

    For a partition whose end the feed can't serve. Refused while the feed lists it as open.
    """
    from feedapi_client.cli.cursors.drain import drain_partition

    target = _target(
        (url, store, table, name),
        (filters, event_types, skip_event_types),
        (auth_env, header_env),
        ca_file=ca_file,
        v1_partitions=v1_partitions,
        give_up_after=give_up_after,
    )
    drain_partition(target, partition, force=force, confirm=not yes)


@app.command("move", epilog=epilog("cursors move"))
def move(
    old_url: OldUrl,
    new_url: NewUrl,
    store: Store,
    name: MovedName = None,
    overwrite: Overwrite = False,
    table: Table = TABLE,
) -> None:
    """Keep the cursors of a feed that moved: those of OLD_URL become those of NEW_URL.

    Of all its consumers, and all their filters, in one step or not at all.
    """
    from feedapi_client.cli.common.feed_url import checked_url
    from feedapi_client.cli.cursors.move import Move, move_cursors

    for url, argument in ((old_url, "OLD_URL"), (new_url, "NEW_URL")):
        checked_url(url, argument)
    move_cursors(Move(store, table, old_url, new_url, name, overwrite))


def _target(
    place: tuple[str, str, str, str],
    selection: tuple[list[str] | None, list[str] | None, list[str] | None],
    credentials: tuple[str | None, list[str] | None],
    **settings: Any,
) -> Target:
    """Return the target of a command. Raises `typer.BadParameter` for what does not fit."""
    from feedapi_client.cli.common.feed_url import checked_url
    from feedapi_client.cli.common.fetch_options import fetch_options
    from feedapi_client.cli.common.http_client import headers_from_environment
    from feedapi_client.cli.cursors.target import Target

    url, store, table, name = place
    if not name:
        raise typer.BadParameter("--name must not be empty")
    return Target(
        url=checked_url(url),
        store=store,
        table=table,
        name=name,
        fetch=fetch_options(*selection),
        headers=headers_from_environment(*credentials),
        **settings,
    )


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
