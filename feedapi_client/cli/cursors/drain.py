"""``feedapi cursors drain``: mark a closed partition as read to its end."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from feedapi_client.cli.common.errors import CommandError
from feedapi_client.cli.common.escape import shown, shown_line
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.cursors.target import Target
from feedapi_client.model import LAST, Partition, Position


@dataclass(frozen=True, slots=True)
class _Found:
    """What the feed lists of the partition, and what the store holds."""

    listed: Partition | None
    stored: Position | None

    @property
    def is_open(self) -> bool:
        return self.listed is not None and not self.listed.closed

    def drained(self) -> Position:
        """Return the position to save."""
        if self.stored is not None:
            return self.stored.advance(status="drained")
        end = self.listed.last_cursor if self.listed is not None else None
        return Position(end or LAST, "drained")

    def __str__(self) -> str:
        if self.listed is None:
            state = "is not listed by the feed"
        elif self.listed.closed:
            end = self.listed.last_cursor
            state = "is closed" + ("" if end is None else f" and ends at '{shown(end)}'")
        else:
            state = "is open"
        cursor = "no cursor" if self.stored is None else f"the cursor '{shown(self.stored.cursor)}'"
        return f"{state}; {cursor} is stored"


def drain_partition(target: Target, partition: int, *, force: bool, confirm: bool) -> None:
    """Mark the partition as drained, so that its children start; with `confirm` ask first.

    Raises `CommandError` for a partition that is open or unknown, unless `force`.
    """
    found = run_async(_look, target, partition)
    where = f"{shown_line(target.key)}: partition {partition}"
    if found.stored is not None and found.stored.status == "drained":
        print(f"{where} is drained already")
        return
    _check(found, where, force=force)
    if confirm:
        question = (
            f"{where} {found}. Events that were not read will be skipped. Mark it as drained?"
        )
        typer.confirm(question, abort=True)
    run_async(_save, target, partition, found.drained())
    print(f"{where} is drained")


def _check(found: _Found, where: str, *, force: bool) -> None:
    if found.stored is not None and found.stored.status == "superseded":
        raise CommandError(
            f"{where} is superseded: its successors took over its cursor, nobody waits for it"
        )
    if force:
        return
    if found.is_open:
        raise CommandError(
            f"{where} is open: the feed may add events to it, and its children would start before "
            "those. A consumer reads an open partition on, drained or not. If the feed's answer "
            "lags behind and the partition is closed, give --force"
        )
    if found.listed is None and found.stored is None:
        raise CommandError(
            f"{where} is neither listed by the feed nor stored. If a child waits for it all the "
            "same, give --force"
        )


async def _look(target: Target, partition: int) -> _Found:
    async with target.open_store() as store:
        stored = await store.load(target.key)
        if not stored:
            raise CommandError(
                f"{target.key}: no cursor is stored for this feed and consumer: see "
                "'feedapi cursors ls'"
            )
    info = await target.discover()
    return _Found(info.partitions.get(partition), stored.get(partition))


async def _save(target: Target, partition: int, position: Position) -> None:
    # Refused when a consumer changed the position after it was shown.
    async with target.open_store() as store:
        await store.save(target.key, {partition: position})
