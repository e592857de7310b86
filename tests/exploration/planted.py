"""Bugs to plant: what the product would do without one of its clauses.

Each is a context manager, because states that are read back run the code that is there then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from feedapi_client.lineage.planner import Planner
from feedapi_client.lineage.states import Save, State
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.planning import Planning
from tests.exploration.instance import Instance
from tests.exploration.world import World


@contextmanager
def _replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    with patch.object(owner, name, new):
        yield


def refused_end_keeps_its_place() -> Any:
    """A refused save of the planner leaves the partition where it was read to."""

    async def save(self: Planning, action: Save) -> None:
        from feedapi_client.errors import FencedError

        try:
            await self.positions.save(action.positions)
        except FencedError:
            assert self.sharing is not None
            self._todo.popleft()
            self.perform(self.planner.refused(action.positions))
        else:
            self._todo.popleft()

    return _replaced(Planning, "_save", save)


def nobody_checks_a_start() -> Any:
    """The same, without the invariant that is checked at each start."""

    @contextmanager
    def both() -> Iterator[None]:
        with refused_end_keeps_its_place(), _replaced(RuntimePartition, "follows", _always):
            yield

    return both()


def _always(self: RuntimePartition, cursor: str) -> bool:
    return True


def waiting_counts_as_finished() -> Any:
    """A successor whose ancestor nobody has leased yet counts as finished (without `follow`)."""

    def unfinished(self: Planner) -> bool:
        elsewhere = (e.id for e in self.entries.values() if e.state is State.ELSEWHERE)
        return any(p not in self._ended or self.is_closed(p) for p in elsewhere)

    return _replaced(Planner, "unfinished_elsewhere", unfinished)


def old_load_overwrites() -> Any:
    """An old load overwrites a newer position."""
    return _replaced(Planner, "_is_outdated", lambda self, entry, stored, began: False)


def refusal_does_not_outdate_a_load() -> Any:
    """Positions that were loaded before a save was refused count as what is stored."""

    def refresh(self: World, one: Instance, positions: Any, began: int) -> None:
        _refresh(self, one, positions, one.planner.begin_load())

    return _replaced(World, "_refresh", refresh)


def read_by_others_is_not_asked() -> Any:
    """The cursor of an ancestor without a position is decided although others read it."""

    def live(self: Planner, ancestor: int) -> bool:
        known = self.entries.get(ancestor)
        return self._shared and ancestor not in self._owned and known is not None and known.live

    return _replaced(Planner, "_is_others", live)


def refused_is_kept_after_a_stop() -> Any:
    """A partition that was refused stays so after it was stopped and started."""
    stop = RuntimePartition.stop

    def keeping(self: RuntimePartition) -> None:
        refused = self.trouble.refused
        stop(self)
        self.trouble.refused = refused

    return _replaced(RuntimePartition, "stop", keeping)


def leaving_still_owned() -> Any:
    """A partition that is being given away may still be read."""

    def refresh(self: World, one: Instance, positions: Any, began: int) -> None:
        leaving, one.leaving = one.leaving, set()
        _refresh(self, one, positions, began)
        one.leaving = leaving

    return _replaced(World, "_refresh", refresh)


_refresh = World._refresh


def epoch_is_not_compared() -> Any:
    """A lease is claimed although it was claimed since it was read."""

    def claim(self: World, one: Instance, partition: int, epoch: int) -> bool:
        return _claim(self, one, partition, self.leases.get(partition, (None, 0))[1] and epoch)

    def unchecked(self: World, one: Instance, partition: int, epoch: int) -> bool:
        owner, stored = self.leases.get(partition, (None, 0))
        if owner is None and stored != epoch:
            self.leases[partition] = (None, epoch)
        return claim(self, one, partition, epoch)

    return _replaced(World, "claim", unchecked)


_claim = World.claim


def no_lose_on_release() -> Any:
    """What was delivered is not given up with the lease."""

    def lose(self: Instance, partitions: set[int]) -> None:
        self.planning.carry_out_all(self.planner.revoke(partitions))
        for id in partitions:
            self.owned.pop(id, None)
            self.leaving.discard(id)

    return _replaced(Instance, "lose", lose)


def loaded_before_the_claim() -> Any:
    """The positions of newly claimed partitions are those that were loaded before the claim."""

    def load(self: World, one: Instance) -> None:
        assert one.view is not None
        one.loaded = one.view.positions

    return _replaced(World, "_load", load)


def superseded_is_revived() -> Any:
    """A superseded partition is read again as soon as it is listed."""

    def note_listed(self: Planner) -> Any:
        for entry in self.entries.values():
            listed = self.graph.partitions.get(entry.id)
            listed_open = listed is not None and not listed.closed
            if entry.state is State.SUPERSEDED and listed_open and entry.position is not None:
                entry.position = replace(entry.position, status="open")
                self._change(entry, State.WAITING)
        return _note_listed(self)

    return _replaced(Planner, "_note_listed", note_listed)


_note_listed = Planner._note_listed


def rollback_is_no_problem() -> Any:
    """A superseded partition that is listed as open again does not keep a consumer from ending."""
    return _replaced(Planner, "listed_again", lambda self: {})


def successors_keep_their_cursors() -> Any:
    """After a rollback the successors are not given the cursor of their ancestor again."""

    def is_heir(self: Planner, partition: int) -> bool:
        return self.entries[partition].position is None and _is_heir(self, partition)

    return _replaced(Planner, "_is_heir", is_heir)


_is_heir = Planner._is_heir


PLANTED: dict[str, Callable[[], Any]] = {
    bug.__name__: bug
    for bug in (
        refused_end_keeps_its_place,
        nobody_checks_a_start,
        waiting_counts_as_finished,
        old_load_overwrites,
        refusal_does_not_outdate_a_load,
        read_by_others_is_not_asked,
        refused_is_kept_after_a_stop,
        leaving_still_owned,
        epoch_is_not_compared,
        no_lose_on_release,
        loaded_before_the_claim,
        superseded_is_revived,
        rollback_is_no_problem,
        successors_keep_their_cursors,
    )
}
"""The bugs by name."""
