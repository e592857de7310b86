"""The cursor journal: a history of positions, to take a consumer back to an earlier time.

With ``journal=Journal(...)`` a store keeps each position that is replaced or deleted, with the
times between which it was the current one. The guide "Replay and rewind" says what a rewind does.

The journal never guesses. Where it does not know what was stored at a time (before it was switched
on, beyond `keep`, while another process saved without it), it raises `StoreError`. Times are those
of the database's clock at the save; for a SQLite file that is the machine's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import stored_position

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

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


def reach(journal: Journal, now: int) -> float:
    """Return the earliest time that is kept, in microseconds since 1970 UTC."""
    return -math.inf if journal.keep is None else now - journal.keep // _MICROSECOND


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
    if at < reach(journal, now):
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
