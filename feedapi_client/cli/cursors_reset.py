"""``feedapi cursors reset``: delete positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from feedapi_client.cli.escape import shown_line
from feedapi_client.cli.feed_options import OnlyPartitions
from feedapi_client.cli.reporting import report, run_async
from feedapi_client.cli.store_options import BesideInstances, Chosen, StorePlace, Yes

if TYPE_CHECKING:
    from feedapi_client.operations import FeedPositions


@dataclass(frozen=True, kw_only=True)
class CursorsReset:
    """Options of ``feedapi cursors reset``."""

    place: StorePlace
    chosen: Chosen
    partitions: OnlyPartitions = None
    force: BesideInstances = False
    yes: Yes = False


def cursors_reset(options: CursorsReset) -> None:
    """Forget positions.

    Without any, the consumer starts anew. A single partition begins again at its first event, or
    where its lineage says.
    """
    if not options.yes:
        found, stored = run_async(_reset, options, True)
        count = len(found.positions)
        typer.confirm(f"{shown_line(found.key)}: forget {count} of {stored} positions?", abort=True)
    found, _ = run_async(_reset, options, False)
    report(f"{shown_line(found.key)}: {len(found.positions)} positions forgotten")


async def _reset(options: CursorsReset, dry_run: bool) -> tuple[FeedPositions, int]:
    """Return what is deleted, and the number of positions before."""
    from feedapi_client.operations import reset

    async with options.place.open() as store:
        key = await options.chosen.one_feed(store)
        stored = len(await store.load(key))
        partitions = options.partitions or None
        found = await reset(store, key, partitions, force=options.force, dry_run=dry_run)
        return found, stored
