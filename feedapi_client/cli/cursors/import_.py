"""``feedapi cursors import``: store exported positions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import typer

from feedapi_client.cli.common.escape import shown_line
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.cursors.export_format import parse_export
from feedapi_client.cli.cursors.selection import Selection
from feedapi_client.model import FeedKey, Position

_STDIN = "-"

Feeds = Mapping[FeedKey, Mapping[int, Position]]


def import_positions(selection: Selection, source: str, *, confirm: bool) -> None:
    """Make the positions of an export the current ones.

    With `confirm`, ask before positions are replaced; not when `source` is stdin.
    """
    feeds = parse_export(_read(source))
    if confirm and source != _STDIN and (count := run_async(_count_stored, selection, feeds)):
        typer.confirm(
            f"{count} positions are there already and will be replaced. Go on?", abort=True
        )
    run_async(_replace, selection, feeds)
    for key, positions in feeds.items():
        print(f"{shown_line(key)}: {len(positions)} positions imported")


def _read(source: str) -> bytes:
    if source == _STDIN:
        return sys.stdin.buffer.read()
    return Path(source).read_bytes()


async def _count_stored(selection: Selection, feeds: Feeds) -> int:
    """Return how many of these positions the store has already."""
    count = 0
    async with selection.open(create=True) as store:
        for key, positions in feeds.items():
            count += len((await store.load(key)).keys() & positions.keys())
    return count


async def _replace(selection: Selection, feeds: Feeds) -> None:
    async with selection.open(create=True) as store:
        for key, positions in feeds.items():
            await store.replace(key, positions)
