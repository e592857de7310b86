"""The planner against a simple model with random topologies, histories and crashes.

No event is lost, none comes twice, and no child comes before its parent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from feedapi_client.lineage.planner import Planner
from feedapi_client.lineage.states import (
    Action,
    Drained,
    Fail,
    Rediscover,
    Report,
    Save,
    Start,
    State,
    Stop,
)
from feedapi_client.model import FIRST, FeedInfo, Partition, Position

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


class PlannerModel(RuleBasedStateMachine):
    """A driver that reads, delivers, commits and crashes at random.

    Its publisher splits partitions at random, by both methods.
    """

    def __init__(self) -> None:
        super().__init__()
        self.feed = ModelFeed()
        self.store: dict[int, Position] = {}
        self.applied: list[list[int]] = [[] for _ in range(ENTITIES)]
        self.planner = Planner(feed="model")
        self.cursors: dict[int, str] = {}
        self.in_flight: dict[int, tuple[list[ModelEvent], str]] = {}

    @initialize(tells=st.booleans())
    def begin(self, tells: bool) -> None:
        self.feed.tells_last_cursor = tells
        self.discover()

    def act(self, actions: list[Action]) -> None:
        before = set(self.store)
        for action in actions:
            match action:
                case Save(positions):
                    for partition, position in positions.items():
                        stored = self.store.get(partition)
                        assert (stored.revision if stored else None) == position.replaces
                    self.store |= positions
                case Start(partition, cursor):
                    self.cursors.setdefault(partition, cursor)
                case Stop(partition):
                    self.cursors.pop(partition, None)
                case Fail(_, error):
                    raise error
                case Report(partition, text):
                    # It begins at its first event, and the store does not say why (R9).
                    ancestors = self.feed.ancestors.get(partition or 0, ())
                    assert before, text
                    assert ancestors, text
                    assert before.isdisjoint(ancestors), text
                case Rediscover() | Drained():
                    pass

    @rule()
    def discover(self) -> None:
        self.act(self.planner.discover(self.feed.info()))

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
        parent = data.draw(
            st.sampled_from([p for p, log in self.feed.logs.items() if not log.closed])
        )
        self.feed.split(parent, method, left)

    def readable(self) -> list[int]:
        return [p for p in self.cursors if p in self.feed.logs and p not in self.in_flight]

    @precondition(lambda self: self.readable())
    @rule(data=st.data(), size=st.integers(1, 4))
    def read(self, data: st.DataObject, size: int) -> None:
        partition = data.draw(st.sampled_from(self.readable()))
        self.read_one(partition, size)

    def read_one(self, partition: int, size: int) -> None:
        asked = self.cursors[partition]
        asked_closed = self.planner.is_closed(partition)
        events, cursor = self.feed.read(partition, asked, size)
        if cursor == asked:
            self.act(self.planner.ended(partition, asked, asked_closed=asked_closed))
            return
        self.planner.progressed(partition)
        self.planner.delivered(partition)
        self.cursors[partition] = cursor
        self.in_flight[partition] = (events, cursor)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.commit_one(data.draw(st.sampled_from(sorted(self.in_flight))))

    def commit_one(self, partition: int) -> None:
        events, cursor = self.in_flight.pop(partition)
        position = self.planner.checkpoint(partition, cursor)
        stored = self.store.get(partition)
        assert (stored.revision if stored else None) == position.replaces
        self.store[partition] = position
        for entity, number in events:
            self.applied[entity].append(number)
        self.act(self.planner.released(partition, position))

    @rule()
    def crash(self) -> None:
        self.planner = Planner(feed="model")
        self.planner.load(self.store)
        self.cursors, self.in_flight = {}, {}
        self.discover()

    @invariant()
    def each_entity_in_order_and_once(self) -> None:
        for numbers in self.applied:
            assert numbers == list(range(len(numbers)))

    @invariant()
    def superseded_is_never_read(self) -> None:
        for partition in self.cursors:
            assert self.planner.entries[partition].state in (State.READING, State.CAUGHT_UP)

    def teardown(self) -> None:
        for _ in range(200):
            for partition in list(self.in_flight):
                self.commit_one(partition)
            self.discover()
            for partition in self.readable():
                if partition in self.cursors:
                    self.read_one(partition, 5)
            if not self.in_flight and self.planner.finished():
                break
        assert [len(numbers) for numbers in self.applied] == self.feed.written
        self.each_entity_in_order_and_once()


TestPlannerModel = PlannerModel.TestCase
TestPlannerModel.settings = settings(stateful_step_count=40)
