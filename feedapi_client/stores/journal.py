"""The cursor journal: a history of positions, so that a consumer can be taken back to a time although cursors are opaque.

With ``journal=Journal(...)`` a SQL or SQLite store keeps each position that is replaced or deleted, with the times between which it was the current
one: one insert more for each save. What was replaced longer ago than `keep` is deleted now and then. Without a journal nothing is written.

Rewinding restores the store's contents at that time, and nothing else. So the consumer that starts next behaves as one that was switched off since:

- Each position stored at that time is the current one again, with its status of that time. A parent that was drained since is open and read again from
  the old cursor; an ancestor that was superseded since is open again, too.
- A partition that had no position then loses the one it has: a child takes its cursor from its ancestor once more, or waits for its parent and starts at
  ``_first``. Its own later cursor would skip what the ancestor hands over again.
- Every position gets the next revision, also those that did not change, so that a running consumer ends with `FencedError` at its next save. Stop it
  all the same before rewinding: between the rewind and that save it goes on to deliver.
- Which ancestors a partition inherits from is up to the discovery of today, as for a consumer that was switched off during all the splits since. When
  a partition split twice by cursor transfer and the publisher names only direct parents, a grandchild has no ancestor with a position left and R9
  decides; publishers that name the whole path, as the specification suggests, are safe. In long chains of both methods the order between a parent and
  the heirs of its children holds only as far as the discovery still tells who they descend from.

The journal never guesses: where it does not know what was stored at a time (before it was switched on, beyond `keep`, while another process saved without
it), there is a `StoreError`. A rewind is itself journalled, so it can be undone by another one. Times are those of the consumers' clocks at the save.
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
_PRUNE_AT_LEAST_EVERY = 3600.0
_PRUNE_SHARE = 20

CoveringRow = tuple[int, str, str, int, int]
"""partition, cursor, status, revision, saved_at of a position that was the current one at a time."""
LaterRow = tuple[int, int, int | None]
"""partition, the earliest save after a time, and the earliest save with revision 1 after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """How long to keep replaced positions; None keeps them for good (and suits a tool that only reads the journal of others)."""

    keep: timedelta | None = timedelta(days=7)

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep <= timedelta(0):
            raise ValueError(f"Journal.keep must be positive, not {self.keep}")


class Pruner:
    """Says when a feed's journal is due for pruning, so that few saves pay for it."""

    def __init__(self, journal: Journal | None) -> None:
        self._keep = journal.keep if journal else None
        self._pruned: dict[str, float] = {}

    def due(self, feed: FeedKey, now: int) -> int | None:
        """The time before which entries can go, or None when it is too early to look; `now` and the result in microseconds since 1970."""
        if self._keep is None:
            return None
        pause = min(self._keep.total_seconds() / _PRUNE_SHARE, _PRUNE_AT_LEAST_EVERY)
        clock = time.monotonic()
        if clock - self._pruned.get(feed.id, float("-inf")) < pause:
            return None
        self._pruned[feed.id] = clock
        return now - self._keep // _MICROSECOND


def microseconds(when: datetime) -> int:
    """Microseconds since 1970 UTC. Raises ValueError for a time without a zone."""
    if when.tzinfo is None:
        raise ValueError(
            f"the time {when.isoformat()} has no time zone: use datetime.now(UTC) or datetime.astimezone()"
        )
    return (when - _EPOCH) // _MICROSECOND


def now() -> int:
    """The time of a save."""
    return time.time_ns() // 1000


def check_reach(feed: FeedKey, journal: Journal | None, when: datetime) -> int:
    """`when` in microseconds. Raises `StoreError` when there is no journal, or none that may reach back so far."""
    if journal is None:
        raise StoreError("the store keeps no journal: give it journal=Journal()", feed=feed.url)
    at = microseconds(when)
    if journal.keep is not None and at < now() - journal.keep // _MICROSECOND:
        raise StoreError(
            f"the journal keeps {journal.keep} and does not reach back to {when.isoformat()}",
            feed=feed.url,
        )
    return at


def reconstruct(
    feed: FeedKey, when: datetime, covering: Iterable[CoveringRow], later: Iterable[LaterRow]
) -> dict[int, Position]:
    """The positions at `when`. Raises `StoreError` for a partition that may have had a position which the journal does not know."""
    found: dict[int, Position] = {}
    for partition, cursor, status, revision, _ in sorted(covering, key=lambda row: row[4]):
        found[partition] = stored_position(feed, partition, cursor, status, revision)
    earliest: dict[int, tuple[int, float]] = {}
    for partition, saved, born in later:
        before = earliest.get(partition, (saved, float("inf")))
        earliest[partition] = (
            min(saved, before[0]),
            min(float("inf") if born is None else born, before[1]),
        )
    for partition, (saved, birth) in sorted(earliest.items()):
        # What was saved first after that time and is not a first revision had a predecessor, which is not in the journal.
        if partition not in found and saved != birth:
            raise StoreError(
                f"the journal does not know the position at {when.isoformat()}",
                feed=feed.url,
                partition=partition,
            )
    return found


def check_rewind(feed: FeedKey, to: datetime, target: dict[int, Position]) -> None:
    """Raise `StoreError` unless there is something to rewind to: an empty store would bootstrap, and `start` might skip events."""
    if not target:
        raise StoreError(
            f"the feed had no position at {to.isoformat()}; delete its positions to start anew",
            feed=feed.url,
        )
