"""`KeyOrder` against a model: any order of deliveries, ends, failures and losses.

Each of the bugs that the peers of `run_by_key` had is planted below, and has to be found.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.model import Batch, make_event
from feedapi_client.runtime.key_order import KeyedBatch, KeyedEvent, KeyOrder


class Model:
    """Partitions, deliveries and handlers, driven at random; checks each rule at each step."""

    def __init__(self, seed: int, kind: type[KeyOrder] = KeyOrder) -> None:
        self.random = random.Random(seed)
        self.order = kind()
        self.numbers: dict[int, int] = defaultdict(int)
        self.delivered: dict[int, list[KeyedBatch]] = defaultdict(list)
        self.queues: dict[str, list[KeyedEvent]] = defaultdict(list)
        """All events of a key that may still be handled, in order."""
        self.running: list[KeyedEvent] = []
        self.pausing: list[KeyedEvent] = []
        self.done: set[int] = set()

    def step(self) -> None:
        steps: list[Callable[[], None]] = [
            self.deliver,
            self.begin,
            self.begin,
            self.end,
            self.end,
            self.fail,
            self.go_on,
            self.commit,
        ]
        if self.random.random() < 0.05:
            steps = [self.lose]
        self.random.choice(steps)()
        self.check()

    def deliver(self) -> None:
        partition = self.random.randrange(3)
        count = self.random.choice((0, 1, 3, 8))
        events = [make_event(partition, b"{}") for _ in range(count)]
        self.numbers[partition] += 1
        work = KeyedBatch(
            Batch(partition, events, f"c{self.numbers[partition]}"),
            number=self.numbers[partition],
            size=100 * count,
            delivered_at=0.0,
        )
        keys = [self.random.choice("abcde") for _ in events]
        self.order.admit(work, keys)
        self.delivered[partition].append(work)
        for item in work.open_items:
            assert item is not None
            self.queues[item.key].append(item)

    def begin(self) -> None:
        if not self.order.ready:
            # Nothing may be begun: each key waits for one that is handled or pausing.
            busy = {each.key for each in self.running + self.pausing}
            assert {key for key, queue in self.queues.items() if queue} <= busy
            return
        item = self.order.begin()
        assert item is not None
        assert not item.work.lost
        assert self.queues[item.key][0] is item, "not the next one of its key"
        assert all(each.key != item.key for each in self.running), "two of a key at once"
        self.running.append(item)

    def _take(self, items: list[KeyedEvent]) -> KeyedEvent | None:
        return items.pop(self.random.randrange(len(items))) if items else None

    def end(self) -> None:
        item = self._take(self.running)
        if item is not None:
            self.queues[item.key].remove(item)
            self.done.add(id(item))
            partition = item.work.batch.partition
            committable = self.order.done(item)
            if not item.work.lost:
                assert committable == (
                    self.delivered[partition][0] is item.work and not item.work.left
                )

    def fail(self) -> None:
        item = self._take(self.running)
        if item is not None:
            if item.work.lost:
                self.queues[item.key].remove(item)
                self.order.done(item)
                return
            self.order.pause(item)
            self.pausing.append(item)

    def go_on(self) -> None:
        item = self._take(self.pausing)
        if item is not None:
            assert self.order.resume(item) == (not item.work.lost)

    def commit(self) -> None:
        partition = self.random.randrange(3)
        works = self.order.complete(partition)
        first = self.delivered[partition][: len(works)]
        assert works == first, "a cursor passes over a batch"
        assert not any(work.left or any(work.open_items) for work in works), "an unfinished event"
        assert self.order.retire(works) == len(works)
        del self.delivered[partition][: len(works)]

    def lose(self) -> None:
        partition = self.random.randrange(3)
        lost = self.delivered.pop(partition, [])
        dropped = self.order.drop(partition, self.numbers[partition])
        assert dropped == lost
        for work in lost:
            for item in work.open_items:
                if item is not None and all(item is not each for each in self.running):
                    self.queues[item.key].remove(item)
        self.pausing = [item for item in self.pausing if not item.work.lost]

    def check(self) -> None:
        in_flight = [work for works in self.delivered.values() for work in works]
        assert self.order.events == sum(len(work.open_items) for work in in_flight), "leaked"
        assert self.order.size == sum(work.size for work in in_flight), "leaked bytes"
        assert self.order.idle == (not in_flight)
        for partition in range(3):
            self.check_oldest(partition)

    def check_oldest(self, partition: int) -> None:
        items = [item for work in self.delivered[partition] for item in work.open_items]
        oldest = self.order.oldest(partition, 0.0)
        left = [index for index, item in enumerate(items) if item is not None]
        if not left:
            assert oldest is None
        else:
            assert oldest is not None
            assert oldest.behind == len(items) - left[0] - 1

    def finish(self) -> None:
        """Let all end: nothing is left anywhere."""
        while self.running or self.pausing or self.order.ready:
            self.begin()
            self.end()
            self.go_on()
        for partition in range(3):
            works = self.order.complete(partition)
            assert works == self.delivered[partition]
            self.order.retire(works)
            self.delivered[partition] = []
        self.check()
        assert self.order.idle
        assert not self.order._later, "a key is remembered for ever"
        assert not any(self.queues.values()), "an event was forgotten"


def play(seed: int, kind: type[KeyOrder] = KeyOrder, steps: int = 150) -> None:
    model = Model(seed, kind)
    for _ in range(steps):
        model.step()
    model.finish()


@given(st.integers(0, 2**32))
def test_any_history_keeps_order_counts_and_cursors(seed: int) -> None:
    play(seed)


class CountsLeak(KeyOrder):
    """What was lost is counted for ever, until nothing is read."""

    def _forget(self, work: KeyedBatch) -> None:
        if work.lost:
            if not self._batches[work.batch.partition]:
                del self._batches[work.batch.partition]
            return
        super()._forget(work)


class DropsWhatFindsItsPlaceTaken(KeyOrder):
    """An event that comes again, while it is still handled for the lease before, is dropped."""

    def admit(self, work: KeyedBatch, keys: Any) -> None:
        keys = list(keys)
        busy = set(self._later)
        super().admit(work, keys)
        for item in list(work.open_items):
            if item is not None and item.key in busy and item.index % 7 == 6:
                queue = self._later[item.key]
                if queue and queue[-1] is item:
                    queue.pop()
                    work.open_items[item.index] = None
                    work.left -= 1


class PassesUnfinished(KeyOrder):
    """A cursor passes an event that is still handled."""

    def complete(self, partition: int) -> list[KeyedBatch]:
        works = list(self._batches.get(partition, ()))
        while works and works[-1].left:
            works.pop()
        return works


class RemembersARefusedCommit(KeyOrder):
    """What was refused after the lease was lost counts as committed."""

    def drop(self, partition: int, last: int) -> list[KeyedBatch]:
        done = [work for work in self._batches.get(partition, ()) if not work.left]
        dropped = super().drop(partition, last)
        return [work for work in dropped if work not in done]


class KeepsWhatWaits(KeyOrder):
    """Lost events stay in the queue of their key: memory grows behind one that hangs."""

    def drop(self, partition: int, last: int) -> list[KeyedBatch]:
        lost = [work for work in self._batches.get(partition, ()) if work.number <= last]
        for work in lost:
            work.lost = True
            self._batches[partition].popleft()
            self._forget(work)
        return lost


@pytest.mark.parametrize(
    "planted",
    [
        CountsLeak,
        DropsWhatFindsItsPlaceTaken,
        PassesUnfinished,
        RemembersARefusedCommit,
        KeepsWhatWaits,
    ],
    ids=lambda kind: kind.__name__,
)
def test_the_bugs_of_others_are_found(planted: type[KeyOrder]) -> None:
    def hunt() -> None:
        for seed in range(200):
            play(seed, planted)

    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        hunt()


def test_what_is_shown_of_it() -> None:
    order = KeyOrder()
    events = [make_event(0, b"{}") for _ in range(3)]
    work = KeyedBatch(Batch(0, events, "c"), number=1, size=10, delivered_at=1.0)
    order.admit(work, ["a", "a", "b"])
    assert repr(order) == "<KeyOrder 3 events in flight, 2 keys, 2 ready>"
    oldest = order.oldest(0, 0.0)
    assert oldest is not None
    assert oldest.held_back == "the cursor of the partition waits for it, with 2 later events"
