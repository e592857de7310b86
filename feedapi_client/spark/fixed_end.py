"""Where a read of an open partition ends, fixed when it begins. Imports no Spark.

A feed that grows faster than it is read has no present end that a reader arrives at. A batch read
and a run of ``availableNow`` therefore fix an end for each open partition, and stop there.

Two cursors can't be compared, and publishers set checkpoints where they like: the cursor of the end
may never come. So the events behind it are looked at, from the end's own cursor. A run that another
one goes on from (``availableNow``) is over when they have come: where a publisher sends a part of
its events twice that may be too early, and the next run brings the rest. A batch read has no next
one. It is cut within a batch only where that is proven: the batch's checkpoint is as many events
behind the end as the batch has there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate

import orjson

from feedapi_client.protocol.page import CheckpointedEvents

MIN_FOLLOWING = 8
"""Events behind the end that it takes to recognize them, at least."""
MAX_FOLLOWING = 2_000
"""Events behind the end that are looked at, at most."""
_WATCHED = 200
"""Of them, those that have to come: more than a page puts out of order."""
_MAX_PROOFS = 8
"""Places that are taken for the end and are not: where payloads repeat, there are always more."""
_PATIENCE = 100
"""Responses that an end may take, after the events behind it have come."""

Look = Callable[[str, int | None], list[CheckpointedEvents]]
"""Reads behind a cursor: up to `MAX_FOLLOWING` events, or pages of that size up to as many. It
returns what it got where that fails."""


class FixedEnd:
    """Recognizes the end of a partition. `cut`: end exactly there, also within a batch."""

    def __init__(self, cursor: str, look: Look, *, cut: bool) -> None:
        self.cursor = cursor
        self.reached = False
        self.passed = False
        """Whether it is behind it."""
        self._look, self._cut = look, cut
        self._on_wire = orjson.dumps(cursor)[1:-1]
        # Other texts can be written in several ways in JSON: then each line is looked at.
        self._one_spelling = cursor.replace("-", "").replace("_", "").isalnum()
        self._tail = b""
        self._near = False
        self._responses = 0
        self._due = True
        self._following: list[int] = []  # fingerprints of the events behind the end, in order
        self._checkpoints: dict[int, str] = {}  # so many events behind the end
        self._watched: set[int] = set()  # those of them that tell the place
        self._unseen: set[int] = set()  # and did not come yet
        self._seen_at: int | None = None
        self._proofs = 0

    def may_be_in(self, chunk: bytes) -> bool:
        """Whether the chunk of a response, or those before it and this one, may hold the end."""
        if not self._one_spelling:
            return True
        size = len(self._on_wire)
        self._near = self._on_wire in chunk or self._on_wire in self._tail + chunk[:size]
        self._tail = (self._tail + chunk[-size:])[-size:]
        return self._near

    def response_over(self) -> bool:
        """Return False long after what is behind the end has come."""
        self._responses += 1
        self._due |= self._responses & (self._responses - 1) == 0
        return self._seen_at is None or self._responses <= 4 * self._seen_at + _PATIENCE

    def take(self, batch: CheckpointedEvents, start: str) -> CheckpointedEvents | None:
        """Return what of the batch is before the end, if anything. `start`: cursor before it."""
        if batch.cursor == self.cursor:
            self.reached = True
            return batch
        if not self._following and (self._near or not self._due):
            return batch  # what comes behind the end is not known
        prints = fingerprints([batch])
        if prints and not self._following:
            self._due = False
            self._learn(prints[:MIN_FOLLOWING])
            self.passed = self._cut and self._is_behind(start, prints)
        if self.passed:
            self.reached = True
            return None
        if not self._cut:
            self.reached = self._has_come(prints)
            return batch
        self._has_come(prints)
        kept = self._before_end(batch, prints) if self._following else None
        if kept is None:
            return batch
        self.reached = True
        size = batch.size * kept // len(prints)
        return CheckpointedEvents(batch.events[:kept], self.cursor, size) if kept else None

    def _learn(self, next: list[int]) -> None:
        """Find out which events come behind the end, and whether the `next` ones are of them."""
        batches = self._look(self.cursor, None)
        self._following = fingerprints(batches)
        self._checkpoints = _checkpoints(batches)
        counts = Counter(self._following)
        # Payloads that repeat, such as heartbeats, say nothing about the place they stand at.
        watched = [one for one in self._following if counts[one] == 1][:_WATCHED]
        self._watched = set(watched) if len(watched) >= MIN_FOLLOWING else set()
        self._unseen = set(self._watched)
        if len(next) == MIN_FOLLOWING and self._watched.issuperset(next):
            self._unseen.clear()
        if not self._watched and not self._cut:
            self._following = []  # and look again

    def _has_come(self, prints: list[int]) -> bool:
        self._unseen.difference_update(prints)
        if self._seen_at is None and self._watched and not self._unseen:
            self._seen_at = max(1, self._responses)
        return self._seen_at is not None

    def _before_end(self, batch: CheckpointedEvents, prints: list[int]) -> int | None:
        for at, first in enumerate(prints):
            if first != self._following[0]:
                continue
            behind = prints[at:]
            if _agree(behind, self._following) and self._lies(batch.cursor, len(behind)):
                return at
        return None

    def _is_behind(self, cursor: str, next: list[int]) -> bool:
        """Whether a place of the read is behind the end: these events come next there."""
        for at in range(1, len(self._following)):
            if _agree(next, self._following[at:]) and self._lies(cursor, at):
                return True
        return False

    def _lies(self, cursor: str, events: int) -> bool:
        """Whether a cursor is the place so many events behind the end: a page ends there."""
        if self._checkpoints.get(events) == cursor:
            return True
        if events in self._checkpoints or self._proofs == _MAX_PROOFS:
            return False
        self._proofs += 1
        return _checkpoints(self._look(self.cursor, events)).get(events) == cursor


def _agree(some: list[int], others: list[int]) -> bool:
    return all(one == other for one, other in zip(some, others, strict=False))


def _checkpoints(batches: list[CheckpointedEvents]) -> dict[int, str]:
    counts = accumulate(len(batch.events) for batch in batches)
    return dict(zip(counts, (batch.cursor for batch in batches), strict=True))


def fingerprints(batches: Iterable[CheckpointedEvents]) -> list[int]:
    payloads = (bytes(event._payload) for batch in batches for event in batch.events)
    return list(map(hash, payloads))
