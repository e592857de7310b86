"""The states of a partition, the legal moves as data, and what a driver is asked for.

`move_entry` is the only way from one state to another. The documentation draws `TRANSITIONS`.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

import msgspec

from feedapi_client.errors import FeedError
from feedapi_client.model import FIRST, Position, Status


class State(StrEnum):  # every partition begins as `WAITING`
    WAITING = "waiting"
    READING = "reading"
    CAUGHT_UP = "caught up"
    DRAINED = "drained"
    SUPERSEDED = "superseded"
    VANISHED = "vanished"
    PARKED = "parked"
    ELSEWHERE = "elsewhere"


_W, _R, _C, _D, _S, _V, _P, _E = State
_LISTED = "listed, and every partition it waits for is drained"
_GONE, _TRANSFERRED = "no longer listed", "its cursor is transferred to its successors"
_BROKEN = "an error that no retry mends"
_LOST = "a partition it descends from is parked, or its lineage is lost or ambiguous"
_LEASE, _LATE = "its lease is given away or lost", "listed as its successor only after it began"
_OPEN, _STORED = "listed as open again", "stored as drained by another instance"
_LOSES = f"{_OPEN}, and its lineage is lost, or what it waits for is parked"
_RESTORED = "its cursor was moved back to it"
TRANSITIONS: tuple[tuple[State, State, str, str], ...] = (
    (_W, _R, _LISTED, "R4 R8"),
    (_W, _D, "stored as drained, or closed at a first start at the end", "R6 R7"),
    (_W, _S, "stored as superseded, or its cursor is transferred before it was started", "R7 R9"),
    (_W, _V, _GONE, "R11"),
    (_W, _P, _LOST, "R8 R9 R18"),
    (_W, _E, "could be read, and this instance has no lease of it", "R17"),
    (_R, _C, "open, and a complete response held no event and no new cursor", "R6 R15"),
    (_R, _D, "closed, and the committed cursor is its end", "R6"),
    (_R, _S, _TRANSFERRED, "R9"),
    (_R, _V, _GONE, "R11"),
    (_R, _P, _BROKEN, "R18"),
    (_R, _E, _LEASE, "R17"),
    (_R, _W, _LATE, "R9"),
    (_C, _R, "the next event came, or it was closed and is asked once more", "R6 R15"),
    (_C, _D, "closed, and the committed cursor is its end", "R6"),
    (_C, _S, _TRANSFERRED, "R9"),
    (_C, _V, _GONE, "R11"),
    (_C, _P, _BROKEN, "R18"),
    (_C, _E, _LEASE, "R17"),
    (_C, _W, _LATE, "R9"),
    (_D, _R, f"{_OPEN}, or an event came late behind the end that empty answers showed", "R6"),
    (_D, _W, f"{_OPEN}, and its parent is not drained any more", "R4 R8"),
    (_D, _S, _TRANSFERRED, "R9"),
    (_D, _V, "opened again by another instance, and no longer listed", "R11"),
    (_D, _P, _LOSES, "R8 R18"),
    (_D, _E, f"{_OPEN}, an event came late, or the save of its end was refused", "R6 R17"),
    (_S, _W, "its cursor was moved back to an ancestor, which is split again", "R9 R11"),
    (_S, _R, _RESTORED, "R11"),
    (_S, _D, f"{_RESTORED}, and another instance has read it to its end", "R6 R11"),
    (_S, _V, f"{_RESTORED}, and it is no longer listed", "R11"),
    (_S, _P, "it is to begin once more, and its lineage is lost or ambiguous", "R9 R11"),
    (_S, _E, "another instance had changed it when its cursor was transferred", "R9 R17"),
    (_V, _R, "listed again", "R11"),
    (_V, _W, "listed again, and it has to wait for another partition", "R8 R11"),
    (_V, _D, _STORED, "R6"),
    (_V, _S, _TRANSFERRED, "R9"),
    (_V, _P, f"{_BROKEN}, or its lineage is lost or ambiguous", "R8 R9 R18"),
    (_V, _E, "listed again, and this instance has no lease of it", "R11 R17"),
    (_E, _R, "its lease was claimed, and its position read from the store", "R17"),
    (_E, _W, "it has to wait for another partition", "R4 R8"),
    (_E, _D, _STORED, "R6"),
    (_E, _S, f"{_TRANSFERRED}, by whichever instance", "R9"),
    (_E, _V, _GONE, "R11"),
    (_E, _P, _LOST, "R8 R9 R18"),
)
"""Every legal move: from, to, what makes it happen, and the rules that demand it."""
_LEGAL = frozenset((source, target) for source, target, _, _ in TRANSITIONS)


class Entry(msgspec.Struct):
    """What is known of one partition. Only the planner writes its fields."""

    id: int
    state: State = State.WAITING
    position: Position | None = None  # what is committed
    stored: bool = False  # the store is known to have had a position of it
    saved_at: float = 0  # the moment at which `position` was saved here; infinite until it is
    loaded_at: int = 0  # the moment at which `position`, saved by another instance, was found
    reopened: bool = False  # it was drained, and is to show its end anew; nothing committed since
    finished: bool = False  # it was drained when its cursor was transferred
    gone: int = 0  # how many discoveries in a row did not list it, up to 2
    caught_up: bool = False  # an open partition was read to its present end
    end: str | None = None  # the cursor behind which the closed one was seen to hold nothing
    error: FeedError | None = None  # why it is parked
    waits_for: tuple[int, ...] = ()  # what has to be drained or released before it can start
    warned: bool = False  # it was reported that it can't go on by itself

    @property
    def cursor(self) -> str:
        return self.position.cursor if self.position else FIRST

    @property
    def status(self) -> Status | None:
        return self.position.status if self.position else None

    @property
    def live(self) -> bool:
        """Whether it has a cursor that was not transferred to a successor yet."""
        return self.status in ("open", "drained")

    @property
    def running(self) -> bool:
        return self.state is _R or self.state is _C


def move_entry(entry: Entry, state: State) -> None:
    """Raise `RuntimeError` where it is illegal: a defect of ours that no retry may hide."""
    if (entry.state, state) not in _LEGAL:
        move = f"partition {entry.id} must not go from '{entry.state}' to '{state}'"
        raise RuntimeError(f"internal error: {move}. Please report it")
    entry.state = state


class Save(msgspec.Struct, frozen=True):  # all in one save, before the next action is carried out
    positions: dict[int, Position]
    unchanged: Collection[int] = ()  # but for their revisions, which are to be compared (R17)


class Start(
    msgspec.Struct, frozen=True
):  # from the cursor; what is being read goes on without a pause
    partition: int
    cursor: str


class Stop(msgspec.Struct, frozen=True):  # and drop what was read and not delivered
    partition: int


class Drained(
    msgspec.Struct, frozen=True
):  # its end is stored: tell it, unless the save before was refused
    partition: int
    cursor: str


class Rediscover(msgspec.Struct, frozen=True): ...  # soon: the topology may have changed (R10)


class Report(msgspec.Struct, frozen=True):  # to the operator; nothing has failed
    partition: int | None
    text: str


class Fail(
    msgspec.Struct, frozen=True
):  # raise the error, or report it and go on (R18): it is parked already
    partition: int
    error: FeedError


Action = Save | Start | Stop | Drained | Rediscover | Report | Fail
