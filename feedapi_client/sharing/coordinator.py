"""Keeps the leases of one instance: joins, renews, claims its share, gives the rest away.

Leases avoid double work. What makes it safe is that a save is refused unless it follows the stored
one (R17): a decision of this module that is late or wrong costs work, never correctness.
"""

from __future__ import annotations

import logging
import random
import secrets
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import anyio

from feedapi_client.errors import StoreError
from feedapi_client.lineage.states import Action
from feedapi_client.model import FeedKey, Position
from feedapi_client.notifications import PartitionAssigned, PartitionReleased
from feedapi_client.options import Share
from feedapi_client.runtime.cancellation import beside
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.sharing import Begin, Load
from feedapi_client.sharing.assignment import Plan, Unit, merged, plan
from feedapi_client.sharing.callbacks import Callbacks
from feedapi_client.sharing.ends import Ends
from feedapi_client.sharing.feed_leases import Leases, different_options, published_options
from feedapi_client.sharing.membership import Membership
from feedapi_client.stores.leases import Instance, Lease, LeaseStore, View

log = logging.getLogger(__name__)

BOOTSTRAP = -1
"""The lease of the first start. No partition has this number."""
_LEAVE_SECONDS = 5.0
_COMMIT_LOOK = 0.02
"""Seconds between two looks whether the commits under way are through."""
_CLAIMED_AT_ONCE = 4096
_SETTLE_PART = 5
"""A part of `Share.rebalance_seconds`: an instance that joins waits for others that start, too."""
_LOADED_PART = 0.75
"""A part of a lease: the time after which the positions that others commit are loaded again."""
_NUDGE_PART = 20
"""A part of `Share.rebalance_seconds`: the shortest time between two looks."""


def instance_name(share: Share) -> str:
    """Return a name that no other process has, also not one that had the same host before."""
    return f"{share.instance or socket.gethostname()[:100]}-{secrets.token_hex(4)}"


def _version() -> str:
    from feedapi_client import __version__

    return __version__


def _in_slices(epochs: dict[int, int]) -> Iterator[dict[int, int]]:
    """Yield a part at a time, so that a renewal can come between two transactions."""
    items = sorted(epochs.items())
    for start in range(0, len(items), _CLAIMED_AT_ONCE):
        yield dict(items[start : start + _CLAIMED_AT_ONCE])


class Coordinator:
    """The leases of one session; implements `Sharing`. All methods are called from its event loop.

    Arguments:
        share: the options.
        store: keeps the leases.
        key: the feed and the consumer.
        driver: of the session.
        name: of this instance.
    """

    def __init__(
        self, share: Share, store: LeaseStore, key: FeedKey, driver: Driver, *, name: str
    ) -> None:
        self.name = name
        self._share = share
        self._options = published_options(driver.settings, _version())
        self._store = Leases(store, key, name, self._options)
        self._driver = driver
        self._membership = Membership(share, self._store, key, name, lost=self._lose_all)
        self._owned: dict[int, int] = {}
        """The epochs of the leases that this instance holds."""
        self._leaving: dict[int, float] = {}
        """What of it is given away once its batch is committed, and the time to wait until."""
        self._leases: dict[int, Lease] = {}
        self._owners: dict[int, str] = {}
        self._view: View | None = None
        """The last look, unless the leases are to be read again."""
        self._left: set[int] = set()
        """Partitions with an old mark that nobody had claimed at the last look."""
        self._looked = 0
        """When the last look began, as `Planner.begin_load` counts."""
        self._loaded_at = 0.0
        """When the positions were last loaded, on the clock of the event loop."""
        self._wake = anyio.Event()
        self._ends = Ends(driver)
        self._callbacks = Callbacks(share, driver, self.suspect)
        self._others: set[str] = set()
        """Instances whose options were compared with its own."""
        self._takes_part = False
        """Whether it divides partitions with others, and has not only joined to save first."""

    # ------------------------------------------------------------------ the first start

    async def first_start(self, load: Load, begin: Begin) -> None:
        """See `Sharing.first_start`. Raises `StoreError`, and what `begin` raises."""
        try:
            positions = await self._first_positions(load)
            if not self._membership.joined:
                await begin(positions)
                return
            # The ends of 32,768 partitions may take longer than a lease: without a heartbeat
            # another instance would ask for all of them, too.
            await beside(self._membership.run, begin(positions))
        finally:
            if self._membership.joined:
                await self.leave()

    async def _first_positions(self, load: Load) -> Mapping[int, Position]:
        """Return the stored positions; none if this instance is the one that saves the first."""
        began = anyio.current_time()
        while not (positions := await load()):
            if await self._claims_first_start():
                return await load()
            # Soon at first: those that start at once are to divide the partitions at once. Later
            # less often, because the database is asked for nothing meanwhile.
            settle, waited = self._interval / _SETTLE_PART, anyio.current_time() - began
            pause = min(max(settle, waited / _SETTLE_PART), self._interval)
            await anyio.sleep(pause * random.uniform(0.5, 1))
        return positions

    async def _claims_first_start(self) -> bool:
        instances, leases = await self._store.look()
        lease = leases.get(BOOTSTRAP)
        others = {each.name for each in instances if each.alive} - {self.name}
        if lease is not None and lease.owner in others:
            self._driver.entry_waits = f"for {lease.owner}, which saves the first positions"
            return False  # without a statement that writes, however many wait
        await self._membership.beat()
        epoch = 0 if lease is None else lease.epoch
        if await self._store.put([Lease(BOOTSTRAP, self.name, epoch + 1)]):
            return True
        await self.leave()
        return False

    # ------------------------------------------------------------------ the whole life

    async def run(self) -> None:
        """See `Sharing.run`. An error of the store is reported, and the next round tries again."""
        async with anyio.create_task_group() as tasks:
            self._callbacks.use(tasks)
            tasks.start_soon(self._membership.run)
            await self._membership.wait_until_joined()
            self._takes_part = True
            self._membership.log("joined")
            # Those that wait for the first positions join up to one such part later.
            await anyio.sleep(self._interval / _SETTLE_PART * random.uniform(1, 1.5))
            while True:
                self._wake = anyio.Event()
                try:
                    with self._driver.positions.noted("looking at the leases"):
                        await self._look()
                except StoreError as error:
                    self._driver.report_failure(None, f"the leases are not looked at: {error}")
                await anyio.sleep(self._share.rebalance_seconds / _NUDGE_PART)
                with anyio.move_on_after(self._pause()):
                    await self._wake.wait()

    async def leave(self) -> None:
        """See `Sharing.leave`."""
        if self._membership.joined and self._commits:
            with anyio.move_on_after(self._driver.limits.commit_timeout, shield=True):
                await beside(self._membership.run, self._committed())
        await self._callbacks.leave()
        self._membership.left()
        with anyio.move_on_after(_LEAVE_SECONDS, shield=True):
            try:
                await self._store.leave()
            except StoreError as error:
                log.warning(
                    "%s: its leases expire by themselves: %s",
                    self.name,
                    error,
                    extra={"feed": self._driver.feed},
                )
            else:
                if self._takes_part:
                    self._membership.log("left")
        self._tell_released(self._owned, lost=False)
        self._owned.clear()

    @property
    def _commits(self) -> bool:
        """Whether a commit is under way: nobody else is to begin before it."""
        return any(partition.committing for partition in self._driver.partitions.values())

    async def _committed(self) -> None:
        while self._commits:  # noqa: ASYNC110 - their ends wake the iterating task alone
            await anyio.sleep(_COMMIT_LOOK)

    async def reload(self) -> list[Action]:
        """See `Sharing.reload`."""
        began = self._driver.planner.begin_load()
        positions = await self._driver.positions.load()
        return self._driver.planner.refresh(positions, began=began)

    def suspect(self) -> None:
        """See `Sharing.suspect`."""
        self._view = None
        self._wake.set()

    def released(self, partition: int) -> None:
        """See `Sharing.released`."""
        if partition in self._leaving:
            self._wake.set()

    def nudge(self) -> None:
        """See `Sharing.nudge`."""
        self._wake.set()

    def owner(self, partition: int) -> str | None:
        """See `Sharing.owner`."""
        return self.name if partition in self._owned else self._owners.get(partition)

    # ------------------------------------------------------------------ one round

    @property
    def _interval(self) -> float:
        """Seconds between two looks. The end of a feed is to be noticed sooner."""
        seconds = self._share.rebalance_seconds
        return seconds if self._driver.settings.follow else min(seconds, 1.0)

    def _pause(self) -> float:
        pause = self._interval * random.uniform(0.8, 1.2)
        deadlines = [deadline - anyio.current_time() for deadline in self._leaving.values()]
        return max(0.0, min([pause, *deadlines]))

    async def _look(self) -> None:
        """Look at the other instances, and act. Raises `StoreError`."""
        driver = self._driver
        await driver.apply()
        if not self._membership.joined:
            return
        await self._release_settled()
        self._looked = driver.planner.begin_load()
        view = await self._store.look(self._view)
        instances = view.instances
        self._ends.saw_instances(instances)
        self._compare_options(instances)
        if self._view is None or view.leases is not self._view.leases:
            self._view = view  # before the next await: `suspect` may reset it meanwhile
            self._leases = dict(view.leases)
            try:
                await self._read_leases(instances)
            except StoreError:
                self._view = None
                raise
        elif anyio.current_time() - self._loaded_at >= self._share.lease_seconds * _LOADED_PART:
            await self._refresh()  # what others have committed, for `status`
        await self._mark_ends()
        alive = [instance.name for instance in instances if instance.alive]
        if driver.applying or not self._membership.joined or self.name not in alive:
            return
        decided = self._decide(alive)
        await self._give(decided.give)
        await self._claim(decided.claim)

    def _compare_options(self, instances: Iterable[Instance]) -> None:
        """Report once of each instance which options are not the same as here."""
        for other in instances:
            if not other.alive or other.name in self._others:
                continue
            self._others.add(other.name)
            if different := different_options(self._options, other.options):
                self._driver.report(
                    None,
                    f"the instance {other.name} has other options than this one "
                    f"({', '.join(different)}): all instances that share a feed need the same",
                )

    async def _read_leases(self, instances: Iterable[Instance]) -> None:
        """Read all leases, drop what was lost, and load the positions that others saved."""
        self._ends.saw_leases(self._leases)
        alive = {instance.name for instance in instances if instance.alive}
        lost = [p for p, epoch in self._owned.items() if not self._holds(p, epoch)]
        if lost:
            self._lose(lost, "claimed by others")
        strays = [
            lease.partition
            for lease in self._leases.values()
            if lease.owner == self.name and lease.partition not in self._owned
        ]
        if strays:  # of a claim whose reply was lost, or of the time before the heartbeat expired
            await self._store.put([replace(self._leases[p], owner=None) for p in strays])
            self._note(dict.fromkeys(strays))
        self._owners = {
            lease.partition: lease.owner
            for lease in self._leases.values()
            if lease.owner in alive and lease.owner is not None
        }
        await self._refresh()

    def _holds(self, partition: int, epoch: int) -> bool:
        lease = self._leases.get(partition)
        return lease is not None and lease.owner == self.name and lease.epoch == epoch

    async def _refresh(self) -> None:
        """Give the planner what is stored, and which leases are held. After any claim."""
        driver, self._loaded_at = self._driver, anyio.current_time()
        began = driver.planner.begin_load()
        positions = await driver.positions.load()
        if driver.give_up_overtaken(positions, began):
            began = driver.planner.begin_load()
            positions = await driver.positions.load()
        actions = driver.planner.refresh(
            positions,
            began=began,
            looked=self._looked,
            owned=self._owned.keys() - self._leaving.keys() - self._callbacks.arriving,
            others={p for p, owner in self._owners.items() if owner != self.name},
            ended=self._ends.of(self._leases),
        )
        await driver.apply(actions)
        driver.wake()

    def _decide(self, alive: list[str]) -> Plan:
        units: list[Unit] = self._driver.planner.leasable()
        if any(len(unit) > 1 for unit in units):
            units = merged(units)
        pinned = self._driver.planner.parked()
        if not self._driver.settings.follow:
            ended = self._ends.of(self._leases)
            units = [unit for unit in units if not ended.issuperset(unit)]
            pinned |= ended
        owners = {p: le.owner for p, le in self._leases.items() if p != BOOTSTRAP}
        decided = plan(self.name, alive, owners, units, pinned=pinned | self._leaving.keys())
        # Those that believe a mark divide without its partition. Whoever does not reads it itself,
        # if nobody has claimed it since the last look.
        marked = {p for unit in units for p in unit if p in owners and self._leases[p].ended}
        free = set() if decided.claim else {p for p in marked if owners[p] not in alive}
        left, self._left = sorted(free & self._left), free
        return Plan(frozenset(left[:1]), decided.give) if left else decided

    async def _claim(self, partitions: Iterable[int]) -> None:
        wanted = {p: self._leases[p].epoch if p in self._leases else 0 for p in partitions}
        if not wanted:
            return
        claimed: dict[int, int] = {}
        expired = self._membership.expired
        for some in _in_slices(wanted):
            put = await self._store.put([Lease(p, self.name, some[p] + 1) for p in some])
            claimed |= {p: some[p] + 1 for p in put}
        if len(claimed) < len(wanted):
            self._view = None  # others were faster, or the view is old
        if expired != self._membership.expired:
            # Others may have claimed the same since. What is still its own, it gives back.
            self._view = None
            return
        if not claimed or not self._membership.joined:
            return
        self._owned |= claimed
        self._callbacks.assign(claimed)
        if self._driver.listeners:
            for partition in claimed:
                self._driver.listeners.tell(PartitionAssigned(partition))
        self._note(dict.fromkeys(claimed, self.name), claimed)
        self._membership.log("claimed", claimed)
        await self._refresh()

    async def _mark_ends(self) -> None:
        """Tell the others what was read to its end, without `follow`."""
        owned = self._owned.keys() - self._leaving.keys()
        ended = self._ends.to_mark(owned, self._leases)
        if ended:
            await self._store.put([replace(self._leases[p], ended=True) for p in ended])
            for p in ended:
                lease = self._leases[p]
                self._leases[p] = Lease(p, lease.owner, lease.epoch, True, 0.0)

    # ------------------------------------------------------------------ giving away, losing

    async def _give(self, partitions: frozenset[int]) -> None:
        """Stop reading them, and release them as soon as no batch is in flight."""
        if not partitions:
            return
        until = anyio.current_time() + self._share.handover_seconds
        self._leaving |= dict.fromkeys(partitions, until)
        await self._driver.apply(self._driver.planner.revoke(partitions))
        await self._release_settled()

    async def _release_settled(self) -> None:
        driver, now = self._driver, anyio.current_time()
        self._callbacks.release([p for p in self._leaving if self._is_committed(p)])
        late = {p for p, until in self._leaving.items() if now >= until and not self._settled(p)}
        released = late | {p for p in self._leaving if self._settled(p)}
        if not released:
            return
        for p in released:
            driver.lose_delivered(p)
        if late:
            self._membership.log("does not wait any longer for the batches of", late)
        gone = [replace(self._leases[p], owner=None) for p in released if p in self._leases]
        if len(await self._store.put(gone)) < len(released):
            self._view = None  # a row was locked: what still names this instance is released again
        self._forget(released, lost=False)
        self._note(dict.fromkeys(released))
        self._membership.log("gave away", released)

    def _settled(self, partition: int) -> bool:
        return self._is_committed(partition) and self._callbacks.is_over(partition)

    def _is_committed(self, partition: int) -> bool:
        found = self._driver.partitions.get(partition)
        return found is None or found.is_settled

    def _lose(self, partitions: Iterable[int], why: str) -> None:
        lost = list(partitions)
        driver = self._driver
        driver.defer(driver.planner.revoke(lost))
        for p in lost:
            driver.lose_delivered(p)
        self._forget(lost, lost=True)
        if lost:
            self._membership.log(f"lost, {why}:", lost, level=logging.WARNING)
        driver.wake()

    def _lose_all(self, why: str) -> None:
        self._lose(list(self._owned), why)
        self._view = None
        self._wake.set()

    def _forget(self, partitions: Collection[int], *, lost: bool) -> None:
        self._tell_released(self._owned.keys() & set(partitions), lost=lost)
        self._callbacks.forget(partitions)
        for p in partitions:
            self._owned.pop(p, None)
            self._leaving.pop(p, None)
            self._owners.pop(p, None)

    def _tell_released(self, partitions: Iterable[int], *, lost: bool) -> None:
        if self._driver.listeners:
            for partition in sorted(partitions):
                self._driver.listeners.tell(PartitionReleased(partition, lost))

    def _note(
        self, owners: Mapping[int, str | None], epochs: Mapping[int, int] | None = None
    ) -> None:
        """Change the view of the leases by what this instance has done itself."""
        for p, owner in owners.items():
            before = self._leases.get(p)
            epoch = (epochs or {}).get(p, before.epoch if before else 0)
            ended = before is not None and before.ended and owner is None  # a claim deletes it
            self._leases[p] = Lease(p, owner, epoch, ended, 0.0)
            self._owners.pop(p, None)
            if owner is not None:
                self._owners[p] = owner
