"""``feedapi quarantine show``: print one event with its payload."""

from __future__ import annotations

import sys

from feedapi_client import quarantine
from feedapi_client.cli.common.json_output import print_json
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.common.stdout import for_terminal
from feedapi_client.cli.quarantine.event_json import with_payload
from feedapi_client.cli.quarantine.selection import Selection
from feedapi_client.quarantine import QuarantinedEvent


def show_event(selection: Selection, id: str, *, raw: bool) -> None:
    """Print an event as JSON; with `raw` its payload alone, byte for byte."""
    event = run_async(_load, selection, id)
    if raw:
        data = for_terminal(event.raw) if sys.stdout.isatty() else event.raw
        sys.stdout.buffer.write(data + b"\n")
        sys.stdout.buffer.flush()
    else:
        print_json(with_payload(event))


async def _load(selection: Selection, id: str) -> QuarantinedEvent:
    async with selection.open() as store:
        return await quarantine.show(store, id)
