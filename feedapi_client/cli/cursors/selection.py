"""The store and the feeds in it that a command of ``feedapi cursors`` works on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from feedapi_client.cli.common.errors import CommandError
from feedapi_client.cli.common.feed_choice import FeedChoice
from feedapi_client.cli.common.stores import open_store
from feedapi_client.model import FeedKey
from feedapi_client.stores.base import AdministrableStore


@dataclass(frozen=True, slots=True)
class Selection:
    """A cursor store, and which of its feeds are meant."""

    store: str
    table: str
    choice: FeedChoice

    @asynccontextmanager
    async def open(self, *, create: bool = False) -> AsyncIterator[AdministrableStore]:
        """Open the store; see `open_store`."""
        async with open_store(self.store, create=create, table=self.table) as store:
            yield store

    async def feeds(self, store: AdministrableStore) -> list[FeedKey]:
        """Return the keys that are chosen among those of the store."""
        return [key for key in await store.feeds() if self.choice.matches(key)]

    async def one_feed(self, store: AdministrableStore) -> FeedKey:
        """Return the only chosen key, or the one that is given exactly.

        Raises `CommandError` when there is none, or more than one.
        """
        keys = await self.feeds(store)
        exact = self.choice.exact_key()
        if exact is not None and exact in keys:
            return exact
        if len(keys) == 1:
            return keys[0]
        if not keys and self.choice:
            raise no_such_positions()
        if not keys:
            raise CommandError("the store holds no positions")
        raise CommandError(
            f"the store holds positions of {len(keys)} feeds and names: "
            f"choose with --feed and --name: {'; '.join(map(str, keys[:10]))}"
        )


def no_such_positions(hint: str = "") -> CommandError:
    """Return the error of a choice for which nothing is stored, with a hint where it may be."""
    return CommandError(
        hint or "the store holds no positions of such a feed and name: see 'feedapi cursors ls'"
    )
