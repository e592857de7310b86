"""Positions as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import orjson

from feedapi_client.cli.common.errors import CommandError
from feedapi_client.cli.common.tables import Cell, console, plain, print_table
from feedapi_client.cli.cursors.lag import CAUGHT_UP, FeedLag
from feedapi_client.model import FeedKey, Position

Listed = Mapping[FeedKey, tuple[Mapping[int, Position], FeedLag | None]]

FORMAT = "feedapi-cursors/1"
_STATUSES = ("open", "drained", "superseded")
_STYLES = {"open": "green", "drained": "dim", "superseded": "dim"}


def print_feeds(feeds: Listed, *, json: bool) -> None:
    """What ``feedapi cursors ls`` prints."""
    if json:
        print(dump(feeds))
        return
    out = console()
    if not feeds:
        out.print("no positions are stored")
    for key, (positions, lag) in feeds.items():
        out.print(plain(key, "bold"))
        ids = sorted(positions.keys() | (lag.lag.keys() if lag else set()))
        print_table(
            ("partition", "status", "revision", "cursor", *(["lag"] if lag else [])),
            [_row(id, positions.get(id), lag) for id in ids],
        )


def _row(id: int, position: Position | None, lag: FeedLag | None) -> list[Cell]:
    cells: list[Cell] = [str(id), "", "", ""]
    if position is not None:
        cells = [
            str(id),
            (position.status, _STYLES[position.status]),
            str(position.revision),
            position.cursor,
        ]
    return cells if lag is None else [*cells, (lag.lag[id], _lag_style(lag.lag[id]))]


def _lag_style(text: str) -> str:
    if text == CAUGHT_UP:
        return "cyan"
    if text.startswith(("unknown", "no longer")):
        return "red"
    return "yellow" if text.startswith(("behind", "not begun")) else "dim"


def print_changes(
    key: FeedKey, when: datetime, now: Mapping[int, Position], then: Mapping[int, Position]
) -> None:
    """What a rewind would change."""
    console().print(plain(f"{key}, at {when.isoformat(sep=' ', timespec='seconds')}", "bold"))
    rows = [_change(id, now.get(id), then.get(id)) for id in sorted(now.keys() | then.keys())]
    print_table(("partition", "status now", "cursor now", "status then", "cursor then"), rows)


def _change(id: int, before: Position | None, after: Position | None) -> list[Cell]:
    old = (before.status, before.cursor) if before else ("", "")
    new = (after.status, after.cursor) if after else ("forgotten", "")
    style = "" if old == new else "yellow"
    return [str(id), *old, *((text, style) for text in new)]


def dump(feeds: Listed) -> str:
    """Positions as the JSON that `parse_export` reads."""
    return orjson.dumps(
        {"format": FORMAT, "feeds": [_feed(key, *found) for key, found in feeds.items()]},
        option=orjson.OPT_INDENT_2,
    ).decode()


def _feed(key: FeedKey, positions: Mapping[int, Position], lag: FeedLag | None) -> dict[str, Any]:
    ids = sorted(positions.keys() | (lag.lag.keys() if lag else set()))
    return {
        "url": key.url,
        "name": key.name,
        "filters": dict(key.filters),
        "positions": [
            {
                "partition": id,
                **_position(positions.get(id)),
                **({"lag": lag.lag[id]} if lag else {}),
            }
            for id in ids
        ],
    }


def _position(position: Position | None) -> dict[str, Any]:
    return (
        {}
        if position is None
        else {"cursor": position.cursor, "status": position.status, "revision": position.revision}
    )


def parse_export(text: str) -> dict[FeedKey, dict[int, Position]]:
    """The positions of an export. Raises `CommandError` for anything else."""
    try:
        value = orjson.loads(text)
        if value["format"] != FORMAT:
            raise ValueError
        return {
            FeedKey(feed["url"], feed["name"], feed["filters"]): {
                _id(row): _parsed(row) for row in feed["positions"] if "cursor" in row
            }
            for feed in value["feeds"]
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CommandError(
            f"the input is no export of cursors (JSON of the format {FORMAT})"
        ) from None


def _id(row: dict[str, Any]) -> int:
    id = row["partition"]
    if type(id) is not int or not 0 <= id <= 32767:
        raise ValueError
    return id


def _parsed(row: dict[str, Any]) -> Position:
    if row["status"] not in _STATUSES or not isinstance(row["cursor"], str) or not row["cursor"]:
        raise ValueError
    return Position(row["cursor"], row["status"])
