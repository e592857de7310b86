"""``feedapi quarantine drop``: delete events."""

from __future__ import annotations

import typer

from feedapi_client import quarantine
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.quarantine.selection import Selection, load_events


def drop_events(selection: Selection, ids: list[str] | None, *, confirm: bool) -> None:
    """Delete the events of `ids`, or the chosen ones; with `confirm` ask first."""
    to_delete = ids or [event.id for event in run_async(load_events, selection)]
    if confirm:
        typer.confirm(f"Delete {len(to_delete)} events for good?", abort=True)
    print(f"{run_async(_drop, selection, to_delete)} events deleted")


async def _drop(selection: Selection, ids: list[str]) -> int:
    async with selection.open() as store:
        return await quarantine.drop(store, ids)
