"""`Share.on_assigned` and `Share.on_release`: the application prepares, and lets go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Set

import anyio
from anyio.abc import TaskGroup

from feedapi_client.causes import failure_of
from feedapi_client.options import Share
from feedapi_client.runtime.iteration import Iteration

log = logging.getLogger(__name__)


class Callbacks:
    """In tasks of their own, so that no lease waits for them. `changed`: a function returned."""

    def __init__(self, share: Share, iteration: Iteration, changed: Callable[[], object]) -> None:
        self._share = share
        self._iteration = iteration
        self._changed = changed
        self._tasks: TaskGroup | None = None
        self._assigning: dict[int, frozenset[int]] = {}
        """With what `on_assigned` was called last, of those for which it has not returned."""
        self._told: set[int] = set()
        """`on_assigned` was called, and `on_release` was not."""
        self._releasing: set[int] = set()

    @property
    def arriving(self) -> Set[int]:
        """Partitions not read yet: `on_assigned` has not returned since they were last claimed."""
        return self._assigning.keys()

    def use(self, tasks: TaskGroup) -> None:
        self._tasks = tasks

    def assign(self, partitions: Collection[int]) -> None:
        if self._share.on_release is not None:
            self._told.update(partitions)
        if self._share.on_assigned is not None and self._tasks is not None:
            call = frozenset(partitions)
            self._assigning |= dict.fromkeys(call, call)
            self._tasks.start_soon(self._assign, call)

    async def _assign(self, partitions: frozenset[int]) -> None:
        assert self._share.on_assigned is not None
        try:
            await self._share.on_assigned(partitions)
        except BaseException as error:  # noqa: BLE001 - the application's, raised by its iteration
            self._iteration.fail(failure_of(error, "on_assigned", own_task=True))
            return
        # One that was lost and claimed again meanwhile waits for the later call.
        self._assigning = {p: call for p, call in self._assigning.items() if call is not partitions}
        self._changed()

    def is_over(self, partition: int) -> bool:
        """Whether the application has let go of the partition, so that it can be given away."""
        pending = (self.arriving, self._told, self._releasing)
        return not any(partition in those for those in pending)

    def release(self, partitions: Collection[int]) -> None:
        told = frozenset(self._told.intersection(partitions) - self.arriving)
        if told and self._tasks is not None:
            self._told -= told
            self._releasing |= told
            self._tasks.start_soon(self._release, told)

    async def _release(self, partitions: frozenset[int]) -> None:
        assert self._share.on_release is not None
        seconds = self._share.handover_seconds
        scope = anyio.move_on_after(seconds)
        try:
            with scope:
                await self._share.on_release(partitions)
        except BaseException as error:
            failed = failure_of(error, "on_release", own_task=True)
            log.exception("feed %s: on_release failed", self._iteration.feed)
            self._iteration.report(None, f"on_release failed with {type(failed).__name__}")
        if scope.cancelled_caught:
            self._iteration.report(None, f"on_release has not returned within {seconds:g} s")
        self._releasing -= partitions
        self._changed()

    def forget(self, partitions: Collection[int]) -> None:
        for partition in partitions:
            self._assigning.pop(partition, None)
        self.release(partitions)

    async def leave(self) -> None:
        """Call `on_release` with all that is left, at the end. It is not cancelled meanwhile."""
        left = frozenset(self._told | self._releasing)
        self._told.clear()
        if left:
            with anyio.CancelScope(shield=True):
                await self._release(left)
