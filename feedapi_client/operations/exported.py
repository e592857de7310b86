"""Stored positions as JSON, written and read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import orjson
from msgspec import UNSET, Meta, Struct, UnsetType

from feedapi_client.errors import NegotiationError
from feedapi_client.model import MAX_PARTITION, FeedKey, Position, Status
from feedapi_client.operations.stored_positions import FeedPositions, check_cursor, check_unused
from feedapi_client.stores.base import AdministrableStore

FORMAT = "feedapi-cursors/1"
_NEWER = re.compile(r"feedapi-cursors/[1-9]\d*")

K = TypeVar("K")
V = TypeVar("V")


def export_positions(feeds: Iterable[FeedPositions]) -> bytes:
    """Return positions as the JSON that `parse_export` reads."""
    value = {"format": FORMAT, "feeds": [_feed_as_json(feed) for feed in feeds]}
    return orjson.dumps(value, option=orjson.OPT_INDENT_2)


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


class _Row(Struct):
    partition: Annotated[int, Meta(ge=0, le=MAX_PARTITION)]
    cursor: str | UnsetType = UNSET  # a partition that is only listed has none
    status: Status | None = None


class _Feed(Struct):
    url: str
    name: Annotated[str, Meta(min_length=1)]
    filters: dict[str, str]
    positions: list[_Row]

    def parsed(self) -> tuple[FeedKey, dict[int, Position]]:
        texts = (self.url, self.name, *self.filters, *self.filters.values())
        if "\0" in "".join(texts):  # PostgreSQL takes none
            raise ValueError
        positions = []
        for row in self.positions:
            if row.cursor is not UNSET:
                check_cursor(row.cursor)
                if row.status is None:
                    raise ValueError
                positions.append((row.partition, Position(row.cursor, row.status)))
        return FeedKey(self.url, self.name, self.filters), _unique(positions)


class _Format(Struct):
    format: str


class _Export(_Format):
    feeds: list[_Feed]


def parse_export(text: bytes) -> dict[FeedKey, dict[int, Position]]:
    """Return the positions of an export, in UTF-8, or as another program saved it in Unicode.

    Raises:
        ValueError: the text is no export, or a newer version of this package wrote it.
    """
    written = ""
    try:
        decoded = text.decode(json.detect_encoding(text))
        written = msgspec.json.decode(decoded, type=_Format).format
        if written != FORMAT:
            raise ValueError
        feeds = msgspec.json.decode(decoded, type=_Export).feeds
        return _unique([feed.parsed() for feed in feeds])
    except (ValueError, RecursionError, msgspec.MsgspecError, NegotiationError):
        if written != FORMAT and _NEWER.fullmatch(written):
            raise ValueError(
                f"a newer version of feedapi-client wrote this export (format {written}, this one "
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


def _unique(items: list[tuple[K, V]]) -> dict[K, V]:
    found = dict(items)
    if len(found) < len(items):
        raise ValueError
    return found
