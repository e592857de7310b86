"""Divides the partitions with other instances: looks, claims its share, gives the rest away.

Leases avoid double work. What makes it safe is that a save is refused unless it follows the stored
one (R17): a decision of this module that is late or wrong costs work, never correctness.
"""

from __future__ import annotations

import math
import random
import secrets
import socket
from collections.abc import Collection, Iterable, Mapping

import anyio

from feedapi_client.errors import StoreError
from feedapi_client.lineage.states import Action, State
from feedapi_client.model import FeedKey, Position
from feedapi_client.notifications import PartitionAssigned, PartitionReleased
from feedapi_client.options import Share
from feedapi_client.runtime.loop import beside
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.planning import Planning
from feedapi_client.runtime.sharing import Begin, Load
from feedapi_client.sharing.assignment import Plan, Unit, merged, plan
from feedapi_client.sharing.membership import (
    Callbacks,
    Membership,
    different_options,
    published_options,
)
from feedapi_client.stores.leases import Lease, LeaseStore, View

BOOTSTRAP = -1
"""The lease of the first start. No partition has this number."""
_LEAVE_SECONDS = 5.0
_COMMIT_LOOK = 0.02
"""Seconds between two looks whether the commits under way are through."""
_SETTLE_PART = 5
"""A part of `Share.rebalance_seconds`: an instance that joins waits for others that start, too."""
_LOADED_PART = 0.75
"""A part of a lease: the time after which leases and positions are read again in any case."""
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
        self._member = Membership(
            share,
            store,
            key,
            name,
            self._options,
            lost=self._lose_all,
            failed=self._failed,
        )
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
        """When that was last so, on the clock of the event loop."""
        self._wake = anyio.Event()
        self._others: set[str] = set()
        """Living instances at the last look, without this one."""
        self._compared: set[str] = set()

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
            # Those that wait for the first positions join up to one such part later.
            await anyio.sleep(self._interval / _SETTLE_PART * random.uniform(1, 1.5))
            while True:
                self._wake = anyio.Event()
                try:
                    with self._planning.positions.noted("looking at the leases"):
                        await self._round()
                except StoreError as error:
                    self._loaded_at = -math.inf
                    self._failed(f"the leases are not looked at: {error}")
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
                self._failed(f"the leases of this instance expire by themselves: {error}")
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

    def _failed(self, text: str) -> None:
        self._iteration.report_failure(None, text)

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
        # Tell the others what was read to its end, without `follow`.
        owned, leases = self._owned.keys() - self._leaving.keys(), self._view.leases
        ended = self._ends.to_mark(owned, leases)
        await self._member.put([Lease(p, self.name, self._owned[p], ended=True) for p in ended])
        alive = {each.name for each in self._view.instances if each.alive}
        if self._planning.applying or not self._member.joined or self.name not in alive:
            return
        # Of a claim whose reply was lost, of the time before the heartbeat expired, or of a store
        # that went back.
        strays = {p for p in leases if leases[p].owner == self.name} - self._owned.keys()
        decided = self._decide(alive, strays)
        await self._give(decided.give)
        await self._member.put([self._free(p) for p in strays - decided.claim])
        if await self._claim(decided.claim):
            await self._look()

    async def _look(self) -> None:
        """Drop what was lost, and load the positions that others saved. After any claim."""
        looked = self._planning.planner.begin_load()
        before, now = (self._view.leases, self._others), anyio.current_time()
        # All leases are read from time to time: an instance that is killed may have put some that
        # do not show, and a store that went back may show too little.
        if due := now >= self._loaded_at + self._share.lease_seconds * _LOADED_PART:
            self._loaded_at = now
        self._view = view = await self._member.look(None if due else self._view)
        self._others = {each.name for each in view.instances if each.alive} - {self.name}
        self._ends.saw(view)
        self._compare_options()
        if lost := [p for p in self._owned if not self._holds(p)]:
            self._lose(lost, "claimed by others")
        if due or before != (view.leases, self._others):
            await self._refresh(looked)

    async def _refresh(self, looked: int) -> None:
        planning = self._planning
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
        return True

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
        found = self._planning.partitions
        committed = {p for p in self._leaving if p not in found or found[p].is_settled}
        self._callbacks.release(committed)
        settled = {p for p in committed if self._callbacks.is_over(p)}
        late = {p for p, until in self._leaving.items() if now >= until} - settled
        if not (gone := settled | late):
            return
        for p in gone:
            self._planning.lose_delivered(p)
        if late:
            text = f"does not wait any longer for the batches of {len(late)} partitions"
            self._iteration.report(None, f"{self.name} {text}")
        await self._member.put([self._free(p) for p in gone])
        self._forget(gone, lost=False)

    def _lose(self, partitions: Collection[int], why: str) -> None:
        planning = self._planning
        planning.perform(planning.planner.revoke(partitions))
        for p in partitions:
            planning.lose_delivered(p)
        self._forget(partitions, lost=True)
        if partitions:
            text = f"lost the leases of {len(partitions)} partitions: {why}"
            self._iteration.report(None, f"{self.name} {text}")

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


class Ends:
    """Which marks of what was read to its end this instance believes, and makes; without `follow`.

    It is to end once all that was published before it started is read, by whichever instance.
    """

    def __init__(self, planning: Planning) -> None:
        self._planning, self._iteration = planning, planning.iteration
        self._members: set[str] = set()
        """Every instance that was ever seen."""
        self._last_joined = 0.0
        """When the last one was seen for the first time, on the clock of the event loop."""
        self._old: dict[int, Lease] | None = None
        """Those that were marked before this instance took part."""
        self._asked: dict[int, tuple[str, float]] = {}
        """The ends that are asked for again: their cursors, and since when."""

    def saw(self, view: View) -> None:
        names = {instance.name for instance in view.instances}
        if not names <= self._members:
            self._members |= names
            self._last_joined = self._iteration.clock()
        if self._old is None:
            self._old = {p: lease for p, lease in view.leases.items() if lease.ended}

    def of(self, leases: Mapping[int, Lease]) -> set[int]:
        """Return the partitions that were read to their end; none with `follow`.

        An old mark does not count, nor that of a closed partition, which has to be drained, nor
        that of one that is not listed any more: its cursor may have to be transferred.
        """
        planner = self._planning.planner
        if self._iteration.settings.follow:
            return set()
        new = [p for p, lease in leases.items() if lease.ended and not self._is_old(p, lease)]
        return {p for p in new if p in planner.graph and not planner.is_closed(p)}

    def _is_old(self, partition: int, lease: Lease) -> bool:
        """Whether it is the mark that was there before this instance took part.

        Its epoch alone does not say so: leases that went back count the same one again, for another
        owner. Whoever released it left the mark as it was.
        """
        old = (self._old or {}).get(partition)
        return old is not None and old.epoch == lease.epoch and lease.owner in (None, old.owner)

    def to_mark(self, owned: Collection[int], leases: Mapping[int, Lease]) -> list[int]:
        """Return the owned partitions that are at their end, or parked, and not marked.

        One whose last answer is older than the last instance that joined is asked again first. Its
        end was seen: requests that fail for `Limits.settle_time` do not undo that (R6).
        """
        if self._iteration.settings.follow:
            return []
        return [p for p in owned if not leases[p].ended and self._is_over(p)]

    def _is_over(self, partition: int) -> bool:
        planning = self._planning
        if planning.planner.entries[partition].state is State.PARKED:
            return True
        found = planning.partitions.get(partition)
        if found is None:
            return False
        if found.entry.state is State.READING and self._keeps_failing(found):
            planning.leave_at_end(found)
        elif _is_at_end(found):
            self._asked.pop(partition, None)
            if found.requested_at <= self._last_joined:
                self._asked[partition] = found.read_cursor, self._iteration.clock()
                planning.planner.progressed(partition)
                planning.ask(found)
        return _is_at_end(found)

    def _keeps_failing(self, found: RuntimePartition) -> bool:
        """Whether an end is asked for again, and nothing but failures came for a while."""
        cursor, since = self._asked.get(found.id, (None, 0.0))
        planning = self._planning
        fails = (
            found.trouble.error is not None and found.read_cursor == found.entry.cursor == cursor
        )
        if not fails or found.turn is not None or planning.planner.is_closed(found.id):
            return False
        return self._iteration.clock() >= since + self._iteration.limits.settle_time


def _is_at_end(found: RuntimePartition) -> bool:
    return found.entry.state is State.CAUGHT_UP and found.is_caught_up
