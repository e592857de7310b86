"""``feedapi quarantine replay``: call the application's handler with events once more."""

from __future__ import annotations

import typer

from feedapi_client import quarantine
from feedapi_client.cli.common.escape import shown
from feedapi_client.cli.common.exit_codes import FAILURE
from feedapi_client.cli.common.handlers import Handler, import_handler
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.quarantine.selection import Selection
from feedapi_client.quarantine import QuarantinedEvent, Replayed


def replay_events(selection: Selection, ids: list[str] | None, handler: str) -> None:
    """Call the handler MODULE:FUNCTION with the events of `ids`, or with the chosen ones.

    Exits with code 1 when an event failed again.
    """
    result = run_async(_replay, selection, ids, import_handler(handler))
    print(f"{result.handled} events handled, {result.failed} failed again and stay")
    if result.failed:
        raise typer.Exit(FAILURE)


async def _replay(selection: Selection, ids: list[str] | None, handler: Handler) -> Replayed:
    async with selection.open() as store:
        to_replay = ids or [event.id for event in await selection.events(store)]
        return await quarantine.replay(store, handler, to_replay, report=_print_result)


def _print_result(event: QuarantinedEvent, error: Exception | None) -> None:
    # Only the type of the error: its text may quote the payload.
    result = "handled" if error is None else f"failed again: {type(error).__qualname__}"
    print(f"{shown(event.id)}  {shown(result)}", flush=True)
