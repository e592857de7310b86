"""Cursors of a feed that moved to another URL: how they are moved, and how they are found."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.protocol.text import printable
from feedapi_client.stores.base import AdministrableStore, CursorStore
from feedapi_client.stores.stored_format import FirstFormatKey, in_another_format

_MAX_SHOWN = 200


def check_moves(keys: Mapping[FeedKey, FeedKey]) -> None:
    """Check the argument of `AdministrableStore.move`.

    Raises:
        ValueError: a key is in it twice.
    """
    if len({*keys, *keys.values()}) < 2 * len(keys):
        raise ValueError("a key to move from or to is given twice")


def moved_positions(
    new: FeedKey,
    positions: Mapping[int, Position],
    stored: Mapping[int, Position],
    *,
    overwrite: bool,
) -> dict[int, Position]:
    """Return the positions that a move saves under the key `new`.

    Arguments:
        positions: what the old key holds.
        stored: what the new key holds.

    Raises:
        StoreError: the new key has positions and `overwrite` is not set.
    """
    if stored and not overwrite:
        raise already_stored(new)
    # Above both, so that a consumer of either key is fenced.
    return {
        partition: Position(
            found.cursor,
            found.status,
            max(found.revision, stored[partition].revision if partition in stored else 0) + 1,
        )
        for partition, found in positions.items()
    }


def already_stored(new: FeedKey) -> StoreError:
    """Return the error of a move to a key that has positions."""
    return StoreError(
        f"the consumer {new.name!r} of this feed has cursors already: nothing was moved",
        feed=new.url,
    )


async def adopt(store: CursorStore, old: FeedKey, new: FeedKey) -> int:
    """Move what is stored under `old` to `new`, in one transaction, unless `new` has positions.

    Several instances may do it at once: one of them moves.

    Returns the number of positions that were moved; 0 also for a store that can't move any.

    Raises:
        StoreError: the store failed.
    """
    if old == new or not isinstance(store, AdministrableStore):
        return 0
    stored = await store.feeds()
    if new in stored or old not in stored:
        return 0
    try:
        moved = await store.move({old: new})
    except StoreError:
        if await store.load(new):  # another instance was faster
            return 0
        raise
    return len(moved.get(new, {}))


async def stored_keys(store: CursorStore) -> list[FeedKey]:
    """Return all stored keys; none for a store that can't list them. Raises `StoreError`."""
    return await store.feeds() if isinstance(store, AdministrableStore) else []


async def check_key_format(store: CursorStore, key: FeedKey) -> None:
    """Check that a listed key is not one of another format, under which `load` finds nothing.

    Raises:
        StoreError: it is, or the store failed.
    """
    # In this order: another process may save or delete positions meanwhile.
    first = await store.load(FirstFormatKey.of(key))
    if not await store.load(key) and key in await stored_keys(store):
        raise in_another_format(key, len(first))


async def keys_elsewhere(store: CursorStore, key: FeedKey) -> list[FeedKey]:
    """Return the stored keys that differ from `key` in scheme, host or port, and in nothing else.

    The query of the URL does not count: it may hold a credential of the new place. Empty for a
    store that can't list its keys.

    Raises:
        StoreError: the store failed.
    """
    return [found for found in await stored_keys(store) if is_elsewhere(found, key)]


def cursors_elsewhere(found: FeedKey, url: str) -> str:
    """Return the message for a consumer of `url` whose cursors are stored under another URL.

    Arguments:
        found: the key of those cursors.
        url: that of the consumer's own key.
    """
    address, digest, _ = url.partition("#")
    new = f"{address}?..." if digest else address
    return (
        f"no cursor is stored for this feed, but the consumer '{_shown(found.name)}' has some "
        f"under {_shown(found.url)}. If the feed moved from there: stop the consumer, run 'feedapi "
        f"cursors move {_shown(found.url)} {new} --overwrite', and start it again"
    )


def _shown(text: str) -> str:
    line = printable(text, _MAX_SHOWN)
    return line if len(text) <= _MAX_SHOWN else f"{line}…"


def is_elsewhere(found: FeedKey, key: FeedKey) -> bool:
    """Return whether a stored key differs from `key` as `keys_elsewhere` says."""
    if (found.name, found.filters) != (key.name, key.filters):
        return False
    there, here = urlsplit(found.url), urlsplit(key.url)
    return there.path == here.path and there[:2] != here[:2]
