"""What shows a process that a closed partition has ended (R6), and which ends were false ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

SETTLE_SECONDS = 10.0
"""For so long answers have to be empty, where no ``lastCursor`` says where a partition ends."""
ANSWERS = 3
"""So many of them there have to be."""


class Evidence:
    """What one process has read about the ends of partitions."""

    def __init__(self) -> None:
        self._closed: dict[int, float] = {}
        self.open_since: dict[int, float] = {}
        """Since when each discovery has listed a partition as open."""
        self._empty: Counter[int] = Counter()
        """Answers in a row that held nothing."""
        self._failed: dict[int | None, float] = {}
        """When a request of a partition, or a discovery (None), failed last."""
        self._shown: set[int] = set()
        """Whose last answer has shown an end, whatever failed since: its save may have to wait."""

    def listed(self, closed: Collection[int], now: float, others: Collection[int] = ()) -> None:
        """A discovery is sent that lists these partitions as closed, and others as open."""
        self.open_since = {id: self.open_since.get(id, now) for id in others}
        self._closed = {id: self._closed.get(id, now) for id in closed}
        self._shown &= self._closed.keys()

    def handshake(self, partitions: Collection[int], now: float) -> None:
        """A version without discovery has answered, in which these partitions are open."""
        self.open_since = {id: self.open_since.get(id, now) for id in partitions}

    def answered(self, partition: int, now: float, *, empty: bool) -> None:
        """A page was read to its end that holds nothing, or something."""
        self._empty[partition] = self._empty[partition] + 1 if empty else 0
        if not empty:
            self._shown.discard(partition)
        elif self._lacks(partition, now) is None:
            self._shown.add(partition)

    def failed(self, partition: int | None, now: float) -> None:
        """A request of a partition, or a discovery, has failed."""
        self._failed[partition] = now

    def lacks(self, partition: int, now: float) -> str | None:
        """Return what is missing for an end that only empty answers show; None if nothing is.

        `now` is when the save began: what fails while it is under way does not count.
        """
        return None if partition in self._shown else self._lacks(partition, now)

    def _lacks(self, partition: int, now: float) -> str | None:
        since, answers = self._closed.get(partition), self._empty[partition]
        if since is None:
            return "no discovery has listed it as closed"
        if now - since < SETTLE_SECONDS:
            return f"it was first listed as closed {now - since:.3f} s ago"
        if answers < ANSWERS:
            return f"{answers} empty answers were read"
        for what, whose in (("one of its requests", partition), ("a discovery", None)):
            seconds = now - self._failed.get(whose, float("-inf"))
            if 0 <= seconds < SETTLE_SECONDS:
                return f"{what} has failed {seconds:.3f} s ago"
        return None


class Gaps:
    """Events that were passed over at a false end, by lane. They may come late (R6)."""

    def __init__(self) -> None:
        self._missing: dict[object, set[int]] = {}

    @property
    def count(self) -> int:
        """How many have not come."""
        return sum(map(len, self._missing.values()))

    def copy(self) -> Gaps:
        """Return a copy."""
        copied = Gaps()
        copied._missing = {lane: set(numbers) for lane, numbers in self._missing.items()}
        return copied

    def add(self, lane: object, numbers: range) -> None:
        """These events were passed over."""
        self._missing.setdefault(lane, set()).update(numbers)

    def take(self, lane: object, n: int) -> bool:
        """An event came. Return whether it was missing."""
        missing = self._missing.get(lane)
        if missing is None or n not in missing:
            return False
        missing.discard(n)
        return True

    def __repr__(self) -> str:
        return ", ".join(f"{lane}: {sorted(left)}" for lane, left in self._missing.items() if left)
