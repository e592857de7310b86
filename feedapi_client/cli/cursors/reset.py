"""``feedapi cursors reset``: delete positions."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from feedapi_client.cli.common.errors import CommandError
from feedapi_client.cli.common.escape import shown_line
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.cursors.selection import Selection
from feedapi_client.model import FeedKey, Position


def reset_positions(selection: Selection, partitions: list[int] | None, *, confirm: bool) -> None:
    """Delete the positions of one feed, or of some of its partitions; with `confirm` ask first."""
    if confirm:
        key, positions = run_async(_load, selection)
        count = len(_to_delete(positions, partitions))
        typer.confirm(
            f"{shown_line(key)}: forget {count} of {len(positions)} positions?", abort=True
        )
    key, count = run_async(_delete, selection, partitions)
    print(f"{shown_line(key)}: {count} positions forgotten")


def _to_delete(positions: Mapping[int, Position], partitions: list[int] | None) -> set[int]:
    return positions.keys() & set(partitions) if partitions else set(positions)


async def _load(selection: Selection) -> tuple[FeedKey, Mapping[int, Position]]:
    async with selection.open() as store:
        key = await selection.one_feed(store)
        return key, await store.load(key)


async def _delete(selection: Selection, partitions: list[int] | None) -> tuple[FeedKey, int]:
    async with selection.open() as store:
        key = await selection.one_feed(store)
        to_delete = _to_delete(await store.load(key), partitions)
        if partitions and not to_delete:
            raise CommandError(
                f"{key}: nothing is stored for partition {', '.join(map(str, partitions))}"
            )
        await store.delete(key, to_delete if partitions else None)
        return key, len(to_delete)
