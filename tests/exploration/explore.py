"""Breadth first through all states that a world can reach."""

from __future__ import annotations

import pickle
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import patch

from feedapi_client.model import Position
from feedapi_client.testing.contracts.cursors import following
from tests.exploration.instance import BrokenInvariantError
from tests.exploration.world import FAULTS, Move, World


@dataclass
class Found:
    """What an exploration came to.

    Attributes:
        states: how many there are, those that behave alike counted once.
        transitions: how many moves were made.
        depth: of the longest shortest history.
        complete: whether all states were reached.
        violation: what must not happen, and did; None if nothing.
        history: the moves that lead there, the shortest there are.
    """

    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    complete: bool = False
    violation: str | None = None
    history: list[Move] = field(default_factory=list)

    def __str__(self) -> str:
        how = "all" if self.complete else "the first"
        text = (
            f"{how} {self.states} states, {self.transitions} transitions, depth {self.depth}, "
            f"{self.seconds:.1f} s"
        )
        if self.violation is None:
            return text
        steps = "".join(f"\n  {move}" for move in self.history)
        return f"{text}\nVIOLATED: {self.violation}{steps}"


class Exploration:
    """The states that were seen, and how each was reached."""

    def __init__(self, world: World, *, most: int = 10**9) -> None:
        self._first = world.copy()
        self._most = most
        self._seen: dict[int, int] = {}
        self._parents = array("l")
        self._moves: list[Move] = []
        self._reached = bytearray()
        self._expanded = 0
        # Where a state can be left without a failure: what is not in here has to be reached.
        self._sources, self._targets = array("l"), array("l")
        self.found = Found()

    def run(self, advance: Callable[[int], object] = lambda states: None) -> Found:
        """Explore. The first violation ends it.

        Revisions follow from the cursors: what was drawn would make any two states different.
        """
        with patch.object(Position, "after", following):
            return self._run(advance)

    def _run(self, advance: Callable[[int], object]) -> Found:
        began, found = time.perf_counter(), self.found
        level = [(self._add(pickle.loads(self._first), -1, Move("begin")), self._first)]
        try:
            while level and len(self._seen) < self._most:
                later: list[tuple[int, bytes]] = []
                for number, state in level:
                    if len(self._seen) >= self._most:
                        break
                    later += self._expand(number, state)
                    self._expanded = number + 1
                level, found.depth = later, found.depth + bool(later)
                advance(len(self._seen))
            found.complete = not level
            self._find_dead_end()
        except _Ended as ended:
            found.violation, found.history = str(ended), self._history(ended.number, ended.move)
        found.states, found.seconds = len(self._seen), time.perf_counter() - began
        return found

    def _add(self, world: World, parent: int, move: Move) -> int:
        number = len(self._seen)
        self._seen[world.key()] = number
        self._parents.append(parent)
        self._moves.append(move)
        self._reached.append(world.reached())
        return number

    def _expand(self, number: int, state: bytes) -> list[tuple[int, bytes]]:
        new = []
        for move in list(pickle.loads(state).moves()):
            world: World = pickle.loads(state)
            self.found.transitions += 1
            goes_on = _goes_on(world, move)
            try:
                world.make(move)
            except BrokenInvariantError as violation:
                raise _Ended(str(violation), number, move) from violation
            except Exception as error:
                raise _Ended(f"{type(error).__name__}: {error}", number, move) from error
            target = self._seen.get(world.key())
            if target is None:
                target = self._add(world, number, move)
                new.append((target, world.copy()))
            if goes_on and target != number:
                self._sources.append(number)
                self._targets.append(target)
        return new

    def _find_dead_end(self) -> None:
        """Raise for a state from which the events can't all be handled any more.

        By moves that are no failures. Of a state that was not looked at nothing is known.
        """
        before: dict[int, list[int]] = {}
        for source, target in zip(self._sources, self._targets, strict=True):
            before.setdefault(target, []).append(source)
        waiting = [n for n, reached in enumerate(self._reached) if reached]
        waiting += range(self._expanded, len(self._seen))
        alive = bytearray(len(self._seen))
        for number in waiting:
            alive[number] = 1
        while waiting:
            for source in before.get(waiting.pop(), ()):
                if not alive[source]:
                    alive[source] = 1
                    waiting.append(source)
        dead = alive.find(0)
        if dead >= 0:
            text = "from here on the events can't all be handled: it waits for ever"
            raise _Ended(text, self._parents[dead], self._moves[dead])

    def _history(self, number: int, last: Move) -> list[Move]:
        moves = [last]
        while number > 0:
            moves.append(self._moves[number])
            number = self._parents[number]
        return moves[::-1]


class _Ended(Exception):  # noqa: N818
    def __init__(self, text: str, number: int, move: Move) -> None:
        super().__init__(text)
        self.number = number
        self.move = move


def _goes_on(world: World, move: Move) -> bool:
    """Whether the move comes by itself, in time."""
    if move.name == "publish":
        return world.version in world.feed.rolled_back
    return move.name not in FAULTS
