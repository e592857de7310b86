"""Batches that a broker acked a short while ago and may still lose. No I/O.

When leaders die, a follower that shortened its log may become the leader (see `returned`). It gives
the offsets of the lost messages to the next ones. So one offset that is acked twice shows a loss,
and so does a partition that ends before an offset that was acked. The lost messages are published
again, and behind them what came after them from the same partition of the feed, to keep its order.

There is one record for each batch, and sets of offsets. An object for each message took a third of
the time of a relay.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

# A follower loses what is above its high watermark, which is written down every 5 s.
SECONDS = 30.0
_BYTES = 32 * 1024 * 1024
_OVERHEAD = 150
"""Bytes that a message takes beside its value and key, about."""


@dataclass(slots=True, eq=False)
class AckedBatch:
    """Messages as they were published one after the other, and where the broker said they are.

    Attributes:
        source: the partition of the feed.
        keys, headers: of each message, or empty.
        shared: headers of all messages.
        places: the partition of the stream of each message, or one for all.
        offsets: of each message.
        acked: when the last of them was acked, on any monotonic clock.
    """

    source: int
    values: Sequence[bytes]
    keys: Sequence[bytes | None]
    headers: Sequence[Mapping[str, bytes]]
    shared: Mapping[str, bytes]
    places: Sequence[int] | int
    offsets: Sequence[int]
    acked: float
    size: int = field(init=False)

    def __post_init__(self) -> None:
        keys = sum(len(key or b"") for key in self.keys)
        self.size = sum(map(len, self.values)) + keys + _OVERHEAD * len(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def part(self, start: int, end: int) -> AckedBatch:
        """Return some of the messages."""
        return AckedBatch(
            self.source,
            self.values[start:end],
            self.keys[start:end],
            self.headers[start:end],
            self.shared,
            self.places if isinstance(self.places, int) else self.places[start:end],
            self.offsets[start:end],
            self.acked,
        )

    def by_place(self) -> Mapping[int, Sequence[int]]:
        """Return the offsets in each partition of the stream."""
        if isinstance(self.places, int):
            return {self.places: self.offsets}
        found: dict[int, list[int]] = defaultdict(list)
        for place, offset in zip(self.places, self.offsets, strict=True):
            found[place].append(offset)
        return found

    def first_from(self, place: int, offset: int) -> int | None:
        """Return the index of the first message in a partition that is not before an offset."""
        for index, each in enumerate(self.offsets):
            own = self.places if isinstance(self.places, int) else self.places[index]
            if own == place and each >= offset:
                return index
        return None


class RecentlyAcked:
    """The newest batches that were acked, by partition of the feed.

    They are as many as were acked within `SECONDS` and take 32 MB, about; the newest one always.

    Arguments:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_source: dict[int, deque[AckedBatch]] = defaultdict(deque)
        self._in_order: deque[AckedBatch] = deque()
        self._offsets: dict[int, set[int]] = defaultdict(set)
        self._ends: dict[int, int] = {}
        self._bytes = 0

    def add(self, batch: AckedBatch) -> dict[int, int]:
        """Remember messages that were acked.

        Returns: where the broker lost messages: by partition of the stream, the offset from which
        on earlier messages are gone.
        """
        lost: dict[int, int] = {}
        if not len(batch):
            return lost
        for place, offsets in batch.by_place().items():
            known = self._offsets[place]
            if not known.isdisjoint(offsets):
                lost[place] = min(known.intersection(offsets))
            known.update(offsets)
            self._ends[place] = max(max(offsets) + 1, self._ends.get(place, 0))
        self._append(batch)
        self._forget_old()
        return lost

    def ends(self) -> dict[int, int]:
        """Where each partition of the stream has to end, at least."""
        return dict(self._ends)

    def shorten(self, lost: Mapping[int, int]) -> None:
        """Expect partitions to end where they were found to end, or where what is left ends."""
        for place, offset in lost.items():
            ends = [max(found[place]) + 1 for found in self._places() if place in found]
            self._ends[place] = max(ends, default=min(self._ends.get(place, offset), offset))

    def lost(self, source: int, place: int, offset: int, before: float) -> list[AckedBatch]:
        """Forget and return what has to be published again for one partition of the feed.

        These are its messages that were acked before a moment and are gone, because their offset in
        the partition `place` of the stream is not below `offset`; and all that follow the first.
        """
        batches = list(self._by_source.get(source, ()))
        for number, batch in enumerate(batches):
            first = batch.first_from(place, offset) if batch.acked < before else None
            if first is not None:
                self._replace(batches[number:], batch.part(0, first))
                return [batch.part(first, len(batch)), *batches[number + 1 :]]
        return []

    def put_back(self, batches: Iterable[AckedBatch]) -> None:
        """Remember messages again that `lost` returned, because they could not be published."""
        for batch in batches:
            self._append(batch)
            for place, offsets in batch.by_place().items():
                self._offsets[place].update(offsets)

    def sources(self) -> list[int]:
        """The partitions of the feed whose messages are remembered."""
        return list(self._by_source)

    def _append(self, batch: AckedBatch) -> None:
        self._by_source[batch.source].append(batch)
        self._in_order.append(batch)
        self._bytes += batch.size

    def _replace(self, last: Sequence[AckedBatch], kept: AckedBatch) -> None:
        """Forget the last batches of a partition of the feed, except the start of the first."""
        batches = self._by_source[kept.source]
        for _ in last:
            batches.pop()
        gone = {id(each) for each in last}
        in_order = [
            kept if each is last[0] else each
            for each in self._in_order
            if id(each) not in gone or (each is last[0] and len(kept))
        ]
        if len(kept):
            batches.append(kept)
        elif not batches:
            del self._by_source[kept.source]
        self._in_order = deque(in_order)
        self._bytes += kept.size - sum(each.size for each in last)
        self._offsets.clear()
        for found in self._places():
            for place, offsets in found.items():
                self._offsets[place].update(offsets)

    def _places(self) -> Iterator[Mapping[int, Sequence[int]]]:
        return (batch.by_place() for batch in self._in_order)

    def _forget_old(self) -> None:
        oldest = self._clock() - SECONDS
        in_order = self._in_order
        while len(in_order) > 1 and (self._bytes > _BYTES or in_order[0].acked < oldest):
            batch = in_order.popleft()
            self._bytes -= batch.size
            # In both they are in the order of their acks.
            batches = self._by_source[batch.source]
            batches.popleft()
            if not batches:
                del self._by_source[batch.source]
            for place, offsets in batch.by_place().items():
                self._offsets[place].difference_update(offsets)
