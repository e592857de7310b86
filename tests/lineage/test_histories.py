"""Histories that ended wrongly once: events lost, repeated or never asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from feedapi_client import (
    FeedInfo,
    LostPartitionError,
    Partition,
    Position,
    ProtocolError,
    StoreError,
)
from feedapi_client.lineage.planner import (
    Action,
    Fail,
    Planner,
    Rediscover,
    Report,
    Save,
    Start,
    State,
    Stop,
)
from feedapi_client.model import FIRST

CLOSED, CHILD = Partition(0, closed=True), Partition(1, starts_after=0)


def info(*partitions: Partition | int) -> FeedInfo:
    listed = [p if isinstance(p, Partition) else Partition(p) for p in partitions]
    return FeedInfo("v2-draft", {p.id: p for p in listed})


def planner(stored: Mapping[int, Position] | None = None, **options: Any) -> Planner:
    made = Planner(feed="http://feed", **options)
    made.load(stored or {})
    return made


def of(kind: type[Any], actions: list[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def successor(id: int, *ancestors: int) -> Partition:
    return Partition(id, cursor_from=ancestors)


def of_open(listed: FeedInfo) -> set[int]:
    return {p.id for p in listed.partitions.values() if not p.closed} - {1}


def broken(partition: int) -> ProtocolError:
    return ProtocolError("broken", partition=partition)


def end_in_flight() -> Planner:
    """The last batch of a closed partition is in flight, and its end was seen."""
    made = planner()
    made.discover(info(CLOSED, CHILD))
    made.delivered(0)
    made.ended(0, "z", asked_closed=True)
    return made


def test_r06_an_end_that_was_seen_before_the_partition_was_open_again_drains_nothing() -> None:
    made = end_in_flight()
    made.discover(info(0, CHILD))  # an event is published
    made.discover(info(CLOSED, CHILD))
    position = made.checkpoint(0, "z")
    assert position.status == "open"
    made.released(0, position)
    assert made.entries[0].state is State.READING
    assert made.entries[1].state is State.WAITING


def test_r15_a_partition_that_is_open_again_is_asked_on() -> None:
    made = end_in_flight()
    assert Start(0, FIRST) in made.discover(info(0, CHILD))
    made.released(0, made.checkpoint(0, "z"))
    assert made.entries[0].state is State.READING


def test_r09_a_successor_waits_while_another_instance_has_an_ancestor_of_a_sibling() -> None:
    stored = {0: Position("a"), 1: Position("a")}
    made = planner(stored, shared=True)
    made.discover(info(0, 1))
    made.refresh(stored, owned={0}, others={1})
    made.discover(info(successor(2, 0, 1), successor(3, 0)))
    assert of(Start, made.refresh(stored, owned={0, 3}, others={1})) == []


def test_r18_a_failure_parks_no_stranger() -> None:
    made = planner({0: Position("a"), 1: Position("b")})
    made.discover(info(0, 1))
    made.delivered(0)
    made.delivered(1)
    made.discover(info(successor(2, 0), successor(3, 1)))
    made.fail(0, broken(0))
    assert made.entries[2].state is State.PARKED
    assert of(Start, made.released(1, made.checkpoint(1, "c"))) == [Start(3, "c")]


@pytest.mark.parametrize("listed", [(CHILD, 0), (0, CHILD)], ids=["child first", "parent first"])
@pytest.mark.parametrize("shared", [False, True])
def test_r08_what_waits_does_not_depend_on_the_order_of_the_list(
    listed: tuple[Partition | int, ...], shared: bool
) -> None:
    stored = {0: Position("z", "drained", 3)}
    made = planner(stored, shared=shared)
    actions = made.discover(info(*listed))
    if shared:
        actions += made.refresh(stored, owned={0, 1}, others=())
    assert of(Start, actions) == [Start(0, "z")]


def test_r08_a_child_that_is_listed_again_while_its_parent_is_in_flight_waits_for_it() -> None:
    made = planner({0: Position("a")})
    made.discover(info(CLOSED, CHILD))
    made.delivered(0)
    made.discover(info(CLOSED))
    made.discover(info(CLOSED, CHILD))
    assert made.entries[1].state is State.WAITING
    made.ended(0, "z", asked_closed=True)
    assert of(Start, made.released(0, made.checkpoint(0, "z"))) == [Start(1, FIRST)]


def test_r18_what_is_parked_is_told_once() -> None:
    made = planner({0: Position("a"), 1: Position("b")})
    told = [of(Fail, made.discover(info(successor(2, 0, 1)))) for _ in range(4)]
    assert [len(fails) for fails in told] == [1, 0, 0, 0]
    made = planner({9: Position("a"), 0: Position("z", "drained")})
    made.discover(info(9, Partition(0, closed=True, starts_after=9)))
    told = [of(Fail, made.discover(info(Partition(0, starts_after=9)))) for _ in range(4)]
    assert [len(fails) for fails in told] == [0, 1, 0, 0]
    assert made.entries[0].state is State.PARKED


def test_r05_a_batch_that_is_released_late_takes_no_older_position_back() -> None:
    made = planner({0: Position("a")}, shared=True)
    made.discover(info(0))
    made.refresh({0: Position("a")}, owned={0}, others=())
    made.delivered(0)
    position = made.checkpoint(0, "b")
    made.committed(0, position)
    made.refused([0])
    stored = {0: Position("b", "superseded", position.revision + 7), 1: Position("b")}
    made.refresh(stored, owned=(), others={1})
    made.released(0, position)
    assert made.entries[0].position == stored[0]
    assert made.entries[0].state is State.SUPERSEDED


def test_r10_a_drained_partition_that_is_listed_open_asks_for_one_discovery() -> None:
    stored = {0: Position("z", "drained", 3)}
    made = planner(stored, shared=True)
    made.discover(info(0))
    asked = [of(Rediscover, made.refresh(stored)) for _ in range(3)]
    assert sum(map(len, asked)) <= 1


def test_r06_a_drained_partition_that_is_read_on_is_open_in_the_store() -> None:
    made = planner({0: Position("z", "drained", 3)})
    (save, start) = made.discover(info(0))
    assert isinstance(save, Save)
    assert (save.positions[0].cursor, save.positions[0].status) == ("z", "open")
    assert start == Start(0, "z")
    assert list(made.listed_again()) == [0], "it is still a problem (R11)"
    again = planner(save.positions)  # after a crash
    assert of(Start, again.discover(info(CLOSED))) == [Start(0, "z")]


@pytest.mark.parametrize("owned", [{0, 1}, {1}])
def test_r06_a_list_that_is_older_than_the_store_opens_nothing_again(owned: set[int]) -> None:
    """Another instance has drained it. The next discovery tells whether it is open again."""
    stored = {0: Position("z", "drained", 3)}
    for later in (info(0, CHILD), info(CLOSED, CHILD)):
        made = planner({0: Position("a")}, shared=True)
        made.discover(info(0, CHILD))
        actions = made.refresh(stored, owned=owned, others=())
        assert actions == [Start(1, FIRST), Rediscover()]
        made.refresh(stored, owned={0, 1}, others=())
        assert made.ended(0, "z", asked_closed=False) == []
        actions = made.discover(later)
        assert made.listed_again().keys() == of_open(later)
        assert {start.partition for start in of(Start, actions)} == of_open(later)
        assert {id for save in of(Save, actions) for id in save.positions} == of_open(later)


def test_r06_a_discovery_that_began_before_the_drained_position_was_loaded_is_older() -> None:
    made = planner({0: Position("a")}, shared=True)
    made.discover(info(CLOSED, CHILD))
    began = made.begin_load()
    made.refresh({0: Position("z", "drained", 3)}, owned={0, 1}, others=())
    assert made.discover(info(0, CHILD), began=began) == []
    assert made.entries[0].state is State.DRAINED
    assert Start(0, "z") in made.discover(info(0, CHILD))


def test_r06_a_partition_that_is_open_when_its_end_is_saved_shows_its_end_anew() -> None:
    made = end_in_flight()
    position = made.checkpoint(0, "z")  # a slow save
    made.discover(info(0, CHILD))  # an event is published
    actions = made.released(0, position)
    assert [save.positions[0].status for save in of(Save, actions)] == ["open"]
    made.discover(info(CLOSED, CHILD))
    assert made.entries[0].state is State.READING


def test_r08_one_hole_in_one_discovery_is_not_final() -> None:
    made = planner({0: Position("a")})
    made.discover(info(CLOSED, CHILD))
    actions = made.discover(info(CHILD))
    assert of(Fail, actions) == []
    assert made.entries[1].waits_for == (0,)
    assert of(Rediscover, actions)
    assert not made.finished()
    assert of(Start, made.discover(info(CLOSED, CHILD))) == [Start(0, "a")]
    made.discover(info(CHILD))
    (fail,) = of(Fail, made.discover(info(CHILD)))
    assert isinstance(fail.error, LostPartitionError)


def test_r09_a_hole_at_a_partition_without_a_successor_is_not_final() -> None:
    made = planner({0: Position("a"), 1: Position("b")})
    made.discover(info(0, 1))
    actions = made.discover(info(0, successor(2, 7)))
    assert of(Fail, actions) == []
    assert of(Rediscover, actions)
    assert made.entries[2].waits_for == (1,)
    (fail,) = of(Fail, made.discover(info(0, successor(2, 7))))
    assert isinstance(fail.error, LostPartitionError)


def test_r06_a_drained_partition_with_another_last_cursor_is_reported_and_asked_once_more() -> None:
    made = planner({0: Position("z", "drained", 3)})
    listed = info(Partition(0, closed=True, last_cursor="zz"), CHILD)
    (report,) = of(Report, made.discover(listed))
    assert report.partition == 0
    assert "'zz'" in report.text
    assert made.doubted(0)
    assert of(Report, made.discover(listed)) == []
    assert made.entries[1].state is State.READING, "an operator may have drained it"
    assert not planner({0: Position("zz", "drained", 3)}).doubted(0)


def test_r08_the_children_of_a_drained_parent_that_is_split_later_are_read() -> None:
    made = planner({0: Position("z", "drained", 3), 1: Position("q")})
    made.discover(info(CLOSED, 1))
    child = Partition(4, starts_after=0)
    actions = made.discover(info(successor(2, 0), successor(3, 0), 1, child))
    assert of(Fail, actions) == []
    assert {start.partition for start in of(Start, actions)} == {2, 3, 4}


def test_r08_a_child_that_had_begun_goes_on_behind_a_superseded_parent() -> None:
    made = planner({0: Position("z", "superseded", 4), 4: Position("c")})
    actions = made.discover(info(successor(2, 0), Partition(4, starts_after=0)))
    assert Start(4, "c") in actions


def test_r18_a_successor_of_a_parked_ancestor_without_a_position_is_parked() -> None:
    made = planner({9: Position("a")})
    made.discover(info(9, 1))
    made.fail(1, broken(1))
    assert of(Start, made.discover(info(9, successor(2, 1)))) == []
    assert made.entries[2].state is State.PARKED


def test_r09_an_edge_that_is_listed_late_lets_a_partition_begin_again_at_that_cursor() -> None:
    made = planner({0: Position("a"), 9: Position("q")})
    made.discover(info(0, 9, 2))
    actions = made.discover(info(9, successor(2, 0)))
    moves = [each for each in actions if isinstance(each, (Stop, Start))]
    assert moves[-1] == Start(2, "a")
    assert {*moves} == {Stop(0), Stop(2), Start(2, "a")}


def test_r06_an_end_that_is_committed_while_the_lease_goes_counts_at_once() -> None:
    made = planner({0: Position("a")}, shared=True)
    made.discover(info(CLOSED, CHILD))
    made.refresh({0: Position("a")}, owned={0, 1}, others=())
    made.delivered(0)
    made.ended(0, "z", asked_closed=True)
    position = made.checkpoint(0, "z")
    made.revoke([0])
    actions = made.released(0, position)
    assert made.entries[0].state is State.DRAINED
    assert Start(1, FIRST) in actions


@pytest.mark.parametrize("unsure", [False, True], ids=["claimed", "refused"])
def test_r07_what_is_gone_from_the_store_does_not_begin_at_its_first_event(unsure: bool) -> None:
    made = planner({0: Position("a"), 1: Position("b")}, shared=True)
    made.discover(info(0, 1))
    made.refresh({0: Position("a"), 1: Position("b")}, owned={0}, others={1})
    if unsure:
        made.refused([0])
    else:
        made.revoke([0])
    actions = made.refresh({1: Position("b")}, owned={0}, others={1})
    assert of(Start, actions) == []
    (fail,) = of(Fail, actions)
    assert fail.partition == 0
    assert type(fail.error) is StoreError
    assert "no longer in the store" in str(fail.error)


def test_r07_a_position_that_was_never_saved_is_not_gone() -> None:
    made = planner({9: Position("q")}, shared=True)
    made.discover(info(9, 1))
    made.refresh({9: Position("q")}, owned={1}, others=())
    made.delivered(1)
    made.checkpoint(1, "a")
    made.refused([1])  # another one has saved it first, and the database went back
    made.released(1)
    actions = made.refresh({9: Position("q")}, owned={1}, others=())
    assert of(Start, actions) == [Start(1, FIRST)]


def test_r07_what_is_closed_at_a_start_at_the_end_is_stored_at_its_end() -> None:
    made = planner(start="last")
    listed = info(0, Partition(1, closed=True), Partition(2, closed=True, last_cursor="l2"))
    assert made.unresolved(listed) == [0, 1]
    (save, *_) = made.discover(listed, ends={0: "e0", 1: "e1"})
    assert isinstance(save, Save)
    stored = {p: (at.cursor, at.status) for p, at in save.positions.items()}
    assert stored == {0: ("e0", "open"), 1: ("e1", "drained"), 2: ("l2", "drained")}
    selects = planner(start="last", selects_events=True)
    assert selects.unresolved(listed) == [0, 1, 2]
    again = planner(save.positions)
    assert Start(1, "e1") in again.discover(info(0, 1, 2))
