"""``feedapi quarantine replay``: call the application's handler with events once more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from feedapi_client.cli.escape import shown
from feedapi_client.cli.exit_codes import FAILURE
from feedapi_client.cli.quarantine_options import All, ChosenEvents, Ids
from feedapi_client.cli.reporting import report

if TYPE_CHECKING:
    from feedapi_client.quarantine import QuarantinedEvent


@dataclass(frozen=True, kw_only=True)
class QuarantineReplay:
    """Options of ``feedapi quarantine replay``."""

    ids: Ids = None
    selected: ChosenEvents
    every: All = False
    handler: Annotated[
        str,
        typer.Option(
            "--handler",
            metavar="MODULE:FUNCTION",
            help=(
                "The application's handler in every form that 'feedapi run' takes, searched in "
                "this directory too."
            ),
        ),
    ]


async def quarantine_replay(options: QuarantineReplay) -> int:
    """Call the application's handler with events once more.

    They are replayed in the order in which they were quarantined. Those that fail again stay, and
    the exit code is 1 then.
    """
    from feedapi_client import quarantine
    from feedapi_client.cli.handler_import import import_handler, open_handler

    options.selected.check(options.ids, every=options.every)
    function = import_handler(options.handler)
    async with options.selected.open() as store, open_handler(options.handler, function) as handler:
        ids = await options.selected.ids(store, options.ids)
        result = await quarantine.replay(store, handler, ids, report=_print_result)
    report(f"{result.handled} events handled, {result.failed} failed again and stay")
    return FAILURE if result.failed else 0


def _print_result(event: QuarantinedEvent, error: Exception | None) -> None:
    from feedapi_client.quarantine.failure_text import failure_line

    result = "handled" if error is None else f"failed again: {failure_line(error)}"
    report(f"{shown(event.id)}  {shown(result)}")
