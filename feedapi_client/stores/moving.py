"""Cursors of a feed that moved to another URL: how they are moved, and how they are found."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from urllib.parse import urlsplit

import orjson

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.protocol.text import printable
from feedapi_client.stores.base import (
    AdministrableStore,
    Closable,
    CursorStore,
    check_storable,
    in_place_of,
    key_columns,
)
from feedapi_client.stores.leases import LeaseStore
from feedapi_client.stores.scripts import Query, Script, feed_condition
from feedapi_client.stores.tables import exists

Stored = dict[FeedKey, dict[int, Position]]
Edit = Callable[[Stored], Stored]
"""Given all that is stored of some feeds, returns what they have from now on.

A feed that it leaves out keeps what it has.
"""

_MAX_SHOWN = 200
_MAX_COMMANDS = 3


def check_moves(keys: Mapping[FeedKey, FeedKey]) -> None:
    if len({*keys, *keys.values()}) < 2 * len(keys):
        raise ValueError("a key to move from or to is given twice")


def moved_positions(
    new: FeedKey,
    positions: Mapping[int, Position],
    stored: Mapping[int, Position],
    *,
    overwrite: bool,
) -> dict[int, Position]:
    if stored and not overwrite:
        raise StoreError(
            f"the consumer {new.name!r} of this feed has cursors already: nothing was moved",
            feed=new.url,
        )
    # Above both, so that a consumer of either key is fenced. The new key holds nothing any more.
    moved = {}
    for partition, found in positions.items():
        newest = max(found, stored.get(partition, found), key=lambda each: each.revision)
        moved[partition] = replace(
            Position.after(newest, found.cursor, found.status), replaces=None
        )
    return moved


def moved(keys: Mapping[FeedKey, FeedKey], *, overwrite: bool) -> Edit:
    def edit(stored: Stored) -> Stored:
        wanted: Stored = {}
        for old, new in keys.items():
            if found := stored[old]:
                wanted[old] = {}
                wanted[new] = moved_positions(new, found, stored[new], overwrite=overwrite)
        return wanted

    return edit


def move_quarantined(
    table: str, dialect: str, keys: Iterable[tuple[FeedKey, FeedKey]]
) -> Script[None]:
    """Those of the new key stay."""
    if not (yield from exists(table, dialect)):
        return
    update = (
        f"UPDATE {table} SET feed_id = ?, feed_url = ?, consumer = ?, filters = ? "  # noqa: S608
        f"WHERE {feed_condition(dialect)}"
    )
    for old, new in keys:
        yield Query(update, (new.id, *key_columns(new), old.id))


class Administered(Closable):
    """Implements what `AdministrableStore` changes, by edits."""

    async def _change(
        self,
        feeds: Collection[FeedKey],
        edit: Edit,
        *,
        forgets: Collection[int] | None = (),
        moves: Mapping[FeedKey, FeedKey] | None = None,
    ) -> Stored:
        """Change what is stored of these feeds, all or nothing; return what `edit` returns.

        Arguments:
            forgets: the partitions in which nothing is done any more; None: in all.
            moves: what is done and quarantined moves along.
        """
        raise NotImplementedError

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        gone = None if partitions is None else set(partitions)

        def edit(stored: Stored) -> Stored:
            kept = stored[feed].keys() - gone if gone is not None else ()
            return {feed: {partition: stored[feed][partition] for partition in kept}}

        await self._change([feed], edit, forgets=gone)

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        check_storable(feed, positions)

        def edit(stored: Stored) -> Stored:
            return {feed: stored[feed] | in_place_of(stored[feed], positions)}

        saved = await self._change([feed], edit, forgets=set(positions))
        return {partition: saved[feed][partition] for partition in positions}

    async def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool = False
    ) -> dict[FeedKey, dict[int, Position]]:
        check_moves(keys)
        feeds = [*keys, *keys.values()]
        saved = await self._change(feeds, moved(keys, overwrite=overwrite), moves=keys)
        return {new: saved[new] for new in keys.values() if new in saved}


async def adopt(
    store: CursorStore, old: FeedKey, new: FeedKey, leases: LeaseStore | None = None
) -> int | None:
    """Move `old` to `new` unless that has positions. None where an instance of `old` is alive."""
    if old == new or not isinstance(store, AdministrableStore):
        return 0
    if new in await store.feeds():
        return 0
    # Also where nothing is stored yet: one of them may be about to save the first positions.
    if leases is not None and any(each.alive for each in (await leases.look(old)).instances):
        return None
    if old not in await store.feeds():
        return 0
    try:
        moved = await store.move({old: new})
    except StoreError:
        if await store.load(new):  # another instance was faster
            return 0
        raise
    return len(moved.get(new, {}))


async def stored_keys(store: CursorStore) -> list[FeedKey]:
    return await store.feeds() if isinstance(store, AdministrableStore) else []


async def check_key_format(store: CursorStore, key: FeedKey) -> None:
    """Under a key of another format, which `feeds` lists, `load` finds nothing."""
    if not await store.load(key) and key in await stored_keys(store):
        raise StoreError(
            f"the store holds positions of the consumer '{_shown(key.name)}' under a key that this "
            "version does not know: a newer version of feedapi-client wrote it, or one of before "
            "the first release. Use that version, or take another name to begin anew",
            feed=key.url,
        )


def first_start(
    key: FeedKey, stored: Iterable[FeedKey], *, by_url: FeedKey | None = None
) -> StoreError | str | None:
    """Return what to say to a consumer without a position that was not told where to start (R7).

    Positions of a consumer of the same name count for those of the same feed

    - at the same address, but for a trailing slash, with another selection of events;
    - at the same path, but for a trailing slash, of another origin, as long as it is the only one;
    - under the only name of a feed, where the store holds nothing by URL: that name was given up.

    Arguments:
        by_url: what the key would be without its `feed_name`.

    Returns the error that refuses the start, or a text to report where it is one more feed.
    """
    by_url = by_url or key
    own = [each for each in stored if each.name == key.name and each != key]
    same = [each for each in own if _address(each) in (_address(key), _address(by_url))]
    if same:
        return _refused(key, same)
    alike = [each for each in own if each.feed_name is None and _path(each) == _path(by_url)]
    elsewhere = [each for each in alike if _origin(each) != _origin(by_url)]
    if not alike and key.feed_name is None and all(each.feed_name for each in own):
        alike = elsewhere = own
    if len({_origin(each) for each in elsewhere}) == 1:
        return _refused(key, elsewhere)
    if not alike:
        return None
    return (
        f"no cursor is stored for this feed; the consumer '{_shown(key.name)}' has some of "
        f"{len({_address(each) for each in alike})} others that look like it, such as "
        f"{_shown(alike[0].url)}: it is taken for a feed of its own, and read from its beginning"
    )


def _refused(key: FeedKey, found: list[FeedKey]) -> StoreError:
    found = found[:_MAX_COMMANDS]
    given_up = next((each.feed_name for each in found if each.feed_name != key.feed_name), None)
    named = f", or give feed_name={_shown(given_up)!r} as before" if given_up else ""
    stored = "; ".join(_shown(str(each)) for each in found)
    commands = "; ".join(_command(each, key) for each in found)
    return StoreError(
        f"no cursor is stored for this feed, but the consumer '{_shown(key.name)}' has some of "
        f"what looks like the same feed: {stored}. To go on from there, run: {commands}{named}. To "
        'read this feed from its beginning, give start="first" (feedapi run --from first; cat and '
        "relay --from first)",
        feed=key.url,
    )


def _command(found: FeedKey, key: FeedKey) -> str:
    address, digest, _ = key.url.partition("#")
    words = [found.url, f"{address}?..." if digest else address, "--name", key.name]
    if found.filters != key.filters:
        selections = (orjson.dumps(dict(each.filters)).decode() for each in (found, key))
        words += ["--selection", *selections]
    return f"feedapi cursors move {' '.join(shlex.quote(_shown(word)) for word in words)}"


def _shown(text: str) -> str:
    line = printable(text, _MAX_SHOWN)
    return line if len(text) <= _MAX_SHOWN else f"{line}…"


def _path(key: FeedKey) -> str:
    return urlsplit(key.url).path.rstrip("/")


def _origin(key: FeedKey) -> tuple[str, ...]:
    return (key.url,) if key.feed_name else urlsplit(key.url)[:2]


def _address(key: FeedKey) -> tuple[str, ...]:
    """The origin, the path without a trailing slash, and the digest of the query."""
    return (*_origin(key), _path(key), urlsplit(key.url).fragment)
