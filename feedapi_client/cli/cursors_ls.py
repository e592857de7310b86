"""``feedapi cursors ls``: list positions."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from feedapi_client.cli.escape import escape_json
from feedapi_client.cli.feed_options import ONE_SHOT, Connection, Json, V1Partitions, checked_url
from feedapi_client.cli.store_options import Chosen, StorePlace, no_such_positions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from feedapi_client.cli.terminal import Cell
    from feedapi_client.operations import FeedPositions

_STATUS_STYLES = {"open": "green", "drained": "dim", "superseded": "dim"}
_LAG_STYLES = {
    "caught up": "cyan",
    "behind": "yellow",
    "not begun": "yellow",
    "no longer listed": "red",
    "unknown": "red",
}


@dataclass(frozen=True, kw_only=True)
class CursorsLs:
    """Options of ``feedapi cursors ls``."""

    place: StorePlace
    chosen: Chosen
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Ask this feed how far behind its cursors are."),
    ] = None
    v1_partitions: V1Partitions = None
    json: Json = False
    connection: Connection


def cursors_ls(options: CursorsLs) -> None:
    """List positions: the cursor of each partition, for each feed and consumer.

    With --url also whether there is more after each cursor.
    """
    from feedapi_client.cli.reporting import run_async
    from feedapi_client.cli.terminal import console

    feeds = run_async(positions_and_lags, options)
    if options.json:
        print_export(feeds)
        return
    if not feeds:
        console().print("no positions are stored")
    for feed in feeds:
        print_feed(feed)


async def positions_and_lags(options: CursorsLs) -> list[FeedPositions]:
    """Load the chosen positions. With a URL, only those of its feed, with lags.

    Raises `CommandError` when a choice is given and nothing of it is stored.
    """
    from feedapi_client.model import FeedKey
    from feedapi_client.operations import FeedAccess, list_positions, with_lag
    from feedapi_client.options import RetryPolicy

    chosen, asked = options.chosen, options.url
    url = None if asked is None else FeedKey(checked_url(asked, "--url")).url
    async with options.connection.client() as http:
        async with options.place.open() as store:
            feeds = await list_positions(
                store, lambda key: chosen.matches(key) and url in (None, key.url)
            )
            if not feeds and (asked or chosen.feed or chosen.name):
                raise no_such_positions()
        if asked is None:
            return feeds
        retry = RetryPolicy(give_up_after=ONE_SHOT)
        feed = FeedAccess(url=asked, v1_partitions=options.v1_partitions, retry=retry, http=http)
        return [await with_lag(feed, each) for each in feeds]


def print_export(feeds: Sequence[FeedPositions]) -> None:
    """Print positions as JSON that 'import' reads."""
    from feedapi_client.operations import export_positions

    print(escape_json(export_positions(feeds).decode(), sys.stdout.encoding))


def print_feed(feed: FeedPositions) -> None:
    """Print the positions of one feed and consumer as a table."""
    from feedapi_client.cli.terminal import console, plain_line, print_table

    console().print(plain_line(feed.key, "bold"))
    columns = ["partition", "status", "revision", "cursor"]
    if feed.lag is not None:
        columns.append("lag")
    print_table(columns, [_row(feed, id) for id in feed.partitions()])


def _row(feed: FeedPositions, id: int) -> list[Cell]:
    cells: list[Cell] = [str(id), "", "", ""]
    if (position := feed.positions.get(id)) is not None:
        status = (position.status, _STATUS_STYLES[position.status])
        cells = [str(id), status, str(position.revision), position.cursor]
    if feed.lag is not None:
        cells.append((str(feed.lag[id]), _LAG_STYLES.get(feed.lag[id].state.value, "dim")))
    return cells
