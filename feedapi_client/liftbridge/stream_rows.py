"""The messages that a relay writes exactly once: events and positions. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from feedapi_client.liftbridge.headers import CURSOR, FORMAT, PARTITION
from feedapi_client.liftbridge.stream_format import MessageFormat, position_bytes, positions_header
from feedapi_client.model import FeedKey, Position

_OVERHEAD = 320
"""Bytes that a message needs at most beside its value, its key and its own headers: the envelope,
the inbox of its ack, and the headers that say where it belongs."""
_HEADER_OVERHEAD = 16
"""Bytes of a header beside its name and value."""


@dataclass(frozen=True, slots=True)
class OutgoingBatch:
    """The events to write together with their batch's cursor: the transaction of `save`.

    Attributes:
        partition: the partition of the feed.
        cursor: the feed's cursor after the batch.
        values: the payloads.
        keys: the keys of the messages, with format ``"events"``.
        headers: additional headers of the messages, with format ``"events"``.
        places: the place of each event in the feed's batch, where some of it were left out.
    """

    partition: int
    cursor: str
    values: Sequence[bytes]
    keys: Sequence[bytes | None] = ()
    headers: Sequence[Mapping[str, bytes]] = ()
    places: Sequence[int] = ()

    def place(self, index: int) -> int:
        """Return the place of an event in the feed's batch."""
        return self.places[index] if self.places else index

    def without(self, indices: Collection[int]) -> OutgoingBatch:
        """Return the batch without the events at these indices."""
        return self._only([i for i in range(len(self.values)) if i not in indices])

    def starting_at(self, index: int) -> OutgoingBatch:
        """Return the batch with only the events from this index on."""
        return self._only(range(index, len(self.values)))

    def message_bytes(self, index: int) -> int:
        """Return the bytes that an event takes as a message of its own, at most."""
        return message_bytes(
            self.values[index],
            self.keys[index] if self.keys else None,
            self.headers[index] if self.headers else None,
        )

    def _only(self, kept: Sequence[int]) -> OutgoingBatch:
        return replace(
            self,
            values=[self.values[i] for i in kept],
            keys=[self.keys[i] for i in kept] if self.keys else (),
            headers=[self.headers[i] for i in kept] if self.headers else (),
            places=[self.place(i) for i in kept],
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A message to be written."""

    value: bytes
    key: bytes | None
    headers: dict[str, bytes]


def message_bytes(
    value: bytes, key: bytes | None = None, headers: Mapping[str, bytes] | None = None
) -> int:
    """Return the bytes that a message takes on the wire, at most."""
    named = (headers or {}).items()
    return (
        len(value)
        + len(key or b"")
        + sum(len(name) + len(content) + _HEADER_OVERHEAD for name, content in named)
        + _OVERHEAD
    )


def batch_rows(
    feed: FeedKey,
    positions: Mapping[int, Position],
    batch: OutgoingBatch | None,
    format: MessageFormat,
    limit: int,
    *,
    named: bool = False,
) -> list[Row]:
    """Return the messages that hold the events of a batch and save the positions.

    No message that holds positions beside an event is longer than `limit` bytes because of them.
    With `named` they say whose positions these are, in full.
    """
    if batch is None or not batch.values:
        return positions_rows(feed, positions, limit)
    saved = positions_header(feed, positions, named=named)
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
    last = rows[-1]
    if message_bytes(last.value, last.key, last.headers | saved) > limit:
        return rows + positions_rows(feed, positions, limit)
    last.headers.update(saved)
    return rows


def positions_rows(feed: FeedKey, positions: Mapping[int, Position], limit: int) -> list[Row]:
    """Return messages of at most `limit` bytes that save positions and hold no event.

    A single position that is longer has a message of its own.
    """
    rows = []
    for part in _parts(positions, limit - _OVERHEAD - len(str(feed))):
        header = positions_header(feed, part, named=True)
        rows.append(Row(b"", None, {FORMAT: MessageFormat.POSITIONS.encode(), **header}))
    return rows


def _parts(positions: Mapping[int, Position], limit: int) -> Iterator[dict[int, Position]]:
    """Divide positions by what they take; one part at least."""
    part: dict[int, Position] = {}
    size = 0
    for partition, position in positions.items():
        own = position_bytes(partition, position)
        if part and size + own > limit:
            yield part
            part, size = {}, 0
        part[partition] = position
        size += own
    yield part
