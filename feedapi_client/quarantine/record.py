"""The record of a quarantined event, and its row in SQL stores."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson

from feedapi_client.model import Event, FeedKey
from feedapi_client.stores.base import key_columns, stored_key

_ERROR_CHARACTERS = 4000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_TIME_DIGITS = 14
_FOLLOWS = "an earlier event of its key is in quarantine: "


class EarlierEventQuarantined(Exception):  # noqa: N818 - the reason that a record shows
    """Of the same key. `id` is that of the first one, which may have left meanwhile."""

    def __init__(self, id: str) -> None:
        super().__init__(_FOLLOWS + id)


@dataclass(frozen=True, slots=True)
class QuarantinedEvent:
    """An event in quarantine.

    Attributes:
        id: unique; ids sort in the order of quarantining.
        partition, cursor, index: the position: event number `index` of the batch of `partition`
            that ended at `cursor`.
        raw, headers: as in `Event`.
        error_type, error: what the handler raised. Like `raw`, `error` must not be logged: it may
            quote the payload.
    """

    id: str
    feed: FeedKey
    partition: int
    cursor: str
    index: int
    raw: bytes = field(repr=False)
    headers: dict[str, Any] = field(repr=False)
    error_type: str
    error: str = field(repr=False)
    time: datetime


def first_of_key(event: QuarantinedEvent) -> str:
    if event.error_type != EarlierEventQuarantined.__name__:
        return event.id
    return event.error.removeprefix(_FOLLOWS)


def quarantined(
    feed: FeedKey, event: Event, cursor: str, index: int, error: BaseException, after: str = ""
) -> QuarantinedEvent:
    """Return its record. The id is larger than `after`, even if the clock has been set back."""
    now, place = datetime.now(UTC), (event.partition, cursor, index)
    # Time, then position: sorts in the order of quarantining, also within a batch.
    time = max((now - _EPOCH) // _MICROSECOND, int(after[:_TIME_DIGITS] or "0", 16) + 1)
    id = f"{time:0{_TIME_DIGITS}x}{index:06x}{secrets.token_hex(3)}"
    headers, kind = dict(event.headers), type(error).__qualname__
    return QuarantinedEvent(id, feed, *place, event.raw, headers, kind, _text(error), now)


def _text(error: BaseException) -> str:
    try:
        text = str(error)[:_ERROR_CHARACTERS]
    except Exception:  # noqa: BLE001 - an exception without a text does not keep its event out
        text = ""
    # Databases refuse a lone surrogate, and PostgreSQL also NUL.
    return text.encode("utf-8", "replace").decode().replace("\x00", "\ufffd")


def to_row(event: QuarantinedEvent) -> tuple[Any, ...]:
    place = (event.partition, event.cursor, event.index, event.raw)
    why = (orjson.dumps(event.headers).decode(), event.error_type, event.error)
    key = (event.feed.id, *key_columns(event.feed))
    return (event.id, *key, *place, *why, (event.time - _EPOCH) // _MICROSECOND)


def from_row(row: Sequence[Any]) -> QuarantinedEvent:
    id, _, url, name, filters, partition, cursor, index, raw, headers, kind, error, at = row
    feed, raw, headers = stored_key(url, name, filters), bytes(raw), orjson.loads(headers)
    time = _EPOCH + at * _MICROSECOND
    return QuarantinedEvent(id, feed, partition, cursor, index, raw, headers, kind, error, time)
