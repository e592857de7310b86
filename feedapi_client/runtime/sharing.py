"""What the runtime asks of the part that shares a feed between instances."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from feedapi_client.lineage.states import Action
from feedapi_client.model import Position

Load = Callable[[], Awaitable[Mapping[int, Position]]]
Begin = Callable[[Mapping[int, Position]], Awaitable[None]]


class Sharing(Protocol):
    """Claims and gives away partitions, see `feedapi_client.sharing.coordinator`."""

    async def first_start(self, load: Load, begin: Begin) -> None:
        """Await `begin` with the stored positions; with none if this is the one to bootstrap.

        Only one instance at a time bootstraps. The others wait for what it saves.
        """

    async def run(self) -> None:
        """Keep the leases until cancelled."""

    async def leave(self) -> None:
        """Release all leases. Never raises."""

    async def reload(self) -> list[Action]:
        """Load the positions that others have saved. Return the planner's actions."""
        ...

    def suspect(self) -> None:
        """A save was refused: look at the leases again."""

    def released(self, partition: int) -> None:
        """A batch of the partition is not in flight any more."""

    def nudge(self) -> None:
        """The partitions that can be read may have changed."""

    def owner(self, partition: int) -> str | None:
        """Return the instance that reads a partition, as far as is known."""
