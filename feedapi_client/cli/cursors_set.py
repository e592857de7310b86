"""``feedapi cursors set``: set the cursor of a partition."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from feedapi_client.cli.escape import shown, shown_line
from feedapi_client.cli.reporting import report
from feedapi_client.cli.store_options import BesideInstances, Chosen, Filters, Partition, StorePlace
from feedapi_client.errors import FeedError


class PositionStatus(StrEnum):
    """The statuses that a position can be set to."""

    OPEN = "open"
    DRAINED = "drained"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, kw_only=True)
class CursorsSet:
    """Options of ``feedapi cursors set``."""

    partition: Partition
    cursor: Annotated[
        str,
        typer.Argument(
            metavar="CURSOR", help="Reading goes on after this place; _first for the beginning."
        ),
    ]
    place: StorePlace
    chosen: Chosen
    filters: Filters = None
    status: Annotated[
        PositionStatus,
        typer.Option(
            help="drained: read to the end. superseded: its successors went on from here."
        ),
    ] = PositionStatus.OPEN
    force: BesideInstances = False


async def cursors_set(options: CursorsSet) -> None:
    """Set the cursor of a partition.

    With a complete URL as --feed also for a feed that the store does not know yet.
    """
    from feedapi_client.cli.databases import is_gap
    from feedapi_client.model import Position
    from feedapi_client.operations import set_position
    from feedapi_client.operations.stored_positions import check_cursor

    chosen, filters = options.chosen, options.filters
    try:
        check_cursor(options.cursor)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    exact = chosen.exact_key(filters)
    async with options.place.open(create=exact is not None) as store:
        try:
            stored = await store.feeds()
        except FeedError as error:
            if exact is None or not is_gap(error):
                raise
            stored = []  # what is left can't be read, and is replaced
        known = any(chosen.matches(key, filters) for key in stored)
        new = exact if exact is not None and not known else None
        key = new or await chosen.one_feed(store, filters)
        position = Position(options.cursor, options.status.value)
        await set_position(store, key, options.partition, position, force=options.force)
    report(f"{shown_line(key)}: partition {options.partition} is at '{shown(options.cursor)}'")
