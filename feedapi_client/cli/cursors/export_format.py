"""Stored positions as JSON, written and read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from feedapi_client.cli.common.errors import CommandError
from feedapi_client.cli.cursors.feed_positions import FeedPositions
from feedapi_client.model import FeedKey, Position

FORMAT = "feedapi-cursors/1"
_STATUSES = ("open", "drained", "superseded")


def dump(feeds: Iterable[FeedPositions]) -> str:
    """Return positions as the JSON that `parse_export` reads."""
    value = {"format": FORMAT, "feeds": [_feed_as_json(feed) for feed in feeds]}
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


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
        row["lag"] = feed.lag[id]
    return row


def parse_export(text: str) -> dict[FeedKey, dict[int, Position]]:
    """Return the positions of an export. Raises `CommandError` for any other text."""
    try:
        value = orjson.loads(text)
        if value["format"] != FORMAT:
            raise ValueError
        return {
            FeedKey(feed["url"], feed["name"], feed["filters"]): {
                _parse_id(row): _parse_position(row) for row in feed["positions"] if "cursor" in row
            }
            for feed in value["feeds"]
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CommandError(
            f"the input is no export of cursors (JSON of the format {FORMAT})"
        ) from None


def _parse_id(row: dict[str, Any]) -> int:
    id = row["partition"]
    if type(id) is not int or not 0 <= id <= 32767:
        raise ValueError
    return id


def _parse_position(row: dict[str, Any]) -> Position:
    if row["status"] not in _STATUSES or not isinstance(row["cursor"], str) or not row["cursor"]:
        raise ValueError
    return Position(row["cursor"], row["status"])
