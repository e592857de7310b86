"""Stored positions as JSON, written and read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import orjson
import typer

from feedapi_client.cli.common.json_output import to_json
from feedapi_client.cli.cursors.feed_positions import FeedPositions
from feedapi_client.errors import NegotiationError
from feedapi_client.model import FeedKey, Position
from feedapi_client.protocol.cursors import is_valid

FORMAT = "feedapi-cursors/1"
_STATUSES = ("open", "drained", "superseded")

K = TypeVar("K")
V = TypeVar("V")


def dump(feeds: Iterable[FeedPositions]) -> str:
    """Return positions as the JSON that `parse_export` reads."""
    value = {"format": FORMAT, "feeds": [_feed_as_json(feed) for feed in feeds]}
    return to_json(value)


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


def parse_export(text: bytes) -> dict[FeedKey, dict[int, Position]]:
    """Return the positions of an export. Raises `typer.BadParameter` for any other text."""
    try:
        value = orjson.loads(text)
        if value["format"] != FORMAT:
            raise ValueError
        feeds = [(_parse_key(feed), _parse_positions(feed)) for feed in value["feeds"]]
        return _unique(feeds)
    except (ValueError, KeyError, TypeError, AttributeError, NegotiationError):
        raise typer.BadParameter(
            f"the input is no export of cursors (JSON of the format {FORMAT})"
        ) from None


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


def _is_cursor(value: object) -> bool:
    return isinstance(value, str) and is_valid(value)


def _parse_id(row: dict[str, Any]) -> int:
    id = row["partition"]
    if type(id) is not int or not 0 <= id <= 32767:
        raise ValueError
    return id


def _parse_position(row: dict[str, Any]) -> Position:
    if row["status"] not in _STATUSES or not _is_cursor(row["cursor"]):
        raise ValueError
    return Position(row["cursor"], row["status"])
