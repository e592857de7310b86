"""The messages that a relay writes exactly once: events and positions. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from feedapi_client.liftbridge.headers import CURSOR, FORMAT, PARTITION
from feedapi_client.liftbridge.stream_format import MessageFormat, positions_header
from feedapi_client.model import FeedKey, Position

_POSITIONS_PER_MESSAGE = 1000


@dataclass(frozen=True, slots=True)
class OutgoingBatch:
    """The events to write together with their batch's cursor: the transaction of `save`.

    Attributes:
        partition: the partition of the feed.
        cursor: the feed's cursor after the batch.
        values: the payloads.
        keys: the keys of the messages, with format ``"events"``.
        headers: additional headers of the messages, with format ``"events"``.
    """

    partition: int
    cursor: str
    values: Sequence[bytes]
    keys: Sequence[bytes | None] = ()
    headers: Sequence[Mapping[str, bytes]] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """A message to be written."""

    value: bytes
    key: bytes | None
    headers: dict[str, bytes]


def batch_rows(
    feed: FeedKey,
    positions: Mapping[int, Position],
    batch: OutgoingBatch | None,
    format: MessageFormat,
) -> list[Row]:
    """Return the messages that hold the events of a batch and save the positions."""
    if batch is None or not batch.values:
        return positions_rows(feed, positions)
    saved = positions_header(feed, positions)
    shared = {
        PARTITION: str(batch.partition).encode(),
        CURSOR: batch.cursor.encode(),
        FORMAT: format.encode(),
    }
    if format is MessageFormat.BATCH:
        return [Row(b"\n".join(batch.values), None, shared | saved)]
    keys = batch.keys or [None] * len(batch.values)
    extra = batch.headers or [{}] * len(batch.values)
    rows = [
        Row(value, key, {**own, **shared})
        for value, key, own in zip(batch.values, keys, extra, strict=True)
    ]
    rows[-1].headers.update(saved)
    return rows


def positions_rows(feed: FeedKey, positions: Mapping[int, Position]) -> list[Row]:
    """Return messages that save positions and hold no event."""
    items, rows = list(positions.items()), list[Row]()
    for start in range(0, max(len(items), 1), _POSITIONS_PER_MESSAGE):
        part = dict(items[start : start + _POSITIONS_PER_MESSAGE])
        headers = {FORMAT: MessageFormat.POSITIONS.encode(), **positions_header(feed, part)}
        rows.append(Row(b"", None, headers))
    return rows
