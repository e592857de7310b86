"""The commands of ``feedapi leases`` and their options."""

from __future__ import annotations

import typer

from feedapi_client.cli.common.errors import CommandGroup
from feedapi_client.cli.common.options import Feed, Json, Name, Store, Table
from feedapi_client.cli.examples import epilog

TABLE = "feedapi_cursors"

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Show which instance reads which partition, where several share a feed.",
)


@app.callback()
def leases() -> None:
    """Keep ``ls`` a command of its own, although it is the only one."""


@app.command("ls", epilog=epilog("leases ls"))
def ls(
    store: Store, feed: Feed = None, name: Name = None, json: Json = False, table: Table = TABLE
) -> None:
    """List instances with their age and load, and the partitions that each one reads."""
    from feedapi_client.cli.common.feed_choice import FeedChoice
    from feedapi_client.cli.cursors.selection import Selection
    from feedapi_client.cli.leases.ls import print_leases

    print_leases(Selection(store, table, FeedChoice(feed, name)), json=json)
