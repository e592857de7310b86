"""``feedapi cursors move``: keep the cursors of a feed that moved to another URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import typer

from feedapi_client.cli.common.errors import CommandError
from feedapi_client.cli.common.escape import shown_line
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.common.stores import open_store
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import AdministrableStore


@dataclass(frozen=True, slots=True)
class Move:
    """Which cursors of a store are moved, and where to."""

    store: str
    table: str
    old: str
    new: str
    name: str | None
    overwrite: bool

    def keys(self, stored: list[FeedKey]) -> dict[FeedKey, FeedKey]:
        """Return the new key of each stored key that is moved."""
        # As the user gave it, or as `ls` and messages show it, with a digest of its query.
        old = {self.old, FeedKey(self.old).url}
        return {
            key: FeedKey(self.new, key.name, key.filters)
            for key in stored
            if key.url in old and self.name in (None, key.name)
        }


def move_cursors(move: Move) -> None:
    """Move the cursors of all consumers, or of one, and print what was moved."""
    if FeedKey(move.old).url == FeedKey(move.new).url:
        raise typer.BadParameter("OLD_URL and NEW_URL have the same cursors")
    for key, positions in run_async(_move, move).items():
        print(f"{shown_line(key)}: {len(positions)} positions moved here")


async def _move(move: Move) -> Mapping[FeedKey, Mapping[int, Position]]:
    async with open_store(move.store, create=False, table=move.table) as store:
        stored = await store.feeds()
        keys = move.keys(stored)
        if not keys:
            raise CommandError(
                f"the store holds no cursors of {FeedKey(move.old).url}: see 'feedapi cursors ls'"
            )
        return await _move_keys(store, keys, stored, overwrite=move.overwrite)


async def _move_keys(
    store: AdministrableStore,
    keys: Mapping[FeedKey, FeedKey],
    stored: list[FeedKey],
    *,
    overwrite: bool,
) -> Mapping[FeedKey, Mapping[int, Position]]:
    taken = [key for key in keys.values() if key in stored]
    if taken and not overwrite:
        raise CommandError(
            f"{taken[0]}: there are cursors already, nothing was moved: --overwrite deletes them"
        )
    # Checks again in its transaction.
    return await store.move(keys, overwrite=overwrite)
