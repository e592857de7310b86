"""What ``feedapi cursors`` does to a store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from urllib.parse import urlsplit

import typer

from feedapi_client.cli.common.errors import CommandError
from feedapi_client.cli.common.http_client import fetch_options
from feedapi_client.cli.common.stores import open_store
from feedapi_client.cli.cursors.lag import FeedLag, Lookup
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import AdministrableStore, JournalledStore

Positions = Mapping[int, Position]


@dataclass(frozen=True, slots=True)
class Target:
    """A store, and which of its feeds is meant: `feed` is a URL or a part of one."""

    store: str
    table: str
    feed: str | None = None
    name: str | None = None
    filters: list[str] | None = None

    @asynccontextmanager
    async def open(self, *, create: bool = False) -> AsyncIterator[AdministrableStore]:
        """The store."""
        async with open_store(self.store, create=create, table=self.table) as store:
            yield store

    def matches(self, key: FeedKey) -> bool:
        """Whether the key is meant."""
        if self.name is not None and key.name != self.name:
            return False
        if self.filters is not None and key.filters != self._selection():
            return False
        return (
            self.feed is None
            or self.feed in key.url
            or (_is_url(self.feed) and FeedKey(self.feed).url == key.url)
        )

    def key(self) -> FeedKey | None:
        """The key that a whole URL names, whether the store knows it or not."""
        if self.feed is None or not _is_url(self.feed):
            return None
        return FeedKey(self.feed, self.name or "default", self._selection())

    def _selection(self) -> tuple[tuple[str, str], ...]:
        return tuple(sorted(fetch_options(self.filters).selection().items()))

    async def one(self, store: AdministrableStore) -> FeedKey:
        """The only key that matches. Raises `CommandError` when there is none, or more than one."""
        keys = [key for key in await store.feeds() if self.matches(key)]
        if len(keys) == 1:
            return keys[0]
        if (exact := self.key()) in keys and exact is not None:
            return exact
        if not keys:
            raise CommandError(
                "the store holds no positions"
                + (
                    " of such a feed and name: see 'feedapi cursors ls'"
                    if self.feed or self.name
                    else ""
                )
            )
        raise CommandError(
            f"the store holds positions of {len(keys)}: choose with --feed and --name: {'; '.join(map(str, keys[:10]))}"
        )


def _is_url(text: str) -> bool:
    return urlsplit(text).scheme in ("http", "https")


async def listed(
    target: Target, lookup: Lookup | None
) -> dict[FeedKey, tuple[Positions, FeedLag | None]]:
    """The positions of all feeds meant; with `lookup` those of its feed only, and how far behind they are."""
    async with target.open() as store:
        keys = [
            key
            for key in await store.feeds()
            if target.matches(key) and (lookup is None or lookup.matches(key))
        ]
        if not keys and (lookup is not None or target.feed or target.name):
            raise CommandError(
                "the store holds no positions of such a feed and name: see 'feedapi cursors ls'"
            )
        positions = {key: await store.load(key) for key in keys}
    return {
        key: (positions[key], await lookup.lag(key, positions[key]) if lookup else None)
        for key in keys
    }


async def set_position(
    target: Target, partition: int, cursor: str, status: Literal["open", "drained", "superseded"]
) -> FeedKey:
    """Set one position."""
    exact = target.key()
    async with target.open(create=exact is not None) as store:
        keys = [key for key in await store.feeds() if target.matches(key)]
        key = (
            exact if exact is not None and (not keys or exact in keys) else await target.one(store)
        )
        await store.replace(key, {partition: Position(cursor, status)})
    return key


async def chosen(target: Target) -> tuple[FeedKey, Positions]:
    """The feed meant, and its positions."""
    async with target.open() as store:
        key = await target.one(store)
        return key, await store.load(key)


async def reset(target: Target, partitions: list[int] | None) -> tuple[FeedKey, int]:
    """Forget positions; returns how many."""
    async with target.open() as store:
        key = await target.one(store)
        stored = await store.load(key)
        doomed = stored.keys() & set(partitions) if partitions else stored.keys()
        if partitions and not doomed:
            raise CommandError(
                f"{key}: nothing is stored for partition {', '.join(map(str, partitions))}"
            )
        await store.delete(key, None if not partitions else doomed)
        return key, len(doomed)


async def already_there(target: Target, feeds: Mapping[FeedKey, Positions]) -> int:
    """How many positions an import would replace."""
    async with target.open(create=True) as store:
        return sum(
            [
                len((await store.load(key)).keys() & positions.keys())
                for key, positions in feeds.items()
            ]
        )


async def import_positions(target: Target, feeds: Mapping[FeedKey, Positions]) -> None:
    """Replace positions, each feed's all at once."""
    async with target.open(create=True) as store:
        for key, positions in feeds.items():
            await store.replace(key, positions)


def _journalled(store: AdministrableStore) -> JournalledStore:
    if not isinstance(store, JournalledStore):
        raise typer.BadParameter("rewind: this kind of store keeps no journal")
    return store


async def rewound(target: Target, when: datetime) -> tuple[FeedKey, Positions, Positions]:
    """The feed meant, its positions now, and those of that time."""
    async with target.open() as store:
        journalled = _journalled(store)
        key = await target.one(store)
        return key, await store.load(key), await journalled.positions_at(key, when)


async def rewind(target: Target, when: datetime) -> tuple[FeedKey, Positions]:
    """Do it; returns the positions."""
    async with target.open() as store:
        journalled = _journalled(store)
        key = await target.one(store)
        return key, await journalled.rewind(key, when)
