"""Bugs of instances that share a feed: leases, hand-overs, and the positions that others save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import anyio
import pytest

from feedapi_client.lineage.planner import Planner
from feedapi_client.model import Position
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.planning import Planning
from feedapi_client.sharing.coordinator import Coordinator
from feedapi_client.stores.leases import Lease
from tests.simulation.store import SimulatedDatabase


def an_old_load_overwrites_a_newer_position(patch: pytest.MonkeyPatch) -> None:
    """Positions that were loaded before a save replace what the save has stored."""
    patch.setattr(Planner, "_is_outdated", lambda *args: False)


def what_others_read_is_transferred(patch: pytest.MonkeyPatch) -> None:
    """A successor does not wait for an ancestor that another instance reads."""

    def live(self: Planner, ancestor: int) -> bool:
        known = self.entries.get(ancestor)
        return self._shared and ancestor not in self._owned and known is not None and known.live

    patch.setattr(Planner, "_is_others", live)


def events_are_delivered_after_a_stop(patch: pytest.MonkeyPatch) -> None:
    """What a partition holds is delivered, also when it was stopped meanwhile.

    Neither does the stop drop it, nor does the delivery look: each of the two alone is enough.
    """
    drop = RuntimePartition.stop

    def stop(self: RuntimePartition) -> None:
        pending, announced = list(self.pending), self.announced
        size = self.pending_bytes, self.pending_size
        self.pending.clear()
        self.pending_bytes = 0
        drop(self)
        self.pending.extend(pending)
        self.pending_bytes, self.pending_size = size
        self.announced = announced

    def next_ready(
        self: Planning, fits: Callable[[RuntimePartition], bool] | None = None
    ) -> RuntimePartition | None:
        while self._ready:
            partition = self._ready[0]
            deliverable = partition.announced and not partition.in_flight
            if deliverable and fits is not None and not fits(partition):
                return None
            self._ready.popleft()
            partition.queued = False
            if deliverable:
                return partition
        return None

    patch.setattr(RuntimePartition, "stop", stop)
    patch.setattr(Planning, "next_ready", next_ready)


def refused_is_kept_after_a_stop(patch: pytest.MonkeyPatch) -> None:
    """A partition that was refused and given away awaits a discovery when it comes back."""
    stop = RuntimePartition.stop

    def keeping(self: RuntimePartition) -> None:
        refused = self.trouble.refused
        stop(self)
        self.trouble.refused = refused

    patch.setattr(RuntimePartition, "stop", keeping)


def leaving_partitions_are_still_owned(patch: pytest.MonkeyPatch) -> None:
    """What is about to be given away counts as owned when the leases are looked at."""

    async def refresh(self: Coordinator, _: int) -> None:
        planning, leases = self._planning, self._view.leases
        positions = await planning.positions.load()
        actions = planning.planner.refresh(
            positions,
            owned=self._owned.keys(),
            others={p for p, lease in leases.items() if lease.owner in self._others},
            ended=self._ends.of(leases),
        )
        planning.perform(actions)
        await planning.carried_out()

    patch.setattr(Coordinator, "_refresh", refresh)


def epochs_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A lease that another instance had in between counts as held all the time."""

    def holds(self: Coordinator, partition: int) -> bool:
        lease = self._view.leases.get(partition)
        return lease is not None and lease.owner == self.name

    patch.setattr(Coordinator, "_holds", holds)


def no_reload_after_the_first_start(patch: pytest.MonkeyPatch) -> None:
    """Whoever gets the lease of the first start begins, although another one has begun before."""
    claims = Coordinator._claims_first_start

    async def first_positions(self: Coordinator, load: Any) -> Mapping[int, Position]:
        positions: Mapping[int, Position] = await load()
        while not positions and not await claims(self):
            await anyio.sleep(0.3)
            positions = await load()
        return positions

    patch.setattr(Coordinator, "_first_positions", first_positions)


def a_release_loses_nothing(patch: pytest.MonkeyPatch) -> None:
    """What was delivered before a partition was given away can be committed afterwards."""
    release, lose = Coordinator._release_settled, RuntimePartition.lose
    # Several instances may release at the same time, so the patch itself stays as it is.
    releasing = ContextVar("releasing", default=False)

    async def keeping(self: Coordinator) -> None:
        token = releasing.set(True)
        try:
            await release(self)
        finally:
            releasing.reset(token)

    def kept(self: RuntimePartition) -> None:
        if not releasing.get():
            lose(self)

    patch.setattr(RuntimePartition, "lose", kept)
    patch.setattr(Coordinator, "_release_settled", keeping)


def positions_are_loaded_before_the_claim(patch: pytest.MonkeyPatch) -> None:
    """A partition is read from where it stood before its lease was claimed."""
    real = Coordinator._round

    async def late(self: Coordinator) -> None:
        positions, load = await self._planning.positions.load(), self._planning.positions.load

        async def known() -> Mapping[int, Position]:
            return positions

        self._planning.positions.load = known  # type: ignore[method-assign]
        try:
            await real(self)
        finally:
            self._planning.positions.load = load  # type: ignore[method-assign]

    patch.setattr(Coordinator, "_round", late)


def saves_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    """The store takes every save, and no instance notices that it lost a partition."""
    patch.setattr(SimulatedDatabase, "check", lambda *_: None)
    patch.setattr(RuntimePartition, "is_lost", lambda *_: False)


def an_outdated_position_is_kept_after_a_claim(patch: pytest.MonkeyPatch) -> None:
    """A partition that comes back is read from where this instance has left it."""
    real = Planner.refresh

    def refresh(planner: Planner, positions: Any, **options: Any) -> Any:
        known = {p: e.position for p, e in planner.entries.items() if e.position is not None}
        return real(planner, {**positions, **known}, **options)

    patch.setattr(Planner, "refresh", refresh)


def the_dead_keep_their_leases(patch: pytest.MonkeyPatch) -> None:
    """The leases of an instance that is gone are never claimed."""
    real = Lease.follows

    def follows(self: Lease, owner: str | None, epoch: int, instance: str, alive: Any) -> bool:
        return owner in (None, instance) and real(self, owner, epoch, instance, alive)

    patch.setattr(Lease, "follows", follows)


def a_hand_over_does_not_release(patch: pytest.MonkeyPatch) -> None:
    """What is to be given away is never released."""

    async def release(*_: Any) -> None:
        pass

    patch.setattr(Coordinator, "_release_settled", release)


def a_refused_save_leaves_its_partition(patch: pytest.MonkeyPatch) -> None:
    """A partition whose save was refused is read on from where it was."""
    patch.setattr(RuntimePartition, "lose", lambda self: None)


def a_lost_batch_is_not_told(patch: pytest.MonkeyPatch) -> None:
    """A later commit covers a batch that was lost with its lease."""
    patch.setattr(RuntimePartition, "loss_untold", property(lambda self: False))
