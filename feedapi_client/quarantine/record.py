"""The record of an event that was put aside, and the row that it is in SQL stores."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson

from feedapi_client.model import Event, FeedKey

ERROR_CHARACTERS = 4000
"""More of an error's text is not kept."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class QuarantinedEvent:
    """An event that was put aside.

    `raw` and `headers` are what `Event` says. Its position is the `index` in the batch that ended at `cursor`. `error_type` and `error` say what the
    handler raised; `error` may quote the payload and belongs, like `raw`, in no log. Ids sort in the order of quarantining, and are unique.
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


def quarantined(
    feed: FeedKey, event: Event, cursor: str, index: int, error: BaseException
) -> QuarantinedEvent:
    """The record of an event that failed now."""
    now = datetime.now(UTC)
    return QuarantinedEvent(
        # Time, then place: sorts as it happened, also within a batch.
        id=f"{(now - _EPOCH) // _MICROSECOND:014x}{index:06x}{secrets.token_hex(3)}",
        feed=feed,
        partition=event.partition,
        cursor=cursor,
        index=index,
        raw=event.raw,
        headers=dict(event.headers),
        error_type=type(error).__qualname__,
        error=_text(error),
        time=now,
    )


def _text(error: BaseException) -> str:
    try:
        text = str(error)[:ERROR_CHARACTERS]
    except Exception:  # noqa: BLE001 - whatever an application's exception does, its event is put aside
        text = ""
    # Databases take neither a lone surrogate nor, in PostgreSQL's case, a NUL.
    return text.encode("utf-8", "replace").decode().replace("\x00", "\ufffd")


COLUMNS = (
    "id", "feed_id", "feed_url", "consumer", "filters", "partition_id", "feed_cursor", "event_index",
    "payload", "headers", "error_type", "error", "quarantined_at",
)  # fmt: skip
"""The columns of the table ``feedapi_quarantine``, which all SQL stores share. `quarantined_at` is in microseconds since 1970 UTC."""


def to_row(event: QuarantinedEvent) -> tuple[Any, ...]:
    """The values of `COLUMNS`."""
    feed = event.feed
    key = (feed.id, feed.url, feed.name, orjson.dumps(feed.filters).decode())
    headers = orjson.dumps(event.headers).decode()
    at = (event.time - _EPOCH) // _MICROSECOND
    return (
        event.id,
        *key,
        event.partition,
        event.cursor,
        event.index,
        event.raw,
        headers,
        event.error_type,
        event.error,
        at,
    )


def from_row(row: Sequence[Any]) -> QuarantinedEvent:
    """The event of the values of `COLUMNS`."""
    id, _, url, name, filters, partition, cursor, index, raw, headers, error_type, error, at = row
    feed = FeedKey(url, name, orjson.loads(filters))
    return QuarantinedEvent(
        id,
        feed,
        partition,
        cursor,
        index,
        bytes(raw),
        orjson.loads(headers),
        error_type,
        error,
        _EPOCH + at * _MICROSECOND,
    )
