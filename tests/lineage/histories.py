"""Histories of a planner as text: each step with what it leads to.

    r06_the_last_cursor_of_a_closed_partition_drains_it
      list 0!z 1<0 -> save 0 1; start 0 | 0R 1W(0)
      commit 0 z -> stop 0; drained 0@z; start 1; discover

Steps are parted by ``/`` or stand on lines of their own; deeper lines go on. Behind ``->`` stands
all that a step returns or raises, behind ``|`` the state of each partition, with what it waits for
or whose error parks it. A text need only hold what follows each ``~``. Listed are ``0``, closed
``0!``, with a last cursor ``0!z`` or ``0^z``, a child ``1<0``, a successor ``2<<1,0``. A
position is ``0@z:drained#3``: at the first event, open and of revision 1 unless it says more.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator
from typing import Any

from feedapi_client import FeedError, FeedInfo, Partition, Position, ProtocolError
from feedapi_client.lineage.planner import Planner
from feedapi_client.lineage.states import (
    Action,
    Drained,
    Entry,
    Fail,
    Rediscover,
    Report,
    Save,
    Start,
    State,
    Stop,
)
from feedapi_client.model import FIRST

_LETTERS = dict(zip(State, "WRCDSVPE", strict=True))
_LISTED = re.compile(r"(\d+)(?:([!^])(\w*))?(?:<(\d+))?(?:<<([\d,]+))?")
_STORED = re.compile(r"(\d+)(?:@(\w+))?(?::(\w+))?(?:#(\d+))?")
_OF_MANY = ("revoke", "refused")  # their partitions are one argument


def parsed(text: str) -> dict[str, list[str]]:
    """Return the steps of each history by its name."""
    rows: dict[str, list[str]] = {}
    name = ""
    for line in re.sub(r"\n {4,}", " ", text).splitlines():
        if line.startswith("  "):
            rows[name] += [step.strip() for step in line.split(" / ")]
        elif line and not line.startswith("#"):
            name = line
            assert rows.setdefault(name, []) == [], f"two histories are called {name}"
    return rows


def _groups(pattern: re.Pattern[str], word: str) -> tuple[Any, ...]:
    match = pattern.fullmatch(word)
    assert match, f"no partition, or no position: {word}"
    return match.groups()


def _listed(words: tuple[str, ...], dialect: Any = "v2-draft") -> FeedInfo:
    listed = {}
    for word in words:
        id, closed, last, parent, ancestors = _groups(_LISTED, word)
        above = tuple(map(int, ancestors.split(","))) if ancestors else ()
        after = int(parent) if parent else None
        listed[int(id)] = Partition(int(id), closed == "!", last or None, after, above)
    return FeedInfo(dialect, listed)


def _stored(words: tuple[str, ...]) -> dict[int, Position]:
    found = (_groups(_STORED, word) for word in words)
    return {int(p): Position(at or FIRST, s or "open", int(n or 1)) for p, at, s, n in found}


def _place(id: int, cursor: str) -> str:
    return str(id) if cursor == FIRST else f"{id}@{cursor}"


def _position(id: int, at: Position) -> str:
    status = "" if at.status == "open" else f":{at.status}"
    return _place(id, at.cursor) + status + (f"#{at.revision}" if at.revision > 1 else "")


def _action(action: Action) -> str:
    match action:
        case Save(positions):
            return " ".join(["save", *(_position(*each) for each in sorted(positions.items()))])
        case Start(id, cursor):
            return f"start {_place(id, cursor)}"
        case Stop(id):
            return f"stop {id}"
        case Drained(id, cursor):
            return f"drained {_place(id, cursor)}"
        case Rediscover():
            return "discover"
        case Report(id, text):
            return f"report {'feed' if id is None else id} {text}"
        case Fail(id, error):
            return f"fail {id} {type(error).__name__} {error}"


def _state(entry: Entry) -> str:
    parked_by = entry.error.partition if entry.error else None
    because = entry.waits_for if parked_by in (None, entry.id) else (parked_by,)
    shown = f"({','.join(map(str, because))})" if because else ""
    return f"{entry.id}{_LETTERS[entry.state]}{shown}"


def _is_told(found: str, expected: str) -> bool:
    begin, *parts = (part.strip() for part in expected.split("~"))
    exact = not parts and not begin.endswith("Error")
    return found == begin if exact else found.startswith(begin) and all(p in found for p in parts)


class History:
    """A planner, what is stored, and what a driver remembers."""

    def __init__(self) -> None:
        self.store: dict[int, Position] = {}
        self.changed = False  # by somebody else
        self.slow = False  # no save comes to its end
        self.options: dict[str, Any] = {}
        self.taken: dict[int, Position] = {}  # checkpoints that are still to be saved
        self.loads: dict[str, tuple[int, dict[int, Position]]] = {}
        self.do_restart()

    def run(self, steps: list[str]) -> None:
        """Take the steps, and fail at the first that leads to anything else."""
        for step in steps:
            told, _, states = step.partition("|")
            asked, arrow, outcome = told.partition("->")
            before, raised = (self.states(), self.planner.graph), False
            try:
                found = list(self._told(self._do(*asked.split())))
            except (FeedError, ValueError) as error:
                found, raised = [f"{type(error).__name__} {error}"], True
                assert before == (self.states(), self.planner.graph), f"changed: {step}"
            said = f"{step}\n  found: {'; '.join(found)} | {self.states()}"
            expected = [each.strip() for each in outcome.split(";") if each.strip()]
            same = len(expected) == len(found) and all(map(_is_told, found, expected))
            assert same if arrow else not raised, said
            assert states.strip() in ("", self.states()), said
            for entry in self.planner.entries.values():
                assert self.planner._desired(entry)[0] is entry.state, f"not settled: {step}"

    def states(self) -> str:
        return " ".join(_state(entry) for _, entry in sorted(self.planner.entries.items()))

    def _do(self, verb: str, *words: str) -> Any:
        given = dict(word.split("=") for word in words if "=" in word)
        options = {name: literal_eval(value) for name, value in given.items()}
        plain = [word for word in words if "=" not in word]
        if own := getattr(self, f"do_{verb}", None):
            return own(*plain, **options)
        result = getattr(self.planner, verb)
        if callable(result):
            ids = [int(word) for word in plain]
            result = result(ids) if verb in _OF_MANY else result(*ids)
        return result

    def _told(self, result: Any) -> Iterator[str]:
        if isinstance(result, dict):
            result = [f"{id} {text}" for id, text in result.items()]
        for one in result if isinstance(result, list | set) else [result]:
            if isinstance(one, Save):
                fits = self._save(one.positions)
                assert fits or self.changed, f"replaces what is not stored yet: {_action(one)}"
                if fits and not self.slow:
                    self.planner.saved(one.positions)
            if isinstance(one, tuple):
                yield ",".join(map(str, one))
            elif one is not None:
                yield _action(one) if isinstance(one, Action) else str(one)

    def _save(self, positions: dict[int, Position]) -> bool:
        """Save all or nothing, as a store does."""
        found = {id: at.revision for id, at in self.store.items() if id in positions}
        fits = all(at.replaces == found.get(id) for id, at in positions.items())
        self.store |= positions if fits else {}
        return fits

    def do_given(self, *words: str, **options: Any) -> None:
        self.store, self.options, self.changed = _stored(words), options, False
        self.do_restart()

    def do_restart(self) -> None:
        self.planner = Planner(feed="http://feed", **self.options)
        self.planner.load(self.store)

    def do_stored(self, *words: str) -> None:
        """Another instance has saved these."""
        self.changed = True
        self.store |= _stored(words)

    def do_slow(self) -> None:
        self.slow = True

    def do_gone(self, id: str) -> None:
        del self.store[int(id)]
        self.changed = True

    def do_load(self, name: str) -> None:
        self.loads[name] = self.planner.begin_load(), dict(self.store)

    def do_answer(self, name: str) -> None:
        """The store answers an earlier load only now."""
        self.loads[name] = self.loads[name][0], dict(self.store)

    def do_list(self, *words: str, began: str = "", **options: Any) -> list[Action]:
        info = _listed(words, options.pop("dialect", "v2-draft"))
        moment = self.loads[began][0] if began else None
        return self.planner.discover(info, began=moment, **options)

    def do_unresolved(self, *words: str) -> list[int]:
        return self.planner.unresolved(_listed(words))

    def do_checkpoint(self, id: str, cursor: str, later: str = "") -> str:
        p = int(id)
        after = self.taken[p] if later else None
        self.taken[p] = self.planner.checkpoint(p, cursor, after=after)
        return _position(p, self.taken[p])

    def do_committed(self, id: str) -> None:
        p = int(id)
        self._save({p: self.taken[p]})
        self.planner.committed(p, self.taken[p])

    def do_release(self, id: str, cursor: str = "") -> list[Action]:
        if cursor:
            self.do_checkpoint(id, cursor)
        if position := self.taken.pop(int(id), None):
            self._save({int(id): position})
        return self.planner.released(int(id), position)

    def do_commit(self, id: str, cursor: str) -> list[Action]:
        self.planner.delivered(int(id))
        return self.do_release(id, cursor)

    def do_end(self, id: str, cursor: str, closed: str = "") -> list[Action]:
        return self.planner.ended(int(id), cursor, asked_closed=bool(closed))

    def do_fail(self, id: str) -> list[Action]:
        return self.planner.fail(int(id), ProtocolError("broken", partition=int(id)))

    def do_refresh(self, began: str = "", looked: str = "", **leases: Any) -> list[Action]:
        moment, positions = self.loads.get(began) or (self.planner.begin_load(), self.store)
        seen = self.loads[looked][0] if looked else None
        return self.planner.refresh(positions, began=moment, looked=seen, **leases)

    def do_overtaken(self, name: str) -> set[int]:
        moment, positions = self.loads[name]
        return self.planner.overtaken(positions, moment)
