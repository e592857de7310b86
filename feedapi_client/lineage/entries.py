"""The entries of a planner: one for each partition, with the states counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from feedapi_client.errors import FeedError
from feedapi_client.lineage.entry import Entry
from feedapi_client.lineage.transitions import State, check_transition
from feedapi_client.model import Position

STORED_STATE = {"drained": State.DRAINED, "superseded": State.SUPERSEDED}
"""The states that a stored position has by itself."""


class Entries:
    """What is known of each partition, and who waits for whom.

    Attributes:
        all: the entries. Only the planner changes them.
        counts: how many are in each state.
    """

    def __init__(self) -> None:
        self.all: dict[int, Entry] = {}
        self.counts: Counter[State] = Counter()
        self._waiters: dict[int, set[int]] = defaultdict(set)

    def __repr__(self) -> str:
        return ", ".join(f"{n} {state}" for state, n in self.counts.items() if n)

    def __getitem__(self, partition: int) -> Entry:
        """Return the entry of a partition. A new one waits."""
        if partition not in self.all:
            self.all[partition] = Entry(partition)
            self.counts[State.WAITING] += 1
        return self.all[partition]

    def add(self, partition: int, position: Position) -> None:
        """Take a stored position, or one to be stored."""
        entry = self[partition]
        entry.position = position
        self.move(entry, STORED_STATE.get(position.status, State.WAITING))

    def move(self, entry: Entry, state: State) -> None:
        """Change the state of a partition; the only place where that happens."""
        if state is entry.state:
            return
        check_transition(entry.id, entry.state, state)
        self.counts[entry.state] -= 1
        self.counts[state] += 1
        entry.state = state

    def wait_for(self, entry: Entry, blockers: tuple[int, ...]) -> None:
        """Note what a partition waits for."""
        entry.waits_for = blockers
        for blocker in blockers:
            self._waiters[blocker].add(entry.id)

    def waiting_for(self, entry: Entry) -> list[int]:
        """Return the partitions that wait for this one."""
        waiters = self._waiters.get(entry.id, ())
        return [id for id in waiters if self.all[id].state is State.WAITING]

    def take_waiters(self, entry: Entry) -> list[int]:
        """Return the partitions that have waited for this one, sorted, and forget them."""
        return sorted(self._waiters.pop(entry.id, ()))

    def parked(self, partitions: Iterable[int]) -> FeedError | None:
        """Return the error of the first of these partitions that is parked."""
        parked = (p for p in partitions if self.all[p].state is State.PARKED)
        return next((self.all[p].error for p in parked), None)
