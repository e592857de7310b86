"""``feedapi quarantine drop``: delete events."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from feedapi_client.cli.quarantine_options import All, ChosenEvents, Ids
from feedapi_client.cli.reporting import report, run_async
from feedapi_client.cli.store_options import Yes


@dataclass(frozen=True, kw_only=True)
class QuarantineDrop:
    """Options of ``feedapi quarantine drop``."""

    ids: Ids = None
    selected: ChosenEvents
    every: All = False
    yes: Yes = False


def quarantine_drop(options: QuarantineDrop) -> None:
    """Delete events for good."""
    options.selected.check(options.ids, every=options.every)
    ids = options.ids or run_async(_ids, options)
    if not options.yes:
        typer.confirm(f"Delete {len(ids)} events for good?", abort=True)
    report(f"{run_async(_drop, options, ids)} events deleted")


async def _ids(options: QuarantineDrop) -> list[str]:
    async with options.selected.open() as store:
        return await options.selected.ids(store, None)


async def _drop(options: QuarantineDrop, ids: list[str]) -> int:
    from feedapi_client import quarantine

    async with options.selected.open() as store:
        return await quarantine.drop(store, ids)
