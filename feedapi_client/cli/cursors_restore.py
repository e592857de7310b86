"""``feedapi cursors restore``: move cursors back after a publisher was rolled back (R11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from feedapi_client.cli.escape import shown, shown_line
from feedapi_client.cli.reporting import report, run_async
from feedapi_client.cli.store_options import ConsumerOfFeed, Yes

if TYPE_CHECKING:
    from feedapi_client.operations import Change


@dataclass(frozen=True, kw_only=True)
class CursorsRestore:
    """Options of ``feedapi cursors restore``."""

    target: ConsumerOfFeed
    partitions: Annotated[
        list[int],
        typer.Argument(
            min=0,
            max=32767,
            metavar="PARTITION...",
            help="Listed as open again. Several that were merged are restored together.",
        ),
    ]
    successors: Annotated[
        list[int] | None,
        typer.Option(
            "--successor",
            min=0,
            max=32767,
            metavar="ID",
            help="Holds its cursor now. Default: those with a cursor that are not listed any "
            "more. Repeatable.",
        ),
    ] = None
    cursor: Annotated[
        str | None,
        typer.Option(
            "--cursor",
            metavar="CURSOR",
            help="Go on after this place, where the successors stand at different cursors.",
        ),
    ] = None
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help=(
                "Although the feed does not list the partition as open, or instances that share "
                "the feed are alive."
            ),
        ),
    ] = False
    yes: Yes = False


def cursors_restore(options: CursorsRestore) -> None:
    """Move cursors back to a partition, after its publisher was rolled back behind a split.

    For a partition that is listed as open again although its successors took over its cursor. They
    lose it in the same step, and take it over again when the publisher goes forward: neither way
    repeats or skips events.
    """
    from feedapi_client.cli.cursors_drain import apply
    from feedapi_client.protocol.text import names

    change = run_async(_plan, options)
    where = f"{shown_line(change.key)}: {names(options.partitions)}"
    given_back = sorted(change.after.keys() - set(options.partitions))
    at = shown(change.after[min(options.partitions)].cursor)
    source = f", which {names(given_back)} held" if given_back else ""
    if not options.yes:
        typer.confirm(f"{where}: go on from the cursor '{at}'{source}?", abort=True)
    run_async(apply, options.target, change, options.force)
    report(f"{where} at '{at}'{source}")


async def _plan(options: CursorsRestore) -> Change:
    from feedapi_client.operations import restore
    from feedapi_client.operations.stored_positions import check_cursor

    try:
        if options.cursor is not None:
            check_cursor(options.cursor)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    async with options.target.open() as (store, feed):
        return await restore(
            store,
            feed,
            frozenset(options.partitions),
            successors=options.successors,
            cursor=options.cursor,
            force=options.force,
            dry_run=True,
        )
