"""`FixedEnd`: where a read of an open partition ends, fixed when it begins. Imports no Spark.

A feed that grows faster than it is read has no present end that a reader arrives at. A batch read
and a run of ``availableNow`` therefore fix an end for each open partition, and stop there.

Two cursors can't be compared, and publishers set checkpoints where they like: the cursor of the end
may never come. A partition is at its fixed end when a checkpoint has that cursor.

A read that another one goes on from (``availableNow``) is also over when the first events behind
the end were read. These are recognized by their payloads, several in a row. A publisher may also
change the order between entities from request to request. Therefore such a read is also over when
it brought all of some hundred events behind a later end, in any order: more than a page puts out of
order. Where a publisher sends a part of its events twice, that may be too early: the next run goes
on there. A batch read would miss the rest, and so only the cursor counts for it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import orjson

from feedapi_client.protocol.decoder import CheckpointedEvents

MIN_IN_A_ROW = 8
"""Payloads in a row that are taken for the same events."""
MAX_FOLLOWING = 2_000
"""Events behind the end that are looked at, at most."""
_WATCHED = 16
_MIN_UNORDERED = 500


class FixedEnd:
    """Recognizes the end of a read in what the read brings.

    Arguments:
        cursor: the cursor of the end.
    """

    def __init__(self, cursor: str) -> None:
        self.cursor = cursor
        self._on_wire = orjson.dumps(cursor)[1:-1]
        # Other texts can be written in several ways in JSON: then each line is looked at.
        self._one_spelling = cursor.replace("-", "").replace("_", "").isalnum()
        self._tail = b""
        self._following: Sequence[int] = ()
        self._matched = 0
        self.later_end: str | None = None
        """An end that was fixed while the read was running."""
        self._seen: set[int] = set()
        self._unseen: set[int] = set()

    @property
    def knows_following(self) -> bool:
        """Whether the events behind the end are known."""
        return bool(self._following)

    def may_be_in(self, chunk: bytes) -> bool:
        """Whether the chunk of a response, or the one before it and this one, may hold the end."""
        if not self._one_spelling:
            return True
        found = self._on_wire in self._tail + chunk
        self._tail = chunk[-len(self._on_wire) :]
        return found

    def reached_by(self, batch: CheckpointedEvents) -> bool:
        """Whether the read is at the end, or behind it, after this batch."""
        if batch.cursor == self.cursor:
            return True
        following = self._following
        if following or self.later_end is not None:
            prints = fingerprints([batch])
            if self.later_end is not None and self._saw_all(prints):
                return True
            for found in prints if following else ():
                if found == following[self._matched]:
                    self._matched += 1
                    if self._matched == len(following):
                        return True
                else:
                    self._matched = int(found == following[0])
        return False

    def _saw_all(self, prints: list[int]) -> bool:
        if not self._unseen:
            self._seen.update(prints)
            return False
        self._unseen.difference_update(prints)
        return not self._unseen

    @property
    def wants_unordered(self) -> bool:
        """Whether `set_unordered` was not called yet with enough events."""
        return not self._unseen

    def set_unordered(self, following: Sequence[int]) -> bool:
        """Take the events behind `later_end`, in any order.

        Returns:
            whether the read brought all of them already.
        """
        if len(set(following)) < _MIN_UNORDERED:
            return False
        self._unseen = set(following) - self._seen
        self._seen.clear()
        return not self._unseen

    def set_following(self, following: Sequence[int], next_of_read: Sequence[int]) -> bool:
        """Take the first events behind the end, and the next ones of the read.

        Returns:
            whether the read is behind the end already.
        """
        counts = Counter(following)
        watched = following[:_WATCHED]
        # Payloads that repeat, such as heartbeats, say nothing about the place they stand at.
        if len(watched) < MIN_IN_A_ROW or any(counts[one] > 1 for one in watched):
            return False
        self._following, self._matched = watched, 0
        if len(next_of_read) < MIN_IN_A_ROW or any(counts[one] != 1 for one in next_of_read):
            return False
        size = len(next_of_read)
        starts = range(len(following) - size + 1)
        return any(list(following[at : at + size]) == list(next_of_read) for at in starts)


def fingerprint(payload: msgspec.Raw) -> int:
    """Return a number that tells payloads apart."""
    return zlib.crc32(payload)


def fingerprints(batches: Iterable[CheckpointedEvents]) -> list[int]:
    """Return the fingerprints of all events."""
    return [fingerprint(event._payload) for batch in batches for event in batch.events]
