"""``feedapi cursors set``: set the cursor of a partition."""

from __future__ import annotations

import typer

from feedapi_client.cli.common.escape import shown, shown_line
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.cursors.selection import Selection
from feedapi_client.model import FeedKey, Position
from feedapi_client.protocol.cursors import MAX_CURSOR, is_valid


def set_cursor(selection: Selection, partition: int, position: Position) -> None:
    """Make `position` the current one of the partition, and print what was done.

    A complete URL as choice may name a feed that the store does not know yet.
    """
    cursor = position.cursor
    if not is_valid(cursor):
        raise typer.BadParameter(f"a cursor is printable ASCII of at most {MAX_CURSOR} characters")
    key = run_async(_replace, selection, partition, position)
    print(f"{shown_line(key)}: partition {partition} is at '{shown(cursor)}'")


async def _replace(selection: Selection, partition: int, position: Position) -> FeedKey:
    exact = selection.choice.exact_key()
    async with selection.open(create=exact is not None) as store:
        known = await selection.feeds(store)
        key = exact if exact is not None and not known else await selection.one_feed(store)
        await store.replace(key, {partition: position})
    return key
