"""``feedapi cursors rewind``: take a consumer back to the positions of an earlier time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from feedapi_client.cli.escape import shown_line
from feedapi_client.cli.reporting import report, run_async
from feedapi_client.cli.store_options import BesideInstances, Chosen, StorePlace, Yes
from feedapi_client.cli.times import parse_time

if TYPE_CHECKING:
    from feedapi_client.cli.terminal import Cell
    from feedapi_client.model import Position
    from feedapi_client.operations import Change


@dataclass(frozen=True, kw_only=True)
class CursorsRewind:
    """Options of ``feedapi cursors rewind``."""

    to: Annotated[
        str,
        typer.Option("--to", metavar="TIME", help="'2 hours ago', 14:30 (today), or an ISO time."),
    ]
    place: StorePlace
    chosen: Chosen
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False
    force: BesideInstances = False
    yes: Yes = False


def cursors_rewind(options: CursorsRewind) -> None:
    """Take a consumer back to the positions of a time.

    Needs the journal of the store: 'feedapi run --journal DAYS', or a SQLite or SQL store with
    journal=Journal().
    """
    try:
        when = parse_time(options.to)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if options.dry_run or not options.yes:
        _print_change(run_async(_rewind, options, when, True), when)
        if options.dry_run:
            # A time such as "2 hours ago" is another one in the next command.
            print(f"To do this: --to {when.isoformat()}")
            return
        typer.confirm("Stop the consumer first. Rewind?", abort=True)
    done = run_async(_rewind, options, when, False)
    report(f"{shown_line(done.key)}: {len(done.after)} positions are those of {_shown(when)}")


async def _rewind(options: CursorsRewind, when: datetime, dry_run: bool) -> Change:
    from feedapi_client.operations import rewind
    from feedapi_client.stores.base import JournalledStore

    async with options.place.open() as store:
        if not isinstance(store, JournalledStore):
            raise typer.BadParameter("rewind: this kind of store keeps no journal")
        key = await options.chosen.one_feed(store)
        return await rewind(store, key, when, force=options.force, dry_run=dry_run)


def _print_change(change: Change, when: datetime) -> None:
    from feedapi_client.cli.terminal import console, plain_line, print_table

    now, then = change.before, change.after
    console().print(plain_line(f"{change.key}, at {_shown(when)}", "bold"))
    print_table(
        ("partition", "status now", "cursor now", "status then", "cursor then"),
        [_row(id, now.get(id), then.get(id)) for id in sorted(now.keys() | then.keys())],
    )


def _row(id: int, now: Position | None, then: Position | None) -> list[Cell]:
    before = (now.status, now.cursor) if now else ("", "")
    after = (then.status, then.cursor) if then else ("forgotten", "")
    style = "" if before == after else "yellow"
    return [str(id), *before, *((text, style) for text in after)]


def _shown(when: datetime) -> str:
    return when.isoformat(sep=" ", timespec="seconds")
