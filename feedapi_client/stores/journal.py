"""The cursor journal: a history of positions, to take a consumer back to an earlier time.

With ``journal=Journal(...)`` a SQL or SQLite store keeps each position that is replaced or
deleted, with the times between which it was the current one. This costs one insert more for each
save. Positions replaced longer ago than `keep` are deleted now and then. Without a journal nothing
is written.

Rewinding restores the store's contents of that time, and nothing else. The consumer that starts
next behaves as if it had been switched off since:

- Each position stored at that time is the current one again, with its status of that time. A
  parent that was drained since is open, and is read again from the old cursor. An ancestor that
  was superseded since is open again, too.
- A partition without a position at that time loses the one it has. It takes its cursor from its
  ancestor once more, or waits for its parent and starts at ``_first``. Its own later cursor would
  skip what the ancestor delivers again.
- Every position gets the next revision, also those that did not change, so that a running consumer
  ends with `FencedError` at its next save. Stop it before rewinding all the same: it delivers on
  between the rewind and that save.
- Which ancestors a partition inherits from is decided by the discovery of today, as for a consumer
  that was switched off during all the splits since. When a partition split twice by cursor
  transfer and the publisher names only direct parents, a grandchild has no ancestor with a
  position left, and R9 decides. Publishers that name the whole path, as the specification
  suggests, are safe. In long chains of both split methods the order between a parent and the
  successors of its children holds only as far as discovery still lists the ancestors.

The journal never guesses. Where it does not know what was stored at a time (before it was switched
on, beyond `keep`, while another process saved without it), it raises `StoreError`. A rewind is
itself journalled, so that another one can undo it. Times are those of the database's clock at the
save; for a SQLite file that is the machine's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import stored_position

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_PRUNE_AT_LEAST_EVERY = timedelta(hours=1)
_PRUNES_PER_RETENTION = 20

CoveringRow = tuple[int, str, str, int, int]
"""partition, cursor, status, revision, saved_at of a position that was the current one then."""
LaterRow = tuple[int, int, int | None]
"""partition, the earliest save after a time, and the earliest save with revision 1 after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """How long to keep replaced positions.

    None keeps them forever. It suits a tool that only reads the journal of others.
    """

    keep: timedelta | None = timedelta(days=7)

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep <= timedelta(0):
            raise ValueError(f"Journal.keep must be positive, not {self.keep}")


class Pruner:
    """Decides when a feed's journal is to be pruned, so that few saves pay for it."""

    def __init__(self, journal: Journal | None) -> None:
        self._keep = journal.keep if journal else None
        self._pruned: dict[str, int] = {}

    def due(self, feed: FeedKey, now: int) -> int | None:
        """Return the time before which entries are to be deleted; None if it is too early."""
        if self._keep is None:
            return None
        pause = min(self._keep / _PRUNES_PER_RETENTION, _PRUNE_AT_LEAST_EVERY) // _MICROSECOND
        last = self._pruned.get(feed.id)
        # The absolute value: the clock may have been set back.
        if last is not None and abs(now - last) < pause:
            return None
        self._pruned[feed.id] = now
        return now - self._keep // _MICROSECOND


def microseconds(when: datetime) -> int:
    """Raise ValueError where `when` has no time zone."""
    if when.tzinfo is None:
        raise ValueError(
            f"the time {when.isoformat()} has no time zone: "
            "use datetime.now(UTC) or datetime.astimezone()"
        )
    return (when - _EPOCH) // _MICROSECOND


def now() -> int:
    return time.time_ns() // 1000


def check_reach(feed: FeedKey, journal: Journal | None, when: datetime, now: int) -> int:
    """Return `when` in microseconds since 1970 UTC. `now` is the time of the database."""
    if journal is None:
        raise StoreError("the store keeps no journal: give it journal=Journal()", feed=feed.url)
    at = microseconds(when)
    if journal.keep is not None and at < now - journal.keep // _MICROSECOND:
        raise StoreError(
            f"the journal keeps {journal.keep} and does not reach back to {when.isoformat()}",
            feed=feed.url,
        )
    return at


def reconstruct(
    feed: FeedKey, when: datetime, covering: Iterable[CoveringRow], later: Iterable[LaterRow]
) -> dict[int, Position]:
    found: dict[int, Position] = {}
    for partition, cursor, status, revision, _ in sorted(covering, key=lambda row: row[4]):
        found[partition] = stored_position(feed, partition, cursor, status, revision)
    earliest: dict[int, tuple[int, float]] = {}
    for partition, saved, created in later:
        before = earliest.get(partition, (saved, float("inf")))
        earliest[partition] = (
            min(saved, before[0]),
            min(float("inf") if created is None else created, before[1]),
        )
    for partition, (first_save, first_creation) in sorted(earliest.items()):
        # The first save after that time is not of revision 1: it had a predecessor, which is not
        # in the journal.
        if partition not in found and first_save != first_creation:
            raise StoreError(
                f"the journal does not know the position at {when.isoformat()}",
                feed=feed.url,
                partition=partition,
            )
    return found


def check_rewind(feed: FeedKey, to: datetime, target: dict[int, Position]) -> None:
    """A consumer on an empty store would bootstrap, and `start` might skip events."""
    if not target:
        raise StoreError(
            f"the feed had no position at {to.isoformat()}; "
            "delete its positions to start from the beginning",
            feed=feed.url,
        )
