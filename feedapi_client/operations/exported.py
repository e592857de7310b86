"""Stored positions as JSON, written and read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import orjson

from feedapi_client.errors import NegotiationError
from feedapi_client.model import MAX_PARTITION, FeedKey, Position
from feedapi_client.operations.stored_positions import FeedPositions, check_cursor, check_unused
from feedapi_client.stores.base import AdministrableStore, CursorStore

FORMAT = "feedapi-cursors/1"
_NEWER = re.compile(r"feedapi-cursors/[1-9]\d*")
_STATUSES = ("open", "drained", "superseded")

K = TypeVar("K")
V = TypeVar("V")


def export_positions(feeds: Iterable[FeedPositions]) -> bytes:
    """Return positions as the JSON that `parse_export` reads."""
    value = {"format": FORMAT, "feeds": [_feed_as_json(feed) for feed in feeds]}
    return orjson.dumps(value, option=orjson.OPT_INDENT_2)


async def count_replaced(
    store: CursorStore, feeds: Mapping[FeedKey, Mapping[int, Position]]
) -> int:
    """Return how many stored positions `import_positions` would replace."""
    return sum(
        [len((await store.load(key)).keys() & positions.keys()) for key, positions in feeds.items()]
    )


async def import_positions(
    store: AdministrableStore,
    feeds: Mapping[FeedKey, Mapping[int, Position]],
    *,
    force: bool = False,
    dry_run: bool = False,
) -> list[FeedPositions]:
    """Make these positions the current ones, whatever is stored. Those of other partitions stay.

    Each feed's positions are saved all or none. With `dry_run` nothing is saved.

    Arguments:
        feeds: from `parse_export`.

    Returns the positions as saved.
    """
    if not force:
        await check_unused(store, feeds)
    if dry_run:
        return [FeedPositions(key, positions) for key, positions in feeds.items()]
    return [
        FeedPositions(key, await store.replace(key, positions)) for key, positions in feeds.items()
    ]


def parse_export(text: bytes) -> dict[FeedKey, dict[int, Position]]:
    """Return the positions of an export, in UTF-8, or as another program saved it in Unicode.

    Raises:
        ValueError: the text is no export, or a newer version of this package wrote it.
    """
    newer = None
    try:
        value = orjson.loads(text.decode(json.detect_encoding(text)))
        if value["format"] != FORMAT:
            newer = _NEWER.fullmatch(value["format"])
            raise ValueError
        return _unique([(_parse_key(feed), _parse_positions(feed)) for feed in value["feeds"]])
    except (ValueError, KeyError, TypeError, AttributeError, NegotiationError):
        if newer is not None:
            raise ValueError(
                f"a newer version of feedapi-client wrote this export (format {newer[0]}, this one "
                f"reads {FORMAT}): update feedapi-client here"
            ) from None
        raise ValueError(
            f"the input is no export of cursors (JSON of the format {FORMAT})"
        ) from None


def _feed_as_json(feed: FeedPositions) -> dict[str, Any]:
    return {
        "url": feed.key.url,
        "name": feed.key.name,
        "filters": dict(feed.key.filters),
        "positions": [_row(feed, id) for id in feed.partitions()],
    }


def _row(feed: FeedPositions, id: int) -> dict[str, Any]:
    row: dict[str, Any] = {"partition": id}
    if (position := feed.positions.get(id)) is not None:
        row["cursor"] = position.cursor
        row["status"] = position.status
        row["revision"] = position.revision
    if feed.lag is not None:
        row["lag"] = str(feed.lag[id])
    return row


def _parse_key(feed: dict[str, Any]) -> FeedKey:
    url, name, filters = feed["url"], feed["name"], feed["filters"]
    if not name or not isinstance(filters, dict):
        raise ValueError
    if not all(_is_text(text) for text in (url, name, *filters, *filters.values())):
        raise ValueError
    return FeedKey(url, name, filters)


def _is_text(value: object) -> bool:
    # PostgreSQL takes no NUL, and no database a lone surrogate.
    return isinstance(value, str) and "\0" not in value


def _parse_positions(feed: dict[str, Any]) -> dict[int, Position]:
    rows = [row for row in feed["positions"] if "cursor" in row]
    return _unique([(_parse_id(row), _parse_position(row)) for row in rows])


def _unique(items: list[tuple[K, V]]) -> dict[K, V]:
    """Return the items as a dictionary. Raises ValueError for a key that is there twice."""
    found = dict(items)
    if len(found) < len(items):
        raise ValueError
    return found


def _parse_id(row: dict[str, Any]) -> int:
    id = row["partition"]
    if type(id) is not int or not 0 <= id <= MAX_PARTITION:
        raise ValueError
    return id


def _parse_position(row: dict[str, Any]) -> Position:
    if row["status"] not in _STATUSES or not isinstance(row["cursor"], str):
        raise ValueError
    check_cursor(row["cursor"])
    return Position(row["cursor"], row["status"])
