"""Several planners on one store against a model: random topologies, leases, pauses and crashes.

Leases are taken away at any moment, without notice. Whatever they do, no event is lost, none is
applied twice, and no child comes before its parent.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from feedapi_client.sharing.assignment import merged
from tests.lineage.test_planner_model import ModelInstance, PlannerModel

INSTANCES = 3
instances = st.integers(0, INSTANCES - 1)


class SharedPlannerModel(PlannerModel):
    """Instances that also claim and lose leases at random."""

    count = INSTANCES

    def __init__(self) -> None:
        super().__init__()
        self.leases: dict[int, int] = {}

    def new(self, number: int) -> ModelInstance:
        self.leases = {p: owner for p, owner in self.leases.items() if owner != number}
        return super().new(number)

    def discover_one(self, one: ModelInstance) -> None:
        self.act(one, one.planner.refresh(self.store))
        super().discover_one(one)

    def look(self, one: ModelInstance, wanted: int) -> None:
        """Notice lost leases, then claim free ones, so that `wanted` are held."""
        lost = {p for p in one.owned if self.leases.get(p) != one.number}
        self.drop(one, lost)
        units = one.planner.leasable()
        readable = {p for unit in units for p in unit}
        self.drop(one, {p for p in one.owned - readable if p not in one.in_flight})
        for unit in merged(units):
            if len(one.owned) >= wanted:
                break
            for p in unit:
                if p not in self.leases and p not in one.in_flight:
                    self.leases[p] = one.number
                    one.owned.add(p)
        others = {p for p, owner in self.leases.items() if owner != one.number}
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

    def lose(self, one: ModelInstance, partition: int) -> None:
        assert not self.graceful, "a batch was handled that can't be committed"
        self.act(one, one.planner.refused([partition]))
        one.owned.discard(partition)
        self.act(one, one.planner.released(partition, None))
        if self.leases.get(partition) == one.number:
            del self.leases[partition]

    @rule(number=instances, wanted=st.integers(0, 12))
    def rebalance(self, number: int, wanted: int) -> None:
        self.look(self.instances[number], wanted)

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


class GracefulModel(SharedPlannerModel):
    """Leases are only given away, so that no commit is ever refused: nothing is handled twice
    although there is no transaction."""

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
    model.look(model.instances[0], 1)
    return model


def status(model: GracefulModel, partition: int) -> str:
    return model.store[partition].status


def test_r09_nobody_else_transfers_a_cursor_while_a_batch_is_in_flight() -> None:
    model = begun()
    model.read_one(model.instances[0], 0, 1)
    model.feed.split(0, "cursor-from", {0, 1, 2})
    for number in (1, 2, 0):
        model.discover_one(model.instances[number])
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
    model.discover_one(model.instances[0])
    model.look(model.instances[0], 0)
    model.feed.split(min(successors), "starts-after", {0})
    children = set(model.feed.logs) - successors
    model.look(model.instances[0], 1)
    model.discover_one(model.instances[0])
    model.feed.split(min(children), "cursor-from", {0})
    model.look(model.instances[1], 0)
    model.discover_one(model.instances[1])
    model.look(model.instances[1], 0)  # whether somebody has begun to read it
    assert status(model, min(children)) == "superseded"
    model.teardown()
