"""``feedapi quarantine ls``: list events without their payloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from feedapi_client.cli.escape import print_json
from feedapi_client.cli.feed_options import Json
from feedapi_client.cli.quarantine_options import ChosenEvents, summary

if TYPE_CHECKING:
    from feedapi_client.cli.terminal import Cell
    from feedapi_client.quarantine import QuarantinedEvent


@dataclass(frozen=True, kw_only=True)
class QuarantineLs:
    """Options of ``feedapi quarantine ls``."""

    selected: ChosenEvents
    json: Json = False


async def quarantine_ls(options: QuarantineLs) -> None:
    """List events: where they come from, and what went wrong.

    Payloads and error texts are not listed: see 'show'.
    """
    from feedapi_client.cli.terminal import print_table

    async with options.selected.open() as store:
        events = await options.selected.load(store)
    if options.json:
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
