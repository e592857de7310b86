"""Several planners on one store against a model: random topologies, leases, pauses and crashes.

Leases are taken away at any moment, without notice. Whatever they do, no event is lost, none is
applied twice, and no child comes before its parent.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from feedapi_client.lineage.planner import Planner
from feedapi_client.lineage.states import Action, Fail, Save, Start, State, Stop
from feedapi_client.model import Position
from feedapi_client.sharing.assignment import merged
from tests.lineage.test_planner_model import ENTITIES, ModelEvent, ModelFeed

INSTANCES = 3
instances = st.integers(0, INSTANCES - 1)


class ModelInstance:
    """What one instance has in memory. `number` is its name."""

    def __init__(self, number: int, store: dict[int, Position]) -> None:
        self.number = number
        self.planner = Planner(feed="model", shared=True)
        self.planner.load(store)
        self.owned: set[int] = set()
        self.cursors: dict[int, str] = {}
        self.in_flight: dict[int, tuple[list[ModelEvent], str]] = {}


class SharedPlannerModel(RuleBasedStateMachine):
    """Instances that read, commit, claim, lose leases and crash at random."""

    graceful = False
    """Leases are only given away, so that no commit is ever refused: nothing is handled twice
    although there is no transaction."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = ModelFeed()
        self.store: dict[int, Position] = {}
        self.leases: dict[int, int] = {}
        self.applied: list[list[int]] = [[] for _ in range(ENTITIES)]
        self.instances: list[ModelInstance] = []

    @initialize(tells=st.booleans())
    def begin(self, tells: bool) -> None:
        self.feed.tells_last_cursor = tells
        for number in range(INSTANCES):
            self.instances.append(ModelInstance(number, self.store))
            self.discover(number)

    # ------------------------------------------------------------------ what an instance does

    def save(self, positions: dict[int, Position]) -> bool:
        """Save all or nothing; False if it is refused."""
        for partition, position in positions.items():
            stored = self.store.get(partition)
            if (stored.revision if stored else None) != position.replaces:
                return False
        self.store |= positions
        return True

    def act(self, one: ModelInstance, actions: list[Action]) -> None:
        queue = list(actions)
        while queue:
            match queue.pop(0):
                case Save(positions):
                    if not self.save(positions):
                        queue += one.planner.refused(positions)
                case Start(partition, cursor):
                    one.cursors.setdefault(partition, cursor)
                case Stop(partition):
                    one.cursors.pop(partition, None)
                case Fail(_, error):
                    raise error
                case _:
                    pass

    @rule(number=instances)
    def discover(self, number: int) -> None:
        one = self.instances[number]
        info = self.feed.info()
        self.act(one, one.planner.refresh(self.store))
        self.act(one, one.planner.discover(info))

    def look(self, number: int, wanted: int) -> None:
        """Notice lost leases, then claim free ones, so that `wanted` are held."""
        one = self.instances[number]
        lost = {p for p in one.owned if self.leases.get(p) != number}
        self.drop(one, lost)
        units = one.planner.leasable()
        readable = {p for unit in units for p in unit}
        self.drop(one, {p for p in one.owned - readable if p not in one.in_flight})
        for unit in merged(units):
            if len(one.owned) >= wanted:
                break
            for p in unit:
                if p not in self.leases and p not in one.in_flight:
                    self.leases[p] = number
                    one.owned.add(p)
        others = {p for p, owner in self.leases.items() if owner != number}
        self.act(one, one.planner.refresh(self.store, owned=one.owned, others=others))

    def drop(self, one: ModelInstance, partitions: set[int]) -> None:
        """Stop partitions. What was in flight can't be committed any more."""
        self.act(one, one.planner.revoke(partitions))
        one.owned -= partitions
        for p in partitions:
            if one.in_flight.pop(p, None) is not None:
                self.act(one, one.planner.released(p, None))
            if self.leases.get(p) == one.number:
                del self.leases[p]

    @rule(number=instances, wanted=st.integers(0, 12))
    def rebalance(self, number: int, wanted: int) -> None:
        self.look(number, wanted)

    @precondition(lambda self: self.leases and not self.graceful)
    @rule(data=st.data(), to=instances)
    def take_away(self, data: st.DataObject, to: int) -> None:
        """The heartbeat of the owner expires, and it does not notice."""
        partition = data.draw(st.sampled_from(sorted(self.leases)))
        if to != self.leases[partition]:
            del self.leases[partition]

    @rule(number=instances)
    def give_away(self, number: int) -> None:
        """Gracefully: only what is not in flight."""
        one = self.instances[number]
        self.drop(one, one.owned - one.in_flight.keys())

    def readable(self, one: ModelInstance) -> list[int]:
        return [p for p in one.cursors if p in self.feed.logs and p not in one.in_flight]

    @rule(number=instances, data=st.data(), size=st.integers(1, 4))
    def read(self, number: int, data: st.DataObject, size: int) -> None:
        one = self.instances[number]
        if found := self.readable(one):
            self.read_one(one, data.draw(st.sampled_from(found)), size)

    def read_one(self, one: ModelInstance, partition: int, size: int) -> None:
        asked, asked_closed = one.cursors[partition], one.planner.is_closed(partition)
        events, cursor = self.feed.read(partition, asked, size)
        if cursor == asked:
            self.act(one, one.planner.ended(partition, asked, asked_closed=asked_closed))
            return
        one.planner.progressed(partition)
        one.planner.delivered(partition)
        one.cursors[partition] = cursor
        one.in_flight[partition] = (events, cursor)

    @rule(number=instances, data=st.data())
    def commit(self, number: int, data: st.DataObject) -> None:
        one = self.instances[number]
        if one.in_flight:
            self.commit_one(one, data.draw(st.sampled_from(sorted(one.in_flight))))

    def commit_one(self, one: ModelInstance, partition: int) -> None:
        """Effects and cursor in one transaction: both or neither."""
        events, cursor = one.in_flight.pop(partition)
        position = one.planner.checkpoint(partition, cursor)
        if not self.save({partition: position}):
            assert not self.graceful, "a batch was handled that can't be committed"
            self.act(one, one.planner.refused([partition]))
            one.owned.discard(partition)
            self.act(one, one.planner.released(partition, None))
            if self.leases.get(partition) == one.number:
                del self.leases[partition]
            return
        for entity, number in events:
            self.applied[entity].append(number)
        self.act(one, one.planner.released(partition, position))

    @precondition(lambda self: not self.graceful)
    @rule(number=instances)
    def crash(self, number: int) -> None:
        self.leases = {p: owner for p, owner in self.leases.items() if owner != number}
        self.instances[number] = ModelInstance(number, self.store)
        self.discover(number)

    # ------------------------------------------------------------------ the feed

    @rule(entity=st.integers(0, ENTITIES - 1))
    def append(self, entity: int) -> None:
        self.feed.append(entity)

    @precondition(lambda self: self.feed.next_id < 12)
    @rule(
        data=st.data(),
        method=st.sampled_from(["starts-after", "cursor-from"]),
        left=st.sets(st.integers(0, ENTITIES - 1)),
    )
    def split(self, data: st.DataObject, method: str, left: set[int]) -> None:
        candidates = [p for p, log in self.feed.logs.items() if not log.closed]
        self.feed.split(data.draw(st.sampled_from(candidates)), method, left)

    # ------------------------------------------------------------------ what holds

    @invariant()
    def each_entity_in_order_and_once(self) -> None:
        for numbers in self.applied:
            assert numbers == list(range(len(numbers)))

    @invariant()
    def only_what_runs_is_read(self) -> None:
        for one in self.instances:
            for partition in one.cursors:
                state = one.planner.entries[partition].state
                assert state in (State.READING, State.CAUGHT_UP)

    def teardown(self) -> None:
        """Whatever happened, everything goes on and comes to its end."""
        for _ in range(100):
            for one in self.instances:
                for partition in list(one.in_flight):
                    self.commit_one(one, partition)
                self.discover(one.number)
                self.look(one.number, 5)
                for partition in self.readable(one):
                    if partition in one.cursors:
                        self.read_one(one, partition, 5)
            if [len(numbers) for numbers in self.applied] == self.feed.written:
                break
        assert [len(numbers) for numbers in self.applied] == self.feed.written
        self.each_entity_in_order_and_once()


class GracefulModel(SharedPlannerModel):
    """Without any loss of leases."""

    graceful = True


TestGracefulModel = GracefulModel.TestCase
TestGracefulModel.settings = settings(stateful_step_count=40)
TestSharedPlannerModel = SharedPlannerModel.TestCase
TestSharedPlannerModel.settings = settings(stateful_step_count=40)


def begun() -> GracefulModel:
    """Instance 0 reads partition 0, of which two events are published."""
    model = GracefulModel()
    model.begin(tells=True)
    model.append(0)
    model.append(1)
    model.look(0, 1)
    return model


def status(model: GracefulModel, partition: int) -> str:
    return model.store[partition].status


def test_r09_nobody_else_transfers_a_cursor_while_a_batch_is_in_flight() -> None:
    model = begun()
    model.read_one(model.instances[0], 0, 1)
    model.feed.split(0, "cursor-from", {0, 1, 2})
    for number in (1, 2, 0):
        model.discover(number)
    assert status(model, 0) == "open"
    model.commit_one(model.instances[0], 0)
    assert status(model, 0) == "superseded"
    assert {model.store[1].cursor, model.store[2].cursor} == {model.store[0].cursor}
    model.teardown()


def test_r09_an_ancestor_that_was_never_read_is_not_begun_by_an_older_discovery() -> None:
    """Instance 0 knows a new partition, instance 1 already what replaced it."""
    model = begun()
    model.feed.split(0, "cursor-from", {0, 1, 2})
    successors = set(model.feed.logs)
    model.discover(0)
    model.look(0, 0)
    model.feed.split(min(successors), "starts-after", {0})
    children = set(model.feed.logs) - successors
    model.look(0, 1)
    model.discover(0)
    model.feed.split(min(children), "cursor-from", {0})
    model.look(1, 0)
    model.discover(1)
    model.look(1, 0)  # whether somebody has begun to read it
    assert status(model, min(children)) == "superseded"
    model.teardown()
