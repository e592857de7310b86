"""`FixedEnd`: where a read of an open partition ends, fixed when it begins. Imports no Spark.

A feed that grows faster than it is read has no present end that a reader arrives at. A batch read
and a run of ``availableNow`` therefore fix an end for each open partition, and stop there.

Two cursors can't be compared, and publishers set checkpoints where they like: the cursor of the end
may never come. A partition is at its fixed end when a checkpoint has that cursor.

Only that ends a batch read. Where a batch holds an event that comes behind the end, the end may lie
within the batch. Its events are then asked for again in smaller pages, which publishers close with
a checkpoint, until one ends at that cursor. Where none does, a later end is fixed: a batch read
needs an end, and not the earliest one.

A read that another one goes on from (``availableNow``) is also over when the first events behind
the end were read. These are recognized by their payloads, several in a row. A publisher may also
change the order between entities from request to request. Therefore such a read is also over when
it brought all of some hundred events behind a later end, in any order: more than a page puts out of
order. Where a publisher sends a part of its events twice, that may be too early: the next run goes
on there. A batch read would miss the rest.
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
_MAX_SEARCHES = 2
_LATE_LOOK = 8
_MAX_LONGER_ROUNDS = 2


class FixedEnd:
    """Recognizes the end of a read in what the read brings.

    Arguments:
        cursor: the cursor of the end.
        exact: whether only that cursor ends the read.
    """

    def __init__(self, cursor: str, *, exact: bool = False) -> None:
        self.cursor = cursor
        self.exact = exact
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
        if self.exact:
            return False
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

    def events_before(self, batch: CheckpointedEvents) -> int | None:
        """Return how many events of the batch come before those behind the end; None: it has none.

        It is a guess where a publisher repeats events, or changes their order.
        """
        following = set(self._following)
        prints = fingerprints([batch]) if following else []
        return next((n for n, found in enumerate(prints) if found in following), None)

    def is_before(self, page: Sequence[CheckpointedEvents]) -> bool:
        """Whether the page holds no event that comes behind the end."""
        return set(self._following).isdisjoint(fingerprints(page))

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


class EndRounds:
    """Counts the ends of a batch read that were passed, one after the other.

    A read that is faster than its feed needs fewer responses from one end to the next each time,
    until a response is empty. One that is slower, or finds an event with each request, never comes
    there.
    """

    def __init__(self) -> None:
        self._before = 0
        self._passed = 0
        self._longer = 0

    @property
    def searches(self) -> bool:
        """Whether an end may be searched for in small pages: not where that failed before."""
        return self._passed < _MAX_SEARCHES

    @property
    def first_look(self) -> int:
        """The number of responses before the first look for events behind an end.

        Looks are requests too, and the feed grows with time.
        """
        return 1 if self.searches else _LATE_LOOK

    def may_go_on(self, responses: int) -> bool:
        """Return whether there may be another end, after a round of so many responses."""
        longer = not self.searches and responses >= self._before
        self._longer = self._longer + 1 if longer else 0
        self._passed += 1
        self._before = responses
        return self._longer < _MAX_LONGER_ROUNDS


def fingerprint(payload: msgspec.Raw) -> int:
    """Return a number that tells payloads apart."""
    return zlib.crc32(payload)


def fingerprints(batches: Iterable[CheckpointedEvents]) -> list[int]:
    """Return the fingerprints of all events."""
    return [fingerprint(event._payload) for batch in batches for event in batch.events]
