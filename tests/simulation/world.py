"""A model of a FeedAPI publisher, written from the specification.

Everything in it carries the time at which it became true. So each question can be asked of the
publisher as it was some seconds ago: that is what a lagging replica or a cache answers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, NamedTuple

import anyio

from tests.simulation.manners import Manners

SLOTS = 256
"""Entities are spread over so many slots, and each partition owns some of them."""
_NEVER = float("inf")

Method = Literal["starts-after", "cursor-from"]
Dialect = Literal["v1", "v2-draft", "v2-token"]


_time = attrgetter("time")
_sequence = attrgetter("sequence")


class Published(NamedTuple):
    """One event: the n-th of its entity. `sequence` counts all events of the feed."""

    entity: int
    n: int
    sequence: int
    time: float


@dataclass(slots=True, eq=False)
class ModelPartition:
    """One partition. `family` names those among which cursors can be transferred."""

    id: int
    family: int
    slots: frozenset[int]
    created: float
    starts_after: int | None = None
    forgotten: bool = False
    """The publisher leaves `starts_after` out."""
    cursor_from: tuple[int, ...] = ()
    events: list[Published] = field(default_factory=list)
    closed: float = _NEVER
    closed_sequence: int = 0
    retired: float = _NEVER
    absent: list[tuple[float, float]] = field(default_factory=list)
    """Times before its last retirement at which it was not listed either."""

    def is_listed(self, at: float) -> bool:
        """Return whether discovery listed it at a time."""
        if not self.created <= at < self.retired:
            return False
        return not self.absent or not any(since <= at < until for since, until in self.absent)

    def visible(self, at: float) -> int:
        """Return how many of its events existed at a time."""
        events = self.events
        if not events or events[-1].time <= at:  # as it is where no replica lags
            return len(events)
        return bisect_right(events, at, key=_time)

    def end(self, at: float) -> int:
        """Return the sequence number in the cursor behind everything that existed at a time."""
        if self.closed <= at:
            return self.closed_sequence
        count = self.visible(at)
        return self.events[count - 1].sequence if count else 0

    def cursor(self, sequence: int) -> str:
        """Return the cursor behind the event of this number."""
        return f"f{self.family}-{sequence}"

    def sequence_of(self, cursor: str) -> int | None:
        """Return the number in a cursor; None if the cursor was made by another family."""
        if cursor == "_first":
            return 0
        family, _, number = cursor.partition("-")
        return int(number) if family == f"f{self.family}" and number.isdigit() else None

    def selected_cursor(self, sequence: int) -> str:
        """Return the cursor of a request that selects events.

        Its number is twice the sequence number: it is a cursor of its own, and now and then it
        equals the `lastCursor` of a request without a selection.
        """
        return self.cursor(2 * sequence)

    def sequence_of_selected(self, cursor: str) -> int | None:
        """Return the number in a cursor of a request that selects events; None for any other."""
        number = self.sequence_of(cursor)
        return None if number is None or number % 2 else number // 2


@dataclass(frozen=True, slots=True)
class Version:
    """How an instance of the publisher answers: its dialect, and its token in v2-token."""

    dialect: Dialect
    token: str


class World:
    """The publisher's data: entities over partitions, splits, tokens, dialects.

    Arguments:
        partitions: how many there are at the start.
        dialect: how the publisher speaks at the start.
        last_cursor: whether discovery says where a closed partition ends.
        whole_lineage: whether a successor names all its ancestors, and not its parent only.
        moving_cursors: whether the cursor at the end of an open partition moves on with the whole
            feed, without any event, as that of a publisher that leaves out internal events.
        noisy: whether answers hold fields and commands that no specification knows.
        manners: how unkind it is.
        now: gives the virtual time.
    """

    def __init__(
        self,
        partitions: int,
        dialect: Dialect,
        *,
        last_cursor: bool,
        whole_lineage: bool = True,
        moving_cursors: bool = False,
        noisy: bool = False,
        manners: Manners | None = None,
        now: Callable[[], float],
    ) -> None:
        self.last_cursor = last_cursor
        self.noisy = noisy
        self.manners = manners or Manners()
        self._whole_lineage = whole_lineage
        self._moving_cursors = moving_cursors
        self.published: dict[int, int] = {}
        """How many events each entity has."""
        self.families: dict[int, list[int]] = {}
        """Of each entity: the family of the partition that each of its events was appended to."""
        self._now = now
        self._changed: anyio.Event | None = None
        self._sequence_times: list[float] = []
        """When each sequence number was given to an event or to the end of a partition."""
        self._tokens = 0
        self.versions: list[tuple[float, Version]] = [(0.0, Version(dialect, "t0"))]
        self.partitions: dict[int, ModelPartition] = {
            id: ModelPartition(id, id, frozenset(range(id, SLOTS, partitions)), 0.0)
            for id in range(partitions)
        }
        self.first = tuple(self.partitions)
        """The partitions that there are in version 1."""

    # ------------------------------------------------------------------ what happens

    def publish(self, entity: int) -> None:
        """Append the entity's next event to the open partition that owns it."""
        slot, now = entity % SLOTS, self._now()
        for owner in self.partitions.values():
            if slot in owner.slots and owner.closed > now and owner.retired > now:
                break
        else:
            raise AssertionError(f"no open partition owns entity {entity}")
        n = self.published[entity] = self.published.get(entity, 0) + 1
        self.families.setdefault(entity, []).append(owner.family)
        owner.events.append(Published(entity, n, self._next_sequence(), now))
        self._wake()

    def split(
        self,
        partition: int,
        parts: int,
        method: Method,
        *,
        listed_after: float = 0.0,
        forgotten: bool = False,
    ) -> list[int]:
        """Split an open partition, and return its children.

        Arguments:
            partition, parts, method: which one, into how many, and how.
            listed_after: seconds after which discovery lists children that start after it.
            forgotten: whether discovery leaves out that they do.
        """
        parent = self.partitions[partition]
        self._wake()
        if method == "starts-after":
            self._close(parent)
            listed = self._now() + listed_after
            children = [self._start_after(parent, s, listed) for s in _shares(parent, parts)]
            for child in children:
                self.partitions[child].forgotten = forgotten
            return children
        parent.retired = self._now()
        return [self._inherit(parent, slots) for slots in _shares(parent, parts)]

    def merge(self, first: int, second: int) -> int:
        """Replace two open partitions of one family by one with the history of both."""
        parents = [self.partitions[first], self.partitions[second]]
        slots = parents[0].slots | parents[1].slots
        for parent in parents:
            parent.retired = self._now()
        self._wake()
        id = self._inherit(parents[0], slots)
        merged = self.partitions[id]
        ancestors = [a for parent in parents for a in (parent.id, *parent.cursor_from)]
        named = (first, second, *ancestors) if self._whole_lineage else (first, second)
        merged.cursor_from = tuple(dict.fromkeys(named))
        merged.events = sorted(
            (event for parent in parents for event in parent.events),
            key=lambda event: event.sequence,
        )
        return id

    def roll_back(self, partition: int) -> list[int]:
        """Undo a split by cursor transfer: the old id is open again. Return its successors."""
        parent, now = self.partitions[partition], self._now()
        children = self._split_into(partition)
        for child in children:
            child.retired = now
        self._share(children, [parent])
        parent.absent.append((parent.retired, now))
        parent.retired = _NEVER
        self._wake()
        return [child.id for child in children]

    def roll_forward(self, partition: int, children: Collection[int]) -> None:
        """Make a split again that was rolled back."""
        parent, now = self.partitions[partition], self._now()
        successors = [self.partitions[id] for id in children]
        for child in successors:
            child.absent.append((child.retired, now))
            child.retired = _NEVER
        self._share([parent], successors)
        parent.retired = now
        self._wake()

    def split_by_transfer(self) -> list[int]:
        """Return the partitions whose split by cursor transfer can be undone now."""
        now = self._now()
        open_now = {partition.id for partition in self.writable()}
        return [
            partition.id
            for partition in self.partitions.values()
            if partition.retired <= now
            and (children := self._split_into(partition.id))
            and all(child.id in open_now for child in children)
            and frozenset().union(*(child.slots for child in children)) == partition.slots
        ]

    def _split_into(self, partition: int) -> list[ModelPartition]:
        return [p for p in self.partitions.values() if p.cursor_from[:1] == (partition,)]

    def _share(self, old: list[ModelPartition], new: list[ModelPartition]) -> None:
        """Give the events of some partitions to those that hold their entities from now on."""
        for heir in new:
            known = {event.sequence for event in heir.events}
            heir.events += [
                event
                for partition in old
                for event in partition.events
                if event.sequence not in known and event.entity % SLOTS in heir.slots
            ]
            heir.events.sort(key=_sequence)

    def deploy(self, dialect: Dialect) -> tuple[Version, Version]:
        """Make a new version the current one. Return the version before it, and the new one."""
        before = self.version(self._now())
        self._tokens += 1
        after = Version(dialect, f"t{self._tokens}")
        self.versions.append((self._now(), after))
        return before, after

    def changed(self) -> anyio.Event:
        """Return an event that is set when something is published, closed or retired."""
        if self._changed is None:
            self._changed = anyio.Event()
        return self._changed

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _close(self, parent: ModelPartition) -> None:
        # Closing takes a number of its own: the end of a closed partition is the same cursor for a
        # consumer that came from an ancestor with a higher one.
        parent.closed, parent.closed_sequence = self._now(), self._next_sequence()

    def _next_sequence(self) -> int:
        self._sequence_times.append(self._now())
        return len(self._sequence_times)

    def _start_after(self, parent: ModelPartition, slots: frozenset[int], listed: float) -> int:
        id = len(self.partitions)
        self.partitions[id] = ModelPartition(id, id, slots, listed, starts_after=parent.id)
        return id

    def _inherit(self, parent: ModelPartition, slots: frozenset[int]) -> int:
        id = len(self.partitions)
        ancestors = parent.cursor_from if self._whole_lineage else ()
        self.partitions[id] = ModelPartition(
            id,
            parent.family,
            slots,
            self._now(),
            cursor_from=(parent.id, *ancestors),
            events=[event for event in parent.events if event.entity % SLOTS in slots],
        )
        return id

    # ------------------------------------------------------------------ what can be asked

    def writable(self) -> list[ModelPartition]:
        """Return the partitions that take events now."""
        now = self._now()
        return [p for p in self.partitions.values() if p.closed > now and p.retired > now]

    def listed(self, at: float) -> list[ModelPartition]:
        """Return the partitions that discovery listed at a time."""
        return [p for p in self.partitions.values() if p.is_listed(at)]

    def sequence(self, at: float) -> int:
        """Return the highest number that an event or an end had at a time."""
        return bisect_right(self._sequence_times, at)

    def sequence_before(self, seconds: float) -> int:
        """Return the highest number that an event or an end had so many seconds ago."""
        return self.sequence(self._now() - seconds)

    def end(self, partition: ModelPartition, at: float) -> int:
        """Return the number in the cursor behind everything that a partition had at a time.

        With `moving_cursors` that of an open partition moves on with the whole feed.
        """
        if self._moving_cursors and partition.closed > at:
            return bisect_right(self._sequence_times, at)
        return partition.end(at)

    def version(self, at: float) -> Version:
        """Return the version that answered at a time."""
        since, version = self.versions[-1]
        if since <= at:  # as it is where no replica lags
            return version
        return next(version for since, version in reversed(self.versions) if since <= at)

    def lane(self, entity: int, n: int) -> tuple[int, int, int]:
        """Return what keeps an event in its order where children don't wait for their parents.

        The entity, the family whose partitions hold it, and its place among those.
        """
        families = self.families[entity]
        family = families[n - 1]
        return entity, family, n - families.index(family)

    def descendants(self, partitions: Collection[int]) -> set[int]:
        """Return the listed partitions that descend from some by either method, at any distance."""
        found = set(partitions)
        for partition in self.partitions.values():  # children come behind their parents
            if found.intersection((partition.starts_after, *partition.cursor_from)):
                found.add(partition.id)
        return {partition.id for partition in self.listed(self._now())} & found

    def total(self, *, selected: bool = False) -> int:
        """Return how many events were published, or how many of those that a selection takes."""
        return sum(
            count for entity, count in self.published.items() if not selected or is_selected(entity)
        )


def is_selected(entity: int) -> bool:
    """Return whether a request that selects events gets those of this entity."""
    return entity % 2 == 0


def _shares(parent: ModelPartition, parts: int) -> list[frozenset[int]]:
    slots = sorted(parent.slots)
    parts = max(1, min(parts, len(slots)))
    return [frozenset(slots[part::parts]) for part in range(parts)]
