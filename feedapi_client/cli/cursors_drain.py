"""``feedapi cursors drain``: mark a closed partition as read to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from feedapi_client.cli.escape import shown_line
from feedapi_client.cli.reporting import report, run_async
from feedapi_client.cli.store_options import ConsumerOfFeed, Partition, Yes

if TYPE_CHECKING:
    from feedapi_client.operations import Change


@dataclass(frozen=True, kw_only=True)
class CursorsDrain:
    """Options of ``feedapi cursors drain``."""

    target: ConsumerOfFeed
    partition: Partition
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help=(
                "Although the feed lists the partition as open, neither it nor a cursor is known, "
                "or instances that share the feed are alive."
            ),
        ),
    ] = False
    yes: Yes = False


def cursors_drain(options: CursorsDrain) -> None:
    """Mark a closed partition as drained: what was not read of it is skipped, its children start.

    For a partition whose end the feed can't serve. Refused while the feed lists it as open.
    """
    change = run_async(_plan, options)
    where = f"{shown_line(change.key)}: partition {options.partition}"
    if not change.after:
        report(f"{where} is drained already")
        return
    if not options.yes:
        typer.confirm(
            f"{where} {change.reason}. Events that were not read will be skipped. Mark it as "
            "drained?",
            abort=True,
        )
    run_async(apply, options.target, change, options.force)
    report(f"{where} is drained")


async def _plan(options: CursorsDrain) -> Change:
    from feedapi_client.operations import drain

    async with options.target.open() as (store, feed):
        return await drain(store, feed, options.partition, force=options.force, dry_run=True)


async def apply(target: ConsumerOfFeed, change: Change, force: bool) -> None:
    """Save a change that was planned, and confirmed meanwhile."""
    from feedapi_client.operations import apply_change

    async with target.place.open() as store:
        await apply_change(store, change, force=force)
