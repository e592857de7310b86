"""Everything at one moment: the feed, the store, the leases, and the instances. And its moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from feedapi_client.errors import FencedError
from feedapi_client.lineage.planner import Planner
from feedapi_client.model import FIRST, FeedKey, Position
from feedapi_client.operations.repair import restored_positions
from feedapi_client.sharing.assignment import merged
from feedapi_client.stores.base import check_replaces
from tests.exploration.feeds import Event, Feed
from tests.exploration.instance import NOTHING, BrokenInvariantError, Instance, Positions, View
from tests.exploration.pickled import dumped, shared_graph

KEY = FeedKey("https://feed.test/feed")
_UNGRACEFUL = ("crash", "expire", "back", "rewind", "epochs back")
FAULTS = ("crash", "expire", "back", "rewind", "lag", "refuse", "give", "epochs back")
"""What goes wrong, each once at most in one history. `give` is no failure: a lease that is given
away although nobody else needs it."""


class Move(NamedTuple):
    """One step of one history."""

    name: str
    instance: int = -1
    partition: int = -1

    def __str__(self) -> str:
        who = "" if self.instance < 0 else f" of instance {self.instance}"
        return f"{self.name}{who}" + ("" if self.partition < 0 else f", partition {self.partition}")


@dataclass(slots=True)
class World:
    """One state."""

    feed: Feed
    version: int
    stored: Positions
    before: Positions | None
    """What was stored before the last save, while a failover may bring it back."""
    applied: tuple[Event, ...]
    """The events whose commit succeeded: cursors and effects are saved together."""
    leases: dict[int, tuple[int | None, int]]
    epochs: dict[int, int]
    """The highest epoch with which each lease was ever claimed."""
    dead: set[int]
    """Instances whose heartbeat has expired."""
    instances: list[Instance]
    faults: dict[str, int] = field(default_factory=dict)
    left: int = 0
    """How many faults may still happen."""
    fine: bool = False
    """Whether the others' moves come between the steps of a look at the leases."""

    # ------------------------------------------------------------------ the store

    async def save(self, positions: Positions) -> None:
        """Save all or nothing, as `Positions.save` does. Raises `FencedError`."""
        for partition, position in positions.items():
            check_replaces(KEY, partition, position.replaces, self.stored.get(partition))
        self.before = self.stored if self.may("back") or self.may("rewind") else None
        self.stored = {**self.stored, **positions}

    def may(self, fault: str) -> bool:
        """Whether a fault may happen."""
        return self.left > 0 and self.faults.get(fault, 0) > 0

    # ------------------------------------------------------------------ moves

    def moves(self) -> Iterator[Move]:
        """Yield what may happen next."""
        if self.version + 1 < len(self.feed.topologies):
            yield Move("publish")
        if self.version in self.feed.rolled_back and self._restorable():
            yield Move("restore")
        for one in self.instances:
            yield from self._moves_of(one)
        if self.before is not None:
            if self.may("back"):
                yield Move("back")
            if self.may("rewind") and self.before.keys() == self.stored.keys():
                yield Move("rewind")

    def _moves_of(self, one: Instance) -> Iterator[Move]:
        number = one.number
        if one.version != self.version or one.wanted:
            yield Move("discover", number)
        if self.may("lag") and one.version != self.version - 1 and self.version > 0:
            yield Move("lag", number)
        if self.may("crash"):
            yield Move("crash", number)
        if one.version >= 0:
            yield from self._reads_of(one)
            if one.shared:
                yield from self._looks_of(one)
                yield from self._lost_leases_of(one)

    def _reads_of(self, one: Instance) -> Iterator[Move]:
        for partition in one.readable():
            if partition in self.feed[self.version]:
                yield Move("read", one.number, partition)
                if self.may("refuse"):
                    yield Move("refuse", one.number, partition)
        for partition in one.in_flight:
            yield Move("commit", one.number, partition)

    def _looks_of(self, one: Instance) -> Iterator[Move]:
        if one.loaded is not None:
            yield Move("take", one.number)
        elif one.claimed is not None:
            yield Move("load", one.number)
        elif one.view is not None:
            yield Move("act", one.number)
            if len(self.feed[self.version]) > 2:
                yield Move("act a little", one.number)
        else:
            yield Move("look", one.number)

    def _lost_leases_of(self, one: Instance) -> Iterator[Move]:
        if self.may("expire") and one.number not in self.dead:
            yield Move("expire", one.number)
        if self.may("give"):
            for partition in one.owned.keys() - one.leaving:
                yield Move("give", one.number, partition)
        if self.may("epochs back"):
            for partition, (owner, epoch) in self.leases.items():
                if owner == one.number and epoch:
                    yield Move("epochs back", one.number, partition)

    def make(self, move: Move) -> None:
        """Change this world. Raises `BrokenInvariantError`."""
        if move.name in FAULTS:
            self.left -= 1
            self.faults = {**self.faults, move.name: self.faults[move.name] - 1}
        for one in self.instances:
            one.planning.positions = self  # type: ignore[assignment]
            one.planning.timer = _Timer(one)  # type: ignore[assignment]
        if move.instance < 0:
            getattr(self, f"_{move.name}")()
        else:
            one = self.instances[move.instance]
            arguments = (one, move.partition) if move.partition >= 0 else (one,)
            try:
                getattr(self, f"_{move.name.replace(' ', '_')}")(*arguments)
            except FencedError:
                if one.shared:
                    raise
                self._restart(one)  # the consumer has ended, and is started again
        if not (self.may("back") or self.may("rewind")):
            self.before = None
        self.check()

    def _publish(self) -> None:
        self.version += 1

    def _restorable(self) -> bool:
        stored = self.stored
        return any(
            p in stored and stored[p].status == "superseded" for p in self.feed[self.version]
        )

    def _restore(self) -> None:
        """An operator moves the cursor back, beside running instances."""
        stored = self.stored
        again = [p for p in self.feed[self.version] if stored[p].status == "superseded"]
        live = [
            p for p in stored if p not in self.feed[self.version] and stored[p].status == "open"
        ]
        positions = restored_positions(stored, again, live, feed="model")
        self.stored, self.before = {**stored, **positions}, None

    def _back(self) -> None:
        """The store fails over to a replica that lacks the last save. Its events are handled."""
        assert self.before is not None
        self.stored, self.before = self.before, None

    def _rewind(self) -> None:
        """An operator goes back by one save: the revisions go on."""
        assert self.before is not None
        now = self.stored
        positions = {
            p: old if old == now[p] else Position.after(now[p], old.cursor, old.status)
            for p, old in self.before.items()
        }
        self.stored, self.before = positions, None

    def _discover(self, one: Instance) -> None:
        self._take_topology(one, self.version)
        for partition in one.planning.partitions.values():
            if partition.started and partition.trouble.refused:
                partition.trouble.refused = False

    def _lag(self, one: Instance) -> None:
        """A replica answers with the topology of before."""
        self._take_topology(one, self.version - 1)
        one.wanted = True

    def _take_topology(self, one: Instance, version: int) -> None:
        planner, one.wanted = one.planner, False
        if one.shared and one.version >= 0:
            one.planning.carry_out_all(planner.refresh(self.stored))
        one.version = version
        one.planning.carry_out_all(planner.discover(self.feed.info(version)))
        planner.graph = shared_graph(self.feed, version, planner.graph)

    def _read(self, one: Instance, partition: int) -> None:
        found = one.planning.partitions[partition]
        answer = self.feed.read(self.version, partition, found.read_cursor)
        if answer is not None:
            one.deliver(found, *answer)
            return
        closed, cursor = one.planner.is_closed(partition), found.read_cursor
        one.planning.carry_out_all(one.planner.ended(partition, cursor, asked_closed=closed))

    def _refuse(self, one: Instance, partition: int) -> None:
        one.planning.partitions[partition].trouble.refused = True
        one.wanted = True

    def _commit(self, one: Instance, partition: int) -> None:
        """Do what `Delivery` does: save, release, tell the planner. Effects go with the save."""
        event, cursor = one.in_flight.pop(partition)
        found, planner = one.planning.partitions[partition], one.planner
        number = found.batches
        if not found.is_lost(number) and planner.entries[partition].state != "superseded":
            position = planner.checkpoint(partition, cursor, after=found.position_before(number))
            try:
                _run_save(self, {partition: position})
            except FencedError:
                if not one.shared:
                    raise
                if self.unused(*_UNGRACEFUL) and not self.feed.rolled_back:
                    raise BrokenInvariantError(
                        "a batch was handled that can't be committed"
                    ) from None
                one.planning.lose(found)
            else:
                self._apply(event)
                found.saved(number, position, durable=True)
        found.release()
        one.planning.carry_out_all(planner.released(partition, found.acknowledge()))

    def _apply(self, event: Event | None) -> None:
        if event is None:
            return
        entity, number = event
        done = sum(e == entity for e, _ in self.applied)
        if number > done:
            raise BrokenInvariantError(
                f"the commit of event {number} of entity {entity} skips others"
            )
        if number == done:
            self.applied = (*self.applied, event)
        elif self.unused("back", "rewind"):
            raise BrokenInvariantError(f"event {number} of entity {entity} is committed twice")

    # ------------------------------------------------------------------ leases

    def alive(self, owner: int | None) -> bool:
        """Whether an owner has a heartbeat."""
        return owner is not None and owner not in self.dead

    def holds(self, one: Instance, partition: int) -> bool:
        """Whether a lease is that of an instance, in what its look has read."""
        assert one.view is not None
        return one.view.leases.get(partition) == (one.number, one.owned[partition])

    def _look(self, one: Instance) -> None:
        """Begin a look. Go through with it, unless each of its steps is a move."""
        if self._gave_away(one):
            return  # others may claim it before the next look
        one.view = View(dict(self.leases), self.stored, one.planner.begin_load())
        if not self.fine:
            self._act(one)
            if one.claimed is not None:
                self._load(one)
                self._take(one)

    def _gave_away(self, one: Instance) -> bool:
        """Release what was settled, after losing what was lost. Return whether there was any."""
        if one.number in self.dead:
            self.dead.discard(one.number)
            one.lose(set(one.owned))
        settled = {p for p in one.leaving if p not in one.in_flight}
        one.lose(settled)
        for partition in settled:
            self._release(one, partition)
        return bool(settled)

    def _release(self, one: Instance, partition: int) -> None:
        owner, epoch = self.leases.get(partition, (None, 0))
        if owner == one.number:
            self.leases[partition] = (None, epoch)

    def _act_a_little(self, one: Instance) -> None:
        self._act(one, most=1)

    def _act(self, one: Instance, most: int = 100) -> None:
        """Lose what was lost, take the positions, give what can't be read, claim what is free."""
        assert one.view is not None
        lost = {p for p in one.owned if not self.holds(one, p)}
        one.lose(lost)
        for partition, (owner, _) in one.view.leases.items():
            if owner == one.number and partition not in one.owned:
                self._release(one, partition)
        self._refresh(one, one.view.positions, one.view.began)
        claimed: dict[int, int] = {}
        units = merged(one.planner.leasable())
        over = one.owned.keys() - {p for unit in units for p in unit} - one.leaving
        one.leaving |= over
        one.planning.carry_out_all(one.planner.revoke(over))
        for unit in units:
            if len(claimed) >= most:
                break
            for partition in unit:
                owner, epoch = one.view.leases.get(partition, (None, 0))
                free = owner == one.number or not self.alive(owner)
                if partition not in one.owned and free and self.claim(one, partition, epoch):
                    claimed[partition] = epoch + 1
        one.owned |= claimed
        if claimed:
            one.claimed = claimed
            one.at_claim = {p: self.stored[p].revision for p in claimed if p in self.stored}
        else:
            one.view = None

    def claim(self, one: Instance, partition: int, epoch: int) -> bool:
        """Compare and set, as `LeaseStore.claim` does."""
        owner, stored = self.leases.get(partition, (None, 0))
        if (
            stored != epoch
            or (owner != one.number and self.alive(owner))
            or one.number in self.dead
        ):
            return False
        if epoch + 1 <= self.epochs.get(partition, 0) and self.unused("epochs back"):
            raise BrokenInvariantError(
                f"epoch {epoch + 1} of partition {partition} is claimed a second time"
            )
        self.leases[partition] = (one.number, epoch + 1)
        self.epochs[partition] = epoch + 1
        return True

    def unused(self, *faults: str) -> bool:
        """Whether none of these has happened so far."""
        return all(self.faults.get(fault, 1) for fault in faults)

    def _load(self, one: Instance) -> None:
        one.loaded, one.loaded_after = self.stored, one.planner.begin_load()

    def _take(self, one: Instance) -> None:
        assert one.loaded is not None
        loaded, one.loaded, one.claimed = one.loaded, None, None
        self._refresh(one, loaded, one.loaded_after)
        one.view, one.loaded_after = None, 0
        for partition, revision in one.at_claim.items():
            position = one.planner.entries[partition].position
            if (position.revision if position else 0) < revision and self.unused("back", "rewind"):
                raise BrokenInvariantError(
                    f"partition {partition} begins behind what was stored at its claim"
                )
        one.at_claim = {}

    def _refresh(self, one: Instance, positions: Positions, began: int) -> None:
        assert one.view is not None
        view = one.view.leases
        others = {
            p for p, (owner, _) in view.items() if owner != one.number and self.alive(owner)
        } - one.owned.keys()
        owned = one.owned.keys() - one.leaving - (one.claimed or {}).keys()
        if one.loaded is None and one.claimed is None:
            owned = one.owned.keys() - one.leaving
        before = {e.id: e.position for e in one.planner.entries.values() if e.position}
        actions = one.planner.refresh(positions, owned=owned, others=others, began=began)
        for partition, known in before.items():
            self._check_newer(one, partition, known)
        one.planning.carry_out_all(actions)

    def _check_newer(self, one: Instance, partition: int, known: Position) -> None:
        position = one.planner.entries[partition].position
        older = position is None or position.revision < known.revision
        if older and self.unused("back", "rewind") and not self.feed.rolled_back:
            raise BrokenInvariantError(f"an old load overwrites the position of {partition}")

    def _give(self, one: Instance, partition: int) -> None:
        one.leaving.add(partition)
        one.planning.carry_out_all(one.planner.revoke([partition]))

    def _expire(self, one: Instance) -> None:
        """Its heartbeat expires, and it does not notice before it looks again."""
        self.dead.add(one.number)

    def _epochs_back(self, one: Instance, partition: int) -> None:
        """The last claim of a lease is lost in a failover: somebody may claim it again."""
        self.leases[partition] = (None, self.leases[partition][1] - 1)

    def _crash(self, one: Instance) -> None:
        for partition in [p for p, (owner, _) in self.leases.items() if owner == one.number]:
            self._release(one, partition)
        self._restart(one)

    def _restart(self, one: Instance) -> None:
        owed = self.feed.published(self.version)
        fresh = start(one.number, self.stored, shared=one.shared, owed=owed)
        self.instances[one.number] = fresh
        self.dead.discard(one.number)

    # ------------------------------------------------------------------ what holds

    def check(self) -> None:
        """Check what holds in each state. Raises `BrokenInvariantError`."""
        for one in self.instances:
            self._check_reads(one)
            self._check_end(one)
        self._check_owners()
        self._check_stored()

    def _check_reads(self, one: Instance) -> None:
        for id, partition in one.planning.partitions.items():
            if not partition.started:
                continue
            entry = partition.entry
            if id in one.leaving:
                raise BrokenInvariantError(
                    f"partition {id} is read, and its lease is being given away"
                )
            if not entry.running:
                raise BrokenInvariantError(
                    f"partition {id} is read, and the planner has it as {entry.state}"
                )
            if not partition.in_flight and partition.read_cursor != entry.cursor:
                raise BrokenInvariantError(
                    f"partition {id} is read from {partition.read_cursor!r}, and {entry.cursor!r} "
                    "is what is committed"
                )

    def _check_end(self, one: Instance) -> None:
        """Without `follow`: an instance that would end has seen everything handled."""
        planner = one.planner
        if one.version != self.version or one.wanted or self.dead or one.view is not None:
            return
        if planner.finished() and not planner.listed_again():
            done = len(self.applied)
            if done < one.owed and self.unused("back", "rewind"):
                raise BrokenInvariantError(
                    f"instance {one.number} ends after {done} of {one.owed} events"
                )

    def _check_owners(self) -> None:
        if not self.unused("expire", "epochs back"):
            return
        readers = [
            id
            for one in self.instances
            for id, partition in one.planning.partitions.items()
            if partition.started
        ]
        if len(readers) != len(set(readers)) and self.instances[0].shared:
            raise BrokenInvariantError(f"two instances read one partition of {sorted(readers)}")

    def _check_stored(self) -> None:
        stored = self.stored
        listed = {p: log for t in self.feed.topologies[: self.version + 1] for p, log in t.items()}
        for id, position in stored.items():
            if position.status == "drained" and id in self.feed[self.version]:
                events = self.feed[self.version][id].events
                missing = {e for e in events if e is not None} - set(self.applied)
                if missing:
                    raise BrokenInvariantError(
                        f"partition {id} is stored as drained without {missing}"
                    )
            if position.status == "superseded":
                related = [p for p, log in listed.items() if id in log.cursor_from]
                related += listed[id].cursor_from
                if not any(p in stored for p in related):
                    raise BrokenInvariantError(
                        f"partition {id} is superseded, and nobody has its cursor"
                    )

    def reached(self) -> bool:
        """Whether all that was published is handled."""
        return len(self.applied) == self.feed.published(self.version) and not any(
            one.in_flight for one in self.instances
        )

    # ------------------------------------------------------------------ as a value

    def key(self) -> int:
        """Return a value that two worlds share if they behave alike; instances are exchangeable."""
        orders = [(0, 1), (1, 0)] if len(self.instances) == 2 else [(0,)]
        return min(hash(self._key(order)) for order in orders)

    def _key(self, order: tuple[int, ...]) -> tuple[Any, ...]:
        place: dict[int | None, int | None] = {None: None}
        place |= {number: at for at, number in enumerate(order)}
        return (
            self.version,
            self.left,
            frozenset(self.faults.items()),
            frozenset(self.stored.items()),
            None if self.before is None else frozenset(self.before.items()),
            frozenset(Counter(entity for entity, _ in self.applied).items()),
            # Of epochs only the distance counts.
            frozenset((p, place[owner], bool(epoch)) for p, (owner, epoch) in self.leases.items()),
            frozenset((p, n - self.leases[p][1]) for p, n in self.epochs.items()),
            frozenset(place[number] for number in self.dead),
            tuple(self.instances[number].key(place, self.leases) for number in order),
        )

    def copy(self) -> bytes:
        """Return the world as bytes."""
        for one in self.instances:
            one.planning.positions = one.planning.timer = NOTHING  # type: ignore[assignment]
        return dumped(self)


class _Timer:
    """Notes that a discovery is wanted."""

    def __init__(self, one: Instance) -> None:
        self._one = one

    def soon(self, reason: str = "") -> None:
        self._one.wanted = True


def _run_save(world: World, positions: Positions) -> None:
    try:
        world.save(positions).send(None)
    except StopIteration:
        return


def start(number: int, stored: Positions, *, shared: bool, owed: int) -> Instance:
    """Return an instance that has loaded the positions."""
    planner = Planner(feed="model", shared=shared)
    planner.load(stored)
    return Instance(number, planner, shared=shared, owed=owed)


def begin(
    feed: Feed,
    *,
    instances: int,
    faults: tuple[str, ...] = FAULTS,
    left: int = 0,
    fine: bool = False,
) -> World:
    """Return the first state: the consumer's first positions are saved."""
    stored = {p: Position(FIRST) for p in feed[0]}
    return World(
        feed=feed,
        version=0,
        stored=stored,
        before=None,
        applied=(),
        leases={},
        epochs={},
        dead=set(),
        instances=[
            start(n, stored, shared=instances > 1, owed=feed.published(0)) for n in range(instances)
        ],
        faults=dict(Counter(faults)),
        left=left,
        fine=fine,
    )
