"""The feeds that are explored: each a sequence of topologies with at most three partitions.

An event is an entity and its number. A cursor is an index into the history of a partition, and None
in it stands for an event that went to another successor, so that cursors keep their meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from feedapi_client.model import FIRST, FeedInfo, Partition

Event = tuple[str, int]


class Log(NamedTuple):
    """One listed partition."""

    events: tuple[Event | None, ...]
    closed: bool = False
    starts_after: int | None = None
    cursor_from: tuple[int, ...] = ()


Topology = dict[int, Log]


@dataclass(frozen=True)
class Feed:
    """One feed: its topologies, one after the other.

    Attributes:
        name: for people.
        topologies: what is listed. The first one is there when the consumer starts.
        tells_end: whether closed partitions have `lastCursor`.
        rolled_back: topologies that need the operator or the next topology to be read.
    """

    name: str
    topologies: tuple[Topology, ...]
    tells_end: bool = True
    rolled_back: frozenset[int] = frozenset()

    def __reduce__(self) -> tuple[Any, ...]:
        return (named, (self.name,))  # a state refers to its feed, and holds no copy of it

    def info(self, version: int) -> FeedInfo:
        """Return the discovery of a topology."""
        return FeedInfo(
            "v2-draft", {p: self._partition(p, log) for p, log in self[version].items()}
        )

    def _partition(self, id: int, log: Log) -> Partition:
        end = str(len(log.events)) if log.closed and self.tells_end and log.events else None
        return Partition(id, log.closed, end, log.starts_after, log.cursor_from)

    def __getitem__(self, version: int) -> Topology:
        return self.topologies[version]

    def published(self, version: int) -> int:
        """Return how many events there are."""
        logs = (log for v in range(version + 1) for log in self[v].values())
        return len({event for log in logs for event in log.events if event is not None})

    def read(self, version: int, partition: int, cursor: str) -> tuple[Event | None, str] | None:
        """Return the event at a cursor and the cursor after it; None at the end."""
        at = 0 if cursor == FIRST else int(cursor)
        events = self[version][partition].events
        return (events[at], str(at + 1)) if at < len(events) else None


def _a(*numbers: int) -> tuple[Event, ...]:
    return tuple(("a", n) for n in numbers)


_ROOT: Topology = {0: Log(_a(0))}
_CLOSED = Log(_a(0), closed=True)
_CHILD = Log(_a(1), starts_after=0)
_SUCCESSOR: Topology = {1: Log(_a(0, 1), cursor_from=(0,))}

STARTS_AFTER_TWICE = Feed(
    "starts after, twice",
    (
        _ROOT,
        {0: _CLOSED, 1: _CHILD},
        {
            0: _CLOSED,
            1: Log(_a(1), closed=True, starts_after=0),
            2: Log(_a(2), starts_after=1),
        },
    ),
)
TRANSFER_TWICE = Feed(
    "cursor transfer, twice",
    (_ROOT, _SUCCESSOR, {2: Log(_a(0, 1, 2), cursor_from=(1, 0))}),
)
STARTS_AFTER_THEN_TRANSFER = Feed(
    "starts after, then cursor transfer",
    (
        _ROOT,
        {0: _CLOSED, 1: _CHILD},
        {0: _CLOSED, 2: Log(_a(1, 2), cursor_from=(1,))},
    ),
)
TRANSFER_THEN_STARTS_AFTER = Feed(
    "cursor transfer, then starts after",
    (
        _ROOT,
        _SUCCESSOR,
        {
            1: Log(_a(0, 1), closed=True, cursor_from=(0,)),
            2: Log(_a(2), starts_after=1),
        },
    ),
)
_BOTH: tuple[Event, ...] = (("a", 0), ("b", 0))
TWO_CHILDREN = Feed(
    "two children",
    (
        {0: Log(_BOTH)},
        {
            0: Log(_BOTH, closed=True),
            1: Log((("a", 1),), starts_after=0),
            2: Log((("b", 1),), starts_after=0),
        },
    ),
)
TWO_SUCCESSORS = Feed(
    "two successors",
    (
        {0: Log(_BOTH)},
        {
            1: Log((("a", 0), None, ("a", 1)), cursor_from=(0,)),
            2: Log((None, ("b", 0), ("b", 1)), cursor_from=(0,)),
        },
    ),
)
ROLLED_BACK = Feed(
    "rolled back and forward",
    (
        _ROOT,
        _SUCCESSOR,
        {0: Log(_a(0, 1, 2))},
        {1: Log(_a(0, 1, 2, 3), cursor_from=(0,))},
    ),
    rolled_back=frozenset({2}),
)
SILENT_END = Feed("one child, without lastCursor", STARTS_AFTER_TWICE.topologies[:2], False)
NO_SPLIT = Feed("no split", ({0: Log(_a(0, 1))},))
NEW_THEN_SUCCESSOR = Feed(
    "a new partition and its successor",
    (
        {0: Log(())},
        {0: Log(()), 1: Log(_a(0))},
        {0: Log(()), 2: Log(_a(0, 1), cursor_from=(1,))},
    ),
)
CHILD = Feed("one child", STARTS_AFTER_TWICE.topologies[:2])
SUCCESSOR = Feed("one successor", TRANSFER_TWICE.topologies[:2])

FEEDS = (
    NO_SPLIT,
    NEW_THEN_SUCCESSOR,
    CHILD,
    SUCCESSOR,
    SILENT_END,
    STARTS_AFTER_TWICE,
    TRANSFER_TWICE,
    STARTS_AFTER_THEN_TRANSFER,
    TRANSFER_THEN_STARTS_AFTER,
    TWO_CHILDREN,
    TWO_SUCCESSORS,
    ROLLED_BACK,
)


def named(name: str) -> Feed:
    """Return the feed of this name."""
    return next(feed for feed in FEEDS if feed.name == name)
