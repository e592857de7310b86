"""The planner's state of one partition."""

from __future__ import annotations

import math
from dataclasses import dataclass

from feedapi_client.errors import FeedError
from feedapi_client.lineage.transitions import State
from feedapi_client.model import FIRST, Position

_RUNNING = (State.READING, State.CAUGHT_UP)  # here: to look up a member of an enum takes long


@dataclass(slots=True)
class Entry:
    """One partition. Only the planner writes its fields.

    Attributes:
        id: the partition.
        state: where it stands in the table of transitions.
        position: what is committed; None when nothing ever was.
        waits_for: the partitions that have to be drained or released before it can start.
        end: the cursor behind which a closed partition was seen to hold nothing.
        error: why it is parked.
        warned: whether it was reported that it can't go on by itself.
    """

    id: int
    state: State = State.WAITING
    position: Position | None = None
    waits_for: tuple[int, ...] = ()
    end: str | None = None
    error: FeedError | None = None
    warned: bool = False
    saved_at: float = 0
    """The moment at which `position` was saved by this instance, see `Ownership.moment`; infinite
    until the save is through."""

    def decide(self, position: Position) -> Position:
        """Take a position that is still to be saved, and return it."""
        self.position, self.saved_at = position, math.inf
        return position

    @property
    def cursor(self) -> str:
        """The cursor from which reading starts."""
        return self.position.cursor if self.position else FIRST

    @property
    def live(self) -> bool:
        """Whether it has a cursor that was not transferred to a successor yet."""
        return self.position is not None and self.position.status != "superseded"

    @property
    def running(self) -> bool:
        """Whether the driver reads it."""
        return self.state in _RUNNING
