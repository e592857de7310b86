"""What the planner asks a driver to do."""

from __future__ import annotations

from dataclasses import dataclass

from feedapi_client.errors import FeedError
from feedapi_client.model import Position


@dataclass(frozen=True, slots=True)
class Save:
    """Save all of these in one atomic save before the next action is carried out."""

    positions: dict[int, Position]


@dataclass(frozen=True, slots=True)
class Start:
    """Read the partition from the cursor. If it is being read already, go on without a pause."""

    partition: int
    cursor: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop reading the partition and drop what was read and not delivered."""

    partition: int


@dataclass(frozen=True, slots=True)
class Rediscover:
    """Discover again soon, because the topology may have changed (R10)."""


@dataclass(frozen=True, slots=True)
class Report:
    """Report something to the operator. Nothing has failed."""

    partition: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The partition can't go on: raise the error, or report it and read the others (R18).

    The planner has parked the partition and its descendants before it returns this action.
    """

    partition: int
    error: FeedError


Action = Save | Start | Stop | Rediscover | Report | Fail
