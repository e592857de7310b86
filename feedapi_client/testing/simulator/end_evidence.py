"""What shows a process that a closed partition has ended (R6), and which ends were false ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

SETTLE_SECONDS = 10.0
"""For so long answers have to be empty, where no ``lastCursor`` says where a partition ends."""
ANSWERS = 3
"""So many of them there have to be."""


@dataclass(slots=True)
class _Answers:
    """The answers of one partition."""

    asked: int = 0
    """The furthest place from which it was asked."""
    empty: int = 0
    """Answers in a row that held nothing."""
    since: float = 0.0
    """When the first of them was read."""
    controlled: bool = False
    """Whether events were brought since the last of them, from a place that was read before."""
    sure: int = 0
    """How many of them were the last, with that between each two."""


class Evidence:
    """What one process has read about the ends of partitions."""

    def __init__(self) -> None:
        self._closed: dict[int, float] = {}
        self.open_since: dict[int, float] = {}
        """Since when each discovery has listed a partition as open."""
        self._answers: defaultdict[int, _Answers] = defaultdict(_Answers)

    def listed(self, closed: Collection[int], now: float, others: Collection[int] = ()) -> None:
        """A discovery is sent that lists these partitions as closed, and others as open."""
        self.open_since = {id: self.open_since.get(id, now) for id in others}
        self._closed = {id: self._closed.get(id, now) for id in closed}

    def asked(self, partition: int, place: int, *, empty: bool) -> None:
        """A page is sent, of what is behind a place, that holds nothing, or something."""
        answers = self._answers[partition]
        if not empty and place < answers.asked:
            answers.controlled = True

    def answered(self, partition: int, place: int, *, empty: bool, now: float) -> None:
        """Such a page was read to its end."""
        answers = self._answers[partition]
        if empty:
            answers.sure = answers.sure + 1 if answers.empty and answers.controlled else 1
            answers.since = answers.since if answers.empty else now
            answers.empty += 1
            answers.controlled = False
        elif place >= answers.asked:
            answers.empty = 0
        answers.asked = max(answers.asked, place)

    def lacks(self, partition: int, now: float) -> str | None:
        """Return what is missing for an end that only empty answers show; None if nothing is."""
        since, answers = self._closed.get(partition), self._answers[partition]
        if since is None:
            return "no discovery has listed it as closed"
        if now - since < SETTLE_SECONDS:
            return f"it was first listed as closed {now - since:.3f} s ago"
        if answers.empty < ANSWERS:
            return f"{answers.empty} empty answers were read"
        if now - answers.since < SETTLE_SECONDS and answers.sure < ANSWERS:
            return f"all answers may have been of one gateway, within {now - answers.since:.3f} s"
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
