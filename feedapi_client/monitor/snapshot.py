"""What a monitor shows of a consumer at one moment, and how it gets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from feedapi_client.consumer import FeedConsumer
from feedapi_client.model import Partition
from feedapi_client.status import ConsumerStatus, Health, Problem

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One consumer at one moment."""

    time: datetime
    name: str
    status: ConsumerStatus
    health: Health
    topology: Mapping[int, Partition]


@dataclass(frozen=True, slots=True)
class Observation:
    """All consumers of a monitor, and what is wrong with the event loop that they run in.

    With a blocked event loop the snapshots are the last ones that could be taken.
    """

    snapshots: Sequence[Snapshot]
    blocked: Problem | None = None
    live: bool = True
    """False once the event loop has been blocked for longer than `Limits.stall_timeout`."""


def take(consumers: Sequence[FeedConsumer]) -> list[Snapshot]:
    """Return a snapshot of each consumer. To be called in their event loop."""
    return [
        Snapshot(
            datetime.now(UTC),
            consumer.key.name,
            consumer.status(),
            consumer.health(),
            consumer.topology(),
        )
        for consumer in consumers
    ]


class Source(Protocol):
    """Gives access to consumers from where the monitor runs."""

    async def observe(self) -> Observation:
        """Return snapshots that are at most half a second old."""
        ...

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a function, or coroutine function, called in their event loop.

        Raises TimeoutError when that takes too long.
        """
        ...
