"""Planners on one store against a simple model: random topologies, histories, leases and crashes.

Whatever they do, no event is lost, none is applied twice, no child comes before its parent, and all
is read in the end. The suite runs a hundred histories of each kind, the slow test thousands: one in
two thousand showed instances that refused each other's commits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from feedapi_client.lineage.planner import Planner
from feedapi_client.lineage.states import Action, Fail, Report, Save, Start, State, Stop
from feedapi_client.model import FIRST, FeedInfo, Partition, Position
from feedapi_client.sharing.assignment import merged

ENTITIES = 6
ModelEvent = tuple[int, int]  # entity, number


@dataclass
class Log:
    """One partition of the model.

    None stands for an event that went to another successor, so that cursors keep their meaning.
    """

    owns: set[int]
    events: list[ModelEvent | None] = field(default_factory=list)
    closed: bool = False
    starts_after: int | None = None
    cursor_from: tuple[int, ...] = ()


class ModelFeed:
    def __init__(self) -> None:
        self.logs: dict[int, Log] = {0: Log(set(range(ENTITIES)))}
        self.written = [0] * ENTITIES
        self.next_id = 1
        self.tells_last_cursor = True
        self.ancestors: dict[int, tuple[int, ...]] = {}

    def append(self, entity: int) -> None:
        owner = next(log for log in self.logs.values() if entity in log.owns and not log.closed)
        owner.events.append((entity, self.written[entity]))
        self.written[entity] += 1

    def split(self, parent: int, method: str, left: set[int]) -> None:
        log = self.logs[parent]
        for owns in (log.owns & left, log.owns - left):
            child = Log(owns)
            if method == "starts-after":
                child.starts_after = parent
            else:
                child.cursor_from = (parent, *log.cursor_from)
                self.ancestors[self.next_id] = child.cursor_from
                child.events = [h if h is not None and h[0] in owns else None for h in log.events]
            self.logs[self.next_id] = child
            self.next_id += 1
        if method == "starts-after":
            log.closed = True
        else:
            del self.logs[parent]

    def info(self) -> FeedInfo:
        listed = {}
        for p, log in self.logs.items():
            tells = self.tells_last_cursor and log.closed and log.events
            last = str(len(log.events)) if tells else None
            listed[p] = Partition(p, log.closed, last, log.starts_after, log.cursor_from)
        return FeedInfo("v2-draft", listed)

    def read(self, partition: int, cursor: str, size: int) -> tuple[list[ModelEvent], str]:
        at = 0 if cursor == FIRST else int(cursor)
        page = self.logs[partition].events[at : at + size]
        return [h for h in page if h is not None], str(at + len(page)) if page else cursor


class ModelInstance:
    """What one instance has in memory. `number` is its name."""

    def __init__(self, number: int, store: dict[int, Position], *, shared: bool) -> None:
        self.number = number
        self.planner = Planner(feed="model", shared=shared)
        self.planner.load(store)
        self.owned: set[int] = set()
        self.cursors: dict[int, str] = {}
        self.in_flight: dict[int, tuple[list[ModelEvent], str]] = {}


class PlannerModel(RuleBasedStateMachine):
    """Instances that read, deliver, commit and crash at random.

    Their publisher splits partitions at random, by both methods.
    """

    count = 1
    graceful = False

    def __init__(self) -> None:
        super().__init__()
        self.feed = ModelFeed()
        self.store: dict[int, Position] = {}
        self.applied: list[list[int]] = [[] for _ in range(ENTITIES)]
        self.instances: list[ModelInstance] = []

    @initialize(tells=st.booleans())
    def begin(self, tells: bool) -> None:
        self.feed.tells_last_cursor = tells
        for number in range(self.count):
            self.instances.append(self.new(number))
            self.discover_one(self.instances[number])

    def new(self, number: int) -> ModelInstance:
        return ModelInstance(number, self.store, shared=self.count > 1)

    # What an instance does

    def save(self, positions: dict[int, Position]) -> bool:
        """Save all or nothing; False if it is refused."""
        for partition, position in positions.items():
            stored = self.store.get(partition)
            if (stored.revision if stored else None) != position.replaces:
                assert self.count > 1
                return False
        self.store |= positions
        return True

    def act(self, one: ModelInstance, actions: list[Action]) -> None:
        queue, before = list(actions), set(self.store)
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
                case Report(partition, text) if self.count == 1:
                    # It begins at its first event, and the store does not say why (R9).
                    ancestors = self.feed.ancestors.get(partition or 0, ())
                    assert before, text
                    assert ancestors, text
                    assert before.isdisjoint(ancestors), text
                case _:
                    pass

    def discover_one(self, one: ModelInstance) -> None:
        self.act(one, one.planner.discover(self.feed.info()))

    def look(self, one: ModelInstance, wanted: int) -> None:
        """Of several instances: divide the partitions."""

    def readable(self, one: ModelInstance) -> list[int]:
        return [p for p in one.cursors if p in self.feed.logs and p not in one.in_flight]

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

    def commit_one(self, one: ModelInstance, partition: int) -> None:
        """Effects and cursor in one transaction: both or neither."""
        events, cursor = one.in_flight.pop(partition)
        position = one.planner.checkpoint(partition, cursor)
        if not self.save({partition: position}):
            self.lose(one, partition)
            return
        for entity, number in events:
            self.applied[entity].append(number)
        self.act(one, one.planner.released(partition, position))

    def lose(self, one: ModelInstance, partition: int) -> None:
        """A commit was refused."""

    # At random

    def choices(self, of: Callable[[ModelInstance], Iterable[int]]) -> list[tuple[int, int]]:
        return [(one.number, p) for one in self.instances for p in sorted(of(one))]

    @rule(data=st.data())
    def discover(self, data: st.DataObject) -> None:
        self.discover_one(data.draw(st.sampled_from(self.instances)))

    @precondition(lambda self: self.choices(self.readable))
    @rule(data=st.data(), size=st.integers(1, 4))
    def read(self, data: st.DataObject, size: int) -> None:
        number, partition = data.draw(st.sampled_from(self.choices(self.readable)))
        self.read_one(self.instances[number], partition, size)

    @precondition(lambda self: self.choices(lambda one: one.in_flight))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        number, partition = data.draw(st.sampled_from(self.choices(lambda one: one.in_flight)))
        self.commit_one(self.instances[number], partition)

    @precondition(lambda self: not self.graceful)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.count - 1))
        self.instances[number] = self.new(number)
        self.discover_one(self.instances[number])

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

    # What holds

    @invariant()
    def each_entity_in_order_and_once(self) -> None:
        for numbers in self.applied:
            assert numbers == list(range(len(numbers)))

    @invariant()
    def only_what_runs_is_read(self) -> None:
        for one in self.instances:
            for partition in one.cursors:
                assert one.planner.entries[partition].state in (State.READING, State.CAUGHT_UP)

    def teardown(self) -> None:
        """Whatever happened, everything goes on and comes to its end."""
        for _ in range(200):
            for one in self.instances:
                for partition in list(one.in_flight):
                    self.commit_one(one, partition)
                self.discover_one(one)
                self.look(one, 5)
                for partition in self.readable(one):
                    if partition in one.cursors:
                        self.read_one(one, partition, 5)
            if [len(numbers) for numbers in self.applied] == self.feed.written:
                break
        assert [len(numbers) for numbers in self.applied] == self.feed.written
        self.each_entity_in_order_and_once()


class SharedPlannerModel(PlannerModel):
    """Instances that also claim and lose leases at random."""

    count = 3

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

    @rule(number=st.integers(0, 2), wanted=st.integers(0, 12))
    def rebalance(self, number: int, wanted: int) -> None:
        self.look(self.instances[number], wanted)

    @precondition(lambda self: self.leases and not self.graceful)
    @rule(data=st.data(), to=st.integers(0, 2))
    def take_away(self, data: st.DataObject, to: int) -> None:
        """The heartbeat of the owner expires, and it does not notice."""
        partition = data.draw(st.sampled_from(sorted(self.leases)))
        if to != self.leases[partition]:
            del self.leases[partition]

    @rule(number=st.integers(0, 2))
    def give_away(self, number: int) -> None:
        """Gracefully: only what is not in flight."""
        one = self.instances[number]
        self.drop(one, one.owned - one.in_flight.keys())


class GracefulModel(SharedPlannerModel):
    """Leases are only given away, so that no commit is ever refused: nothing is handled twice
    although there is no transaction."""

    graceful = True


MODELS = (PlannerModel, SharedPlannerModel, GracefulModel)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("histories", [100, pytest.param(3000, marks=pytest.mark.slow)])
def test_every_history_comes_to_its_end(model: type[PlannerModel], histories: int) -> None:
    run_state_machine_as_test(
        model,
        settings=settings(
            max_examples=histories,
            stateful_step_count=40,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
