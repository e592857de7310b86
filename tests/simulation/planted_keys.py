"""Bugs of handling by key: the first five are known of other libraries."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import Any

import pytest

from feedapi_client.lineage.graph import Graph
from feedapi_client.runtime.by_key import ByKey
from feedapi_client.runtime.done_ahead import DoneAhead
from feedapi_client.runtime.key_order import RUNNING, KeyedBatch, KeyedEvent, KeyOrder
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.watchdog import Watchdog
from tests.simulation.store import SimulatedDatabase, StoreSession

# ---------------------------------------------------------------------- what went wrong elsewhere


def memory_grows_behind_a_slow_event(patch: pytest.MonkeyPatch) -> None:
    """What is in flight has no bound: one slow event holds back whatever comes."""
    fits = ByKey.fits

    def always(self: ByKey, partition: RuntimePartition) -> bool | None:
        return None if fits(self, partition) is None else True

    patch.setattr(ByKey, "fits", always)


def lost_work_is_still_counted(patch: pytest.MonkeyPatch) -> None:
    """Counters of work in flight leak when a lease is lost, until nothing is read."""
    drop = KeyOrder.drop

    def leaking(self: KeyOrder, partition: int, last: int) -> list[KeyedBatch]:
        before = self.events
        lost = drop(self, partition, last)
        self.events = before
        return lost

    patch.setattr(KeyOrder, "drop", leaking)
    patch.setattr(KeyOrder, "idle", property(lambda self: not self.events))


def an_occupied_place_drops_an_event(patch: pytest.MonkeyPatch) -> None:
    """An event is dropped whose place a lost one still has, because its handler still runs."""
    admit = KeyOrder.admit

    def dropping(
        self: KeyOrder, work: KeyedBatch, keys: Iterable[Hashable], done: Collection[int] = ()
    ) -> None:
        listed = list(keys)
        occupied = getattr(self, "occupied", set())
        places = {n for n, event in enumerate(work.batch.events) if bytes(event.raw) in occupied}
        admit(self, work, listed, {*done, *places})

    drop = KeyOrder.drop

    def occupying(self: Any, partition: int, last: int) -> list[KeyedBatch]:
        lost: list[KeyedBatch] = drop(self, partition, last)
        items = [item for work in lost for item in work.open_items]
        running = {bytes(item.event.raw) for item in items if item and item.state == RUNNING}
        self.occupied = getattr(self, "occupied", set()) | running
        return lost

    patch.setattr(KeyOrder, "admit", dropping)
    patch.setattr(KeyOrder, "drop", occupying)


def an_event_holds_the_cursor_back_without_a_word(patch: pytest.MonkeyPatch) -> None:
    """Nobody says which event keeps the cursor of a partition where it is."""
    patch.setattr(Watchdog, "oldest", lambda self, partition: None)


def what_a_refused_save_had_done_counts(patch: pytest.MonkeyPatch) -> None:
    """What was done before a lease was lost still counts as done after it was taken again."""
    patch.setattr(KeyOrder, "drop", lambda self, partition, last: [])


# ---------------------------------------------------------------------- order and cursors


def the_cursor_passes_what_is_not_done(patch: pytest.MonkeyPatch) -> None:
    """A batch is committed although an event of it is still being handled."""

    def complete(self: KeyOrder, partition: int) -> list[KeyedBatch]:
        return [work for work in self._batches.get(partition, ()) if work.left <= 1]

    patch.setattr(KeyOrder, "complete", complete)


def all_events_of_a_key_at_once(patch: pytest.MonkeyPatch) -> None:
    """An event does not wait for the one before it."""
    admit = KeyOrder.admit

    def eager(
        self: KeyOrder, work: KeyedBatch, keys: Iterable[Hashable], done: Collection[int] = ()
    ) -> None:
        own = [(key, n, id(work)) for n, key in enumerate(keys)]
        admit(self, work, own, done)

    patch.setattr(KeyOrder, "admit", eager)


def a_retried_event_lets_the_next_one_pass(patch: pytest.MonkeyPatch) -> None:
    """Behind an event that waits for its next attempt the next one of its key begins."""
    pause = KeyOrder.pause

    def passing(self: KeyOrder, item: KeyedEvent) -> None:
        pause(self, item)
        if queue := self._later[item.key]:
            self._free(queue.popleft())

    patch.setattr(KeyOrder, "pause", passing)


# ---------------------------------------------------------------------- what is remembered


def ancestors_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A successor does not know what is done in the partitions whose cursor it took."""
    patch.setattr(Graph, "ancestors", lambda self, partition: [])


def an_older_claim_is_accepted(patch: pytest.MonkeyPatch) -> None:
    """What a process does counts, although another one has claimed the partition since."""
    check = SimulatedDatabase.check_done

    def accepting(self: SimulatedDatabase, feed: Any, event: Any) -> None:
        current = self.readers.get((feed, event.partition), 0)
        check(self, feed, event._replace(claim=current))

    patch.setattr(SimulatedDatabase, "check_done", accepting)


def a_claim_waits_for_nobody(patch: pytest.MonkeyPatch) -> None:
    """Open transactions of the process before may still be committed after a claim."""

    async def at_once(self: StoreSession, rows: Any) -> None:
        pass

    patch.setattr(StoreSession, "_wait_for_doers", at_once)


def everything_is_forgotten_with_a_save(patch: pytest.MonkeyPatch) -> None:
    """A save of a cursor forgets also what is done behind it."""
    save = StoreSession.save

    async def forgetting(self: StoreSession, feed: Any, positions: Any, **how: Any) -> None:
        if how.get("passed"):
            how["passed"] = {p: set(self._database.done.get((feed, p), ())) for p in positions}
        await save(self, feed, positions, **how)

    patch.setattr(StoreSession, "save", forgetting)


def an_attempt_behind_a_commit(patch: pytest.MonkeyPatch) -> None:
    """An event is tried again, under another identity, although its transaction was committed."""

    async def unknown(self: DoneAhead, item: KeyedEvent, id: str) -> bool:
        item.work.ids[item.index] = f"{id}'"
        return False

    patch.setattr(DoneAhead, "_is_done", unknown)
