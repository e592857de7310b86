"""Divides the partitions with other instances: looks, claims its share, gives the rest away.

Leases avoid double work. What makes it safe is that a save is refused unless it follows the stored
one (R17): a decision of this module that is late or wrong costs work, never correctness.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import socket
from collections.abc import Collection, Iterable, Mapping

import anyio

from feedapi_client.errors import StoreError
from feedapi_client.lineage.states import Action
from feedapi_client.model import FeedKey, Position
from feedapi_client.notifications import PartitionAssigned, PartitionReleased
from feedapi_client.options import Share
from feedapi_client.runtime.loop import beside
from feedapi_client.runtime.planning import Planning
from feedapi_client.runtime.sharing import Begin, Load
from feedapi_client.sharing.assignment import Plan, Unit, merged, plan
from feedapi_client.sharing.callbacks import Callbacks
from feedapi_client.sharing.ends import Ends
from feedapi_client.sharing.membership import Membership, different_options, published_options
from feedapi_client.stores.leases import Lease, LeaseStore, View

BOOTSTRAP = -1
"""The lease of the first start. No partition has this number."""
_LEAVE_SECONDS = 5.0
_COMMIT_LOOK = 0.02
"""Seconds between two looks whether the commits under way are through."""
_SETTLE_PART = 5
"""A part of `Share.rebalance_seconds`: an instance that joins waits for others that start, too."""
_LOADED_PART = 0.75
"""A part of a lease: the time after which the positions that others commit are loaded again."""
_NUDGE_PART = 20
"""A part of `Share.rebalance_seconds`: the shortest time between two looks."""


def instance_name(share: Share) -> str:
    """Return a name that no other process has, also not one that had the same host before."""
    return f"{share.instance or socket.gethostname()[:100]}-{secrets.token_hex(4)}"


class Coordinator:
    """All methods are called from the session's event loop."""

    def __init__(
        self, share: Share, store: LeaseStore, key: FeedKey, planning: Planning, *, name: str
    ) -> None:
        self.name = name
        self._share = share
        self._planning, self._iteration = planning, planning.iteration
        self._options = published_options(planning.iteration.settings)
        self._member = Membership(share, store, key, name, self._options, lost=self._lose_all)
        self._callbacks = Callbacks(share, planning.iteration, self.suspect)
        self._ends = Ends(planning)
        self._view = View((), {})
        """What the last look has shown."""
        self._owned: dict[int, int] = {}
        """The epochs of the leases that this instance holds."""
        self._leaving: dict[int, float] = {}
        """What of it is given away once its batch is committed, and the time to wait until."""
        self._left: set[int] = set()
        """Partitions with an old mark that nobody had claimed at the last look."""
        self._loaded_at = -math.inf
        """When the positions were last loaded, on the clock of the event loop."""
        self._wake = anyio.Event()
        self._others: set[str] = set()
        """Living instances at the last look, without this one."""
        self._compared: set[str] = set()
        self._takes_part = False
        """Whether it divides partitions with others, and has not only joined to save first."""

    # ------------------------------------------------------------------ the first start

    async def first_start(self, load: Load, begin: Begin) -> None:
        try:
            positions = await self._first_positions(load)
            if self._member.joined:
                # The ends of 32,768 partitions may take longer than a lease: without a heartbeat
                # another instance would ask for all of them, too.
                await beside(self._member.run, begin(positions))
            else:
                await begin(positions)
        finally:
            if self._member.joined:
                await self.leave()

    async def _first_positions(self, load: Load) -> Mapping[int, Position]:
        pause = self._interval / _SETTLE_PART  # those that start at once are to divide at once
        while not (positions := await load()):
            if await self._claims_first_start():
                return await load()
            await anyio.sleep(pause * random.uniform(0.5, 1))
            pause = min(1.2 * pause, self._interval)
        return positions

    async def _claims_first_start(self) -> bool:
        instances, leases = await self._member.look()
        lease = leases.get(BOOTSTRAP, Lease(BOOTSTRAP, None, 0))
        if lease.owner in {each.name for each in instances if each.alive} - {self.name}:
            self._iteration.entry_waits = f"for {lease.owner}, which saves the first positions"
            return False  # without a statement that writes, however many wait
        await self._member.beat()
        if await self._member.put([Lease(BOOTSTRAP, self.name, lease.epoch + 1)]):
            return True
        await self.leave()
        return False

    # ------------------------------------------------------------------ the whole life

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            self._callbacks.use(tasks)
            tasks.start_soon(self._member.run)
            await self._member.wait_until_joined()
            self._takes_part = True
            self._member.log("joined")
            # Those that wait for the first positions join up to one such part later.
            await anyio.sleep(self._interval / _SETTLE_PART * random.uniform(1, 1.5))
            while True:
                self._wake = anyio.Event()
                try:
                    with self._planning.positions.noted("looking at the leases"):
                        await self._round()
                except StoreError as error:
                    self._loaded_at = -math.inf
                    self._iteration.report_failure(None, f"the leases are not looked at: {error}")
                await anyio.sleep(self._share.rebalance_seconds / _NUDGE_PART)
                with anyio.move_on_after(self._pause()):
                    await self._wake.wait()

    async def leave(self) -> None:
        # A commit that ends now hands no cursor on: whoever claims the partition does.
        self._planning.planner.revoke(self._owned)
        if self._member.joined and self._commits:
            with anyio.move_on_after(self._iteration.limits.commit_timeout, shield=True):
                await beside(self._member.run, self._committed())
        await self._callbacks.leave()
        with anyio.move_on_after(_LEAVE_SECONDS, shield=True):
            try:
                await self._member.leave()
            except StoreError as error:
                self._member.log(f"its leases expire by themselves: {error}", level=logging.WARNING)
            else:
                if self._takes_part:
                    self._member.log("left")
        self._tell_released(self._owned, lost=False)
        self._owned.clear()

    @property
    def _commits(self) -> bool:
        return any(partition.committing for partition in self._planning.partitions.values())

    async def _committed(self) -> None:
        while self._commits:  # noqa: ASYNC110 - their ends wake the iterating task alone
            await anyio.sleep(_COMMIT_LOOK)

    async def reload(self) -> list[Action]:
        began = self._planning.planner.begin_load()
        positions = await self._planning.positions.load()
        return self._planning.planner.refresh(positions, began=began)

    def released(self, partition: int) -> None:
        if partition in self._leaving:
            self._wake.set()

    def suspect(self) -> None:
        self._loaded_at = -math.inf
        self._wake.set()

    def nudge(self) -> None:
        self._wake.set()

    def owner(self, partition: int) -> str | None:
        if partition in self._owned:
            return self.name
        lease = self._view.leases.get(partition)
        return lease.owner if lease is not None and lease.owner in self._others else None

    # ------------------------------------------------------------------ one round

    @property
    def _interval(self) -> float:
        """Seconds between two looks. The end of a feed is to be noticed sooner."""
        seconds = self._share.rebalance_seconds
        return seconds if self._iteration.settings.follow else min(seconds, 1.0)

    def _pause(self) -> float:
        pause = self._interval * random.uniform(0.8, 1.2)
        deadlines = [deadline - anyio.current_time() for deadline in self._leaving.values()]
        return max(0.0, min([pause, *deadlines]))

    async def _round(self) -> None:
        await self._planning.carried_out()
        if not self._member.joined:
            return
        await self._release_settled()
        await self._look()
        await self._mark_ends()
        alive = {each.name for each in self._view.instances if each.alive}
        if self._planning.applying or not self._member.joined or self.name not in alive:
            return
        # Of a claim whose reply was lost, of the time before the heartbeat expired, or of a store
        # that went back.
        leases = self._view.leases
        strays = {p for p in leases if leases[p].owner == self.name} - self._owned.keys()
        decided = self._decide(alive, strays)
        await self._give(decided.give)
        await self._member.put([self._free(p) for p in strays - decided.claim])
        if await self._claim(decided.claim):
            await self._look()

    async def _look(self) -> None:
        """Drop what was lost, and load the positions that others saved. After any claim."""
        looked = self._planning.planner.begin_load()
        before = self._view.leases, self._others
        self._view = view = await self._member.look()
        self._others = {each.name for each in view.instances if each.alive} - {self.name}
        self._ends.saw(view)
        self._compare_options()
        if lost := [p for p in self._owned if not self._holds(p)]:
            self._lose(lost, "claimed by others")
        period = self._share.lease_seconds * _LOADED_PART
        changed = before != (view.leases, self._others)
        if changed or anyio.current_time() >= self._loaded_at + period:
            await self._refresh(looked)

    async def _refresh(self, looked: int) -> None:
        planning, self._loaded_at = self._planning, anyio.current_time()
        began = planning.planner.begin_load()
        positions = await planning.positions.load()
        if planning.give_up_overtaken(positions, began):
            began = planning.planner.begin_load()
            positions = await planning.positions.load()
        actions = planning.planner.refresh(
            positions,
            began=began,
            looked=looked,
            owned=self._owned.keys() - self._leaving.keys() - self._callbacks.arriving,
            others={p for p, each in self._view.leases.items() if each.owner in self._others},
            ended=self._ends.of(self._view.leases),
        )
        planning.perform(actions)
        await planning.carried_out()

    def _holds(self, partition: int) -> bool:
        lease = self._view.leases.get(partition)
        return lease is not None and (lease.owner, lease.epoch) == (
            self.name,
            self._owned.get(partition),
        )

    def _compare_options(self) -> None:
        for other in self._view.instances:
            if other.name not in self._others or other.name in self._compared:
                continue
            self._compared.add(other.name)
            if different := different_options(self._options, other.options):
                self._iteration.report(
                    None,
                    f"the instance {other.name} has other options than this one "
                    f"({', '.join(different)}): all instances that share a feed need the same",
                )

    def _decide(self, alive: Collection[str], strays: Collection[int]) -> Plan:
        planner, leases = self._planning.planner, self._view.leases
        units: list[Unit] = planner.leasable()
        if any(len(unit) > 1 for unit in units):
            units = merged(units)
        ended = self._ends.of(leases)
        units = [unit for unit in units if not ended.issuperset(unit)]
        pinned = planner.parked() | ended | self._leaving.keys()
        owners = {p: None if p in strays else lease.owner for p, lease in leases.items()}
        owners.pop(BOOTSTRAP, None)
        decided = plan(self.name, alive, owners, units, pinned=pinned)
        # Those that believe a mark divide without its partition. Whoever does not reads it itself,
        # if nobody has claimed it since the last look.
        marked = {p for unit in units for p in unit if p in leases and leases[p].ended}
        free = set() if decided.claim else {p for p in marked if owners[p] not in alive}
        left, self._left = sorted(free & self._left), free
        return Plan(frozenset(left[:1]), decided.give) if left else decided

    async def _claim(self, partitions: Collection[int]) -> bool:
        if not partitions:
            return False
        none, expired = Lease(BOOTSTRAP, None, 0), self._member.expired
        epochs = {p: self._view.leases.get(p, none).epoch + 1 for p in partitions}
        put = await self._member.put([Lease(p, self.name, epochs[p]) for p in epochs])
        # Others may have claimed the same since the heartbeat has expired.
        if not put or expired != self._member.expired or not self._member.joined:
            return False
        self._owned |= {p: epochs[p] for p in put}
        self._callbacks.assign(put)
        if self._iteration.listeners:
            for partition in sorted(put):
                self._iteration.listeners.tell(PartitionAssigned(partition))
        self._member.log("claimed", put)
        return True

    async def _mark_ends(self) -> None:
        owned, leases = self._owned.keys() - self._leaving.keys(), self._view.leases
        if ended := self._ends.to_mark(owned, leases):
            await self._member.put([Lease(p, self.name, self._owned[p], ended=True) for p in ended])

    # ------------------------------------------------------------------ giving away, losing

    def _free(self, partition: int) -> Lease:
        """Return the lease that gives a partition away. The mark of its end stays."""
        stored = self._view.leases[partition]
        return Lease(partition, None, stored.epoch, stored.ended)

    async def _give(self, partitions: Collection[int]) -> None:
        if partitions:
            until = anyio.current_time() + self._share.handover_seconds
            self._leaving |= dict.fromkeys(partitions, until)
            self._planning.perform(self._planning.planner.revoke(partitions))
            await self._planning.carried_out()
            await self._release_settled()

    async def _release_settled(self) -> None:
        now = anyio.current_time()
        committed = {p for p in self._leaving if self._is_committed(p)}
        self._callbacks.release(committed)
        settled = {p for p in committed if self._callbacks.is_over(p)}
        late = {p for p, until in self._leaving.items() if now >= until} - settled
        if not (gone := settled | late):
            return
        for p in gone:
            self._planning.lose_delivered(p)
        if late:
            self._member.log("does not wait any longer for the batches of", late)
        await self._member.put([self._free(p) for p in gone])
        self._forget(gone, lost=False)
        self._member.log("gave away", gone)

    def _is_committed(self, partition: int) -> bool:
        found = self._planning.partitions.get(partition)
        return found is None or found.is_settled

    def _lose(self, partitions: Collection[int], why: str) -> None:
        planning = self._planning
        planning.perform(planning.planner.revoke(partitions))
        for p in partitions:
            planning.lose_delivered(p)
        self._forget(partitions, lost=True)
        if partitions:
            self._member.log(f"lost, {why}:", partitions, level=logging.WARNING)

    def _lose_all(self, why: str) -> None:
        self._lose(list(self._owned), why)
        self.suspect()

    def _forget(self, partitions: Collection[int], *, lost: bool) -> None:
        self._tell_released(self._owned.keys() & partitions, lost=lost)
        self._callbacks.forget(partitions)
        for p in partitions:
            self._owned.pop(p, None)
            self._leaving.pop(p, None)

    def _tell_released(self, partitions: Iterable[int], *, lost: bool) -> None:
        if self._iteration.listeners:
            for partition in sorted(partitions):
                self._iteration.listeners.tell(PartitionReleased(partition, lost))
