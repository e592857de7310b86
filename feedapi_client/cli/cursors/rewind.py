"""``feedapi cursors rewind``: take a consumer back to the positions of an earlier time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import typer

from feedapi_client.cli.common.console import console, plain_line
from feedapi_client.cli.common.escape import shown_line
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.common.tables import Cell, print_table
from feedapi_client.cli.common.times import parse_time
from feedapi_client.cli.cursors.selection import Selection
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import AdministrableStore, JournalledStore
from feedapi_client.stores.journal import check_rewind

Positions = Mapping[int, Position]


def rewind_positions(selection: Selection, to: str, *, dry_run: bool, confirm: bool) -> None:
    """Restore the positions of a time, by the journal of the store.

    With `dry_run` only print what would change; with `confirm` print it and ask first.
    """
    try:
        when = parse_time(to)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if dry_run or confirm:
        key, now, then = run_async(_compare, selection, when)
        _print_changes(key, when, now, then)
        if dry_run:
            # A time such as "2 hours ago" is another one in the next command.
            print(f"To do this: --to {when.isoformat()}")
            return
        typer.confirm("Stop the consumer first. Rewind?", abort=True)
    key, positions = run_async(_rewind, selection, when)
    print(f"{shown_line(key)}: {len(positions)} positions are those of {_shown(when)}")


async def _compare(selection: Selection, when: datetime) -> tuple[FeedKey, Positions, Positions]:
    """Return the chosen feed, its positions now, and those of that time.

    Raises `StoreError` where the rewind would.
    """
    async with selection.open() as store:
        journalled = _with_journal(store)
        key = await selection.one_feed(store)
        then = await journalled.positions_at(key, when)
        check_rewind(key, when, then)  # what the rewind itself refuses
        return key, await store.load(key), then


async def _rewind(selection: Selection, when: datetime) -> tuple[FeedKey, Positions]:
    async with selection.open() as store:
        journalled = _with_journal(store)
        key = await selection.one_feed(store)
        return key, await journalled.rewind(key, when)


def _with_journal(store: AdministrableStore) -> JournalledStore:
    if not isinstance(store, JournalledStore):
        raise typer.BadParameter("rewind: this kind of store keeps no journal")
    return store


def _print_changes(key: FeedKey, when: datetime, now: Positions, then: Positions) -> None:
    console().print(plain_line(f"{key}, at {_shown(when)}", "bold"))
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
