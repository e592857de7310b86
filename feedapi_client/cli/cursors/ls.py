"""``feedapi cursors ls``: print positions."""

from __future__ import annotations

import sys

from feedapi_client.cli.common.console import console, plain_line
from feedapi_client.cli.common.escape import escape_json
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.common.tables import Cell, print_table
from feedapi_client.cli.cursors.export_format import dump
from feedapi_client.cli.cursors.feed_positions import FeedPositions, load_feeds
from feedapi_client.cli.cursors.lag import CAUGHT_UP, LagLookup
from feedapi_client.cli.cursors.selection import Selection

_STATUS_STYLES = {"open": "green", "drained": "dim", "superseded": "dim"}


def print_positions(selection: Selection, lookup: LagLookup | None, *, json: bool) -> None:
    """Print the chosen positions as tables or JSON; with `lookup` also how far behind they are."""
    feeds = run_async(load_feeds, selection, lookup)
    if json:
        print(escape_json(dump(feeds), sys.stdout.encoding))
        return
    if not feeds:
        console().print("no positions are stored")
    for feed in feeds:
        _print_feed(feed)


def _print_feed(feed: FeedPositions) -> None:
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
        cells.append((feed.lag[id], _lag_style(feed.lag[id])))
    return cells


def _lag_style(text: str) -> str:
    if text == CAUGHT_UP:
        return "cyan"
    if text.startswith(("unknown", "no longer")):
        return "red"
    return "yellow" if text.startswith(("behind", "not begun")) else "dim"
