"""``feedapi quarantine show``: print one event with its payload."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from feedapi_client.cli.escape import print_json
from feedapi_client.cli.quarantine_options import with_payload
from feedapi_client.cli.store_options import Store


@dataclass(frozen=True, kw_only=True)
class QuarantineShow:
    """Options of ``feedapi quarantine show``."""

    id: Annotated[str, typer.Argument(metavar="ID")]
    store: Store
    raw: Annotated[bool, typer.Option("--raw", help="Print the payload alone, byte for byte.")] = (
        False
    )


async def quarantine_show(options: QuarantineShow) -> None:
    """Print one event as JSON: where it comes from, the error, headers and payload."""
    from feedapi_client import quarantine
    from feedapi_client.cli.databases import open_quarantine_of
    from feedapi_client.cli.stdout import for_terminal

    async with open_quarantine_of(options.store) as store:
        event = await quarantine.show(store, options.id)
    if options.raw:
        data = for_terminal(event.raw) if sys.stdout.isatty() else event.raw
        sys.stdout.buffer.write(data + b"\n")
        sys.stdout.buffer.flush()
    else:
        print_json(with_payload(event))
