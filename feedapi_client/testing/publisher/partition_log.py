"""One partition inside the publisher: its events, and what discovery says of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

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
        self.closed = closed
        self.starts_after = starts_after
        self.cursor_from = tuple(cursor_from)
        self.listed = True
        self.split_into: tuple[int, ...] = ()
        self.split_key: Callable[[object], object] | None = None
        self.seqs: array[int] = array("Q")
        self.hashes: array[int] = array("I")
        self.payloads: list[bytes | None] = []
        self.internal_events = 0

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
        return partition == self.id or partition in self.cursor_from

    def sub_log(self, index: int) -> int:
        """Return the sub-log of the event at an index."""
        return self.hashes[index] % SUB_LOGS
