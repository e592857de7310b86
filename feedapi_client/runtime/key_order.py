"""Which events may be handled now, and which batches may be committed, by key. No I/O, no clock.

Events of one key are handled one at a time, in the order in which they were delivered, whatever
their partitions. A batch may be committed once all of its events are done and all batches before it
in its partition may be. What was delivered and is not committed is in flight, done or not: that is
what a crash repeats, and what is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import msgspec

from feedapi_client.model import Batch, Event
from feedapi_client.quarantine.record import QuarantinedEvent
from feedapi_client.retry import Backoff

WAITING, READY, RUNNING, PAUSING = range(4)
"""States of an event: behind another of its key, due, handled, to be tried again after a pause."""


@dataclass(slots=True, eq=False, kw_only=True)
class KeyedBatch:
    batch: Batch = field(kw_only=False)
    number: int
    size: int
    delivered_at: float
    marks: Sequence[tuple[int, str]] = ()
    """Checkpoints in it: how many of its events are before each, and its cursor."""
    open_items: list[KeyedEvent | None] = field(default_factory=list)
    """Its events; None in the place of each that is done."""
    left: int = 0
    lost: bool = False
    """Its lease was lost: nothing of it is begun or committed any more."""
    quarantined: list[QuarantinedEvent] = field(default_factory=list)
    """Records to be saved with its cursor."""
    claim: int = 0
    """With ``event_id``: the claim under which it was delivered."""
    ids: list[str | Exception] = field(default_factory=list)
    """The identity of each event, or why it has none."""
    passes: dict[int, set[str]] = field(default_factory=dict)


class KeyedEvent(msgspec.Struct, eq=False):
    """One event in flight.

    `place`: counts the events as they were delivered.
    `seen`: when the present attempt at it was first seen to hold its cursor back.
    `tried`: whether an attempt has called `Event.done`.
    `backoff`: of its attempts, once one has failed.
    """

    key: Any
    event: Event
    work: KeyedBatch
    index: int
    place: int
    state: int = WAITING
    seen: float | None = None
    tried: bool = False
    backoff: Backoff | None = None


class Oldest(NamedTuple):
    """The event that holds the cursor of its partition back.

    `since`: when it was first seen to, or delivered if it was not begun. `behind`: how many later
    events of the partition can't be committed before it.
    """

    since: float
    behind: int
    begun: bool
    pausing: bool

    @property
    def held_back(self) -> str:
        """What waits for it, for people. Never its key."""
        more = f", with {self.behind} later events" if self.behind else ""
        return f"the cursor of the partition waits for it{more}"


class KeyOrder:
    def __init__(self) -> None:
        # What may be handled now: events that waited for nothing, and those that waited for another
        # one, as a heap by their places.
        self._first: deque[KeyedEvent] = deque()
        self._freed: list[tuple[int, KeyedEvent]] = []
        self._places = 0
        self.events = 0
        self.size = 0
        self._later: dict[Hashable, deque[KeyedEvent] | None] = {}
        """By the key of each event that is due, handled or pausing: those behind it."""
        self._batches: dict[int, deque[KeyedBatch]] = {}

    def __repr__(self) -> str:
        return (
            f"<KeyOrder {self.events} events in flight, {len(self._later)} keys, "
            f"{self.ready} ready>"
        )

    @property
    def ready(self) -> int:
        return len(self._first) + len(self._freed)

    @property
    def idle(self) -> bool:
        return not self._batches

    @property
    def partitions(self) -> list[int]:
        return list(self._batches)

    def admit(self, work: KeyedBatch, keys: Iterable[Hashable], done: Collection[int] = ()) -> None:
        """Take a delivered batch, and the key of each event. Those at `done` are done."""
        later, ready, items, place = self._later, self._first, work.open_items, self._places
        for index, (event, key) in enumerate(zip(work.batch.events, keys, strict=True)):
            if done and index in done:
                items.append(None)
                continue
            item = KeyedEvent(key, event, work, index, place + index)
            items.append(item)
            if key not in later:
                later[key] = None
                item.state = READY
                ready.append(item)
            elif (queue := later[key]) is None:
                later[key] = deque((item,))
            else:
                queue.append(item)
        work.left = len(items) - len(done)
        self._places += len(items)
        self.events += len(items)
        self.size += work.size
        self._batches.setdefault(work.batch.partition, deque()).append(work)

    def begin(self) -> KeyedEvent | None:
        """Return the event delivered first: little is then done ahead of the cursor."""
        freed, first = self._freed, self._first
        if first and not (freed and freed[0][0] < first[0].place):
            item = first.popleft()
        elif freed:
            item = heappop(freed)[1]
        else:
            return None
        item.state = RUNNING
        return item

    def _free(self, item: KeyedEvent) -> None:
        item.state = READY
        heappush(self._freed, (item.place, item))

    def pause(self, item: KeyedEvent) -> None:
        item.state, item.seen = PAUSING, None

    def resume(self, item: KeyedEvent) -> bool:
        """Let the event be tried again. Return whether it still has to be."""
        if not item.work.lost:
            self._free(item)
        return not item.work.lost

    def done(self, item: KeyedEvent) -> bool:
        """Note that the event is handled: the next one of its key is ready.

        Return whether batches of its partition may be committed.
        """
        work = item.work
        work.open_items[item.index] = None
        work.left -= 1
        if queue := self._later[item.key]:
            self._free(queue.popleft())
        else:
            del self._later[item.key]
        return not work.left and not work.lost and self._batches[work.batch.partition][0] is work

    def complete(self, partition: int) -> list[KeyedBatch]:
        found: list[KeyedBatch] = []
        for work in self._batches.get(partition, ()):
            if work.left:
                break
            found.append(work)
        return found

    def last_mark(self, partition: int) -> tuple[KeyedBatch, int, str] | None:
        """Return the last checkpoint in the first batch before which all is done, and where."""
        if partition not in self._batches:
            return None  # dropped while another partition was saved
        work = self._batches[partition][0]
        left = (at for at, item in enumerate(work.open_items) if item is not None)
        done = next(left, len(work.open_items))
        found = [mark for mark in work.marks if 0 < mark[0] <= done]
        return (work, *found[-1]) if found else None

    def up_to(self, partition: int, number: int) -> list[KeyedBatch]:
        return [work for work in self._batches.get(partition, ()) if work.number <= number]

    def retire(self, works: Iterable[KeyedBatch]) -> int:
        """Forget batches that were committed. Return how many of them were still in flight."""
        retired = 0
        for work in works:
            queue = self._batches.get(work.batch.partition)
            if not work.lost and queue and queue[0] is work:
                queue.popleft()
                retired += 1
                self._forget(work)
        return retired

    def first_number(self, partition: int) -> int:
        return self._batches[partition][0].number

    def drop(self, partition: int, last: int) -> list[KeyedBatch]:
        """Drop the batches of a partition up to this number: its lease was lost.

        What is being handled goes on, and its key waits for it. Nothing else is left of them.
        """
        return self._drop(self.up_to(partition, last))

    def drop_unbegun(self, partition: int) -> list[KeyedBatch]:
        found: list[KeyedBatch] = []
        for work in reversed(self._batches.get(partition, ())):
            items = work.open_items
            if any(item is None or item.state in (RUNNING, PAUSING) for item in items):
                break
            found.append(work)
        return self._drop(found)

    def _drop(self, lost: list[KeyedBatch]) -> list[KeyedBatch]:
        for work in lost:
            work.lost = True
            self._batches[work.batch.partition].remove(work)
            self._forget(work)
        dropped = [item for work in lost for item in work.open_items if item is not None]
        self._first = deque(item for item in self._first if not item.work.lost)
        self._freed = [each for each in self._freed if not each[1].work.lost]
        heapify(self._freed)
        for key in {item.key for item in dropped if item.state == WAITING}:
            queue = self._later[key]
            self._later[key] = deque(item for item in queue or () if not item.work.lost)
        for item in dropped:
            if item.state in (READY, PAUSING):  # its key waits for it no more
                if queue := self._later[item.key]:
                    self._free(queue.popleft())
                else:
                    del self._later[item.key]
        return lost

    def _forget(self, work: KeyedBatch) -> None:
        self.events -= len(work.open_items)
        self.size -= work.size
        if not self._batches[work.batch.partition]:
            del self._batches[work.batch.partition]

    def oldest(self, partition: int, now: float) -> Oldest | None:
        """Return what holds the cursor of the partition back; None where nothing does.

        To note the time here, and not for each event, costs nothing while all goes well.
        """
        works = self._batches.get(partition, ())
        behind = sum(len(work.open_items) for work in works)
        for work in works:
            for item in work.open_items:
                behind -= 1
                if item is not None:
                    begun = item.state == RUNNING
                    if begun and item.seen is None:
                        item.seen = now
                    since = work.delivered_at if item.seen is None else item.seen
                    return Oldest(since, behind, begun, item.state == PAUSING)
        return None
