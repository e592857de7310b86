"""``feedapi quarantine ls``: list events without their payloads."""

from __future__ import annotations

from feedapi_client.cli.common.json_output import print_json
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.common.tables import Cell, print_table
from feedapi_client.cli.quarantine.event_json import summary
from feedapi_client.cli.quarantine.selection import Selection, load_events
from feedapi_client.quarantine import QuarantinedEvent


def print_events(selection: Selection, *, json: bool) -> None:
    """Print the chosen events as a table, or as JSON."""
    events = run_async(load_events, selection)
    if json:
        print_json([summary(event) for event in events])
    elif not events:
        print("the quarantine is empty")
    else:
        columns = ("id", "since", "consumer", "partition", "error", "bytes")
        print_table(columns, [_row(event) for event in events])


def _row(event: QuarantinedEvent) -> list[Cell]:
    return [
        event.id,
        event.time.isoformat(sep=" ", timespec="seconds"),
        str(event.feed),
        str(event.partition),
        event.error_type,
        str(len(event.raw)),
    ]
