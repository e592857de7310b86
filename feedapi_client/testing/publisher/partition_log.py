"""One partition inside the publisher: its events, and what discovery says of it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from copy import copy
from itertools import takewhile
from time import monotonic

SUB_LOGS = 16
"""Number of sub-logs that the publisher emulates in each partition.

All events of an entity are in one sub-log, which keeps their order.
"""


class PartitionLog:
    """The events of a partition in the order of their sequence numbers, and its lineage.

    The attributes `seqs`, `hashes` (of the entities) and `payloads` have one entry an event. A
    payload of None is an internal event: it takes a place in the log and is never shown.
    """

    def __init__(
        self,
        id: int,
        *,
        starts_after: int | None = None,
        cursor_from: Iterable[int] = (),
        closed: bool = False,
    ) -> None:
        self.id = id
        self._state = (closed, True)
        self._changes = [(monotonic(), closed, True)]
        self.starts_after = starts_after
        self.cursor_from = tuple(cursor_from)
        self.split_into: tuple[int, ...] = ()
        self.split_before: tuple[int, ...] = ()
        """What it was split into before the split was rolled back."""
        self.split_key: Callable[[object], object] | None = None
        self.seqs: array[int] = array("Q")
        self.hashes: array[int] = array("I")
        self.payloads: list[bytes | None] = []
        self.internal_events = 0

    @property
    def closed(self) -> bool:
        """Whether it takes no more events."""
        return self._state[0]

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._change(closed, self.listed)

    @property
    def listed(self) -> bool:
        """Whether discovery lists it."""
        return self._state[1]

    @listed.setter
    def listed(self, listed: bool) -> None:
        self._change(self.closed, listed)

    def _change(self, closed: bool, listed: bool) -> None:
        self._state = closed, listed
        self._changes.append((monotonic(), closed, listed))

    def as_of(self, time: float, next_seq: int) -> PartitionLog:
        """Return the log as it was at a time, when `next_seq` was the next sequence number."""
        before = [*takewhile(lambda change: change[0] <= time, self._changes)]
        log = copy(self)
        log._state = before[-1][1:] if before else (False, False)
        kept = bisect_left(self.seqs, next_seq)
        log.seqs, log.hashes = self.seqs[:kept], self.hashes[:kept]
        log.payloads = self.payloads[:kept]
        return log

    def add(self, seq: int, hash: int, payload: bytes | None) -> None:
        """Append one event."""
        self.seqs.append(seq)
        self.hashes.append(hash)
        self.payloads.append(payload)
        if payload is None:
            self.internal_events += 1

    @property
    def end(self) -> int:
        """The sequence number after the last event, 0 without events."""
        return self.seqs[-1] + 1 if self.seqs else 0

    def accepts_cursors_of(self, partition: int) -> bool:
        """Return whether a cursor that was made for `partition` is valid here."""
        return partition == self.id or partition in (*self.cursor_from, *self.split_before)

    def sub_log(self, index: int) -> int:
        """Return the sub-log of the event at an index."""
        return self.hashes[index] % SUB_LOGS
