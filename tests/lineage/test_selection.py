"""`Planner(partitions=...)`: only these are read, and the positions of others do not change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client import FeedInfo, LineageError, LostPartitionError, Partition, Position
from feedapi_client.lineage.graph import descendants
from feedapi_client.lineage.planner import Action, Fail, Planner, Report, Save, Start, Stop
from feedapi_client.lineage.states import State
from feedapi_client.model import FIRST


def info(*partitions: Partition | int) -> FeedInfo:
    listed = [p if isinstance(p, Partition) else Partition(p) for p in partitions]
    return FeedInfo("v2-draft", {p.id: p for p in listed})


def planner(
    partitions: Iterable[int] | None,
    stored: Mapping[int, Position] | None = None,
    **options: Any,
) -> Planner:
    made = Planner(feed="http://feed", partitions=partitions, **options)
    made.load(stored or {})
    return made


def started(actions: list[Action]) -> dict[int, str]:
    return {a.partition: a.cursor for a in actions if isinstance(a, Start)}


def saved(actions: list[Action]) -> dict[int, Position]:
    return {
        p: position for a in actions if isinstance(a, Save) for p, position in a.positions.items()
    }


def commit(made: Planner, partition: int, cursor: str) -> list[Action]:
    made.delivered(partition)
    return made.released(partition, made.checkpoint(partition, cursor))


def test_only_the_selected_partitions_are_started_and_saved() -> None:
    made = planner([1, 2])
    actions = made.discover(info(0, 1, 2))
    assert started(actions) == {1: FIRST, 2: FIRST}
    assert saved(actions) == {1: Position(FIRST), 2: Position(FIRST)}
    assert set(made.entries) == {1, 2}
    assert made.selected == frozenset({1, 2})


def test_without_a_selection_all_are_read() -> None:
    made = planner(None)
    assert started(made.discover(info(0, 1))) == {0: FIRST, 1: FIRST}
    assert made.selected is None
    made.select([7])
    assert made.discover(info(0, 1)) == []


def test_a_partition_that_appears_later_and_is_not_selected_is_not_read() -> None:
    made = planner([0])
    made.discover(info(0))
    assert made.discover(info(0, 1)) == []


@pytest.mark.parametrize("partitions", [[], [True], ["1"], [1.0], [None]])
def test_an_impossible_selection_is_a_value_error(partitions: Any) -> None:
    with pytest.raises(ValueError, match="partitions must"):
        Planner(feed="http://feed", partitions=partitions)


def test_r08_a_successor_of_what_is_gone_waits_for_what_that_may_have_come_after() -> None:
    """Partition 1 came after 0, and was split by its cursors before anyone saw it."""
    made = planner([0, 2])
    closed = Partition(0, closed=True, last_cursor="end")
    actions = made.discover(info(closed, Partition(2, cursor_from=(1,)), 3))
    assert started(actions) == {0: FIRST}
    assert saved(actions) == {0: Position(FIRST), 2: Position(FIRST)}
    assert started(commit(made, 0, "end")) == {2: FIRST}


# ---------------------------------------------------------------------- unknown partitions


def test_an_unknown_partition_is_an_error_that_names_it() -> None:
    with pytest.raises(LineageError) as caught:
        planner([0, 9]).discover(info(0, 1))
    assert caught.value.partition == 9
    assert "partition 9: the feed does not list this partition, only 0, 1" in str(caught.value)


def test_several_unknown_partitions_are_all_named() -> None:
    with pytest.raises(LineageError, match=r"does not list partitions 8, 9, only 0, 1"):
        planner([9, 0, 8]).discover(info(0, 1))


def test_of_many_listed_partitions_twenty_are_named() -> None:
    with pytest.raises(LineageError, match=r"only 0, 1, .*, 19 …$"):
        planner([99]).discover(info(*range(30)))


def test_r07_a_discovery_that_lists_nothing_is_waited_out_with_a_selection_too() -> None:
    assert planner([99]).discover(info()) == []


def test_an_unknown_partition_leaves_the_planner_as_it_was() -> None:
    made = planner([0, 9], start="last")
    with pytest.raises(LineageError):
        made.discover(info(0), ends={0: "e"})
    assert made.entries == {}
    assert made.unresolved(info(0, 9)) == [0, 9]
    assert started(made.discover(info(0, 9), ends={0: "e", 9: "f"})) == {0: "e", 9: "f"}


def test_r11_a_selected_partition_that_vanishes_is_reported_and_no_unknown_one() -> None:
    made = planner([0])
    made.discover(info(0, 1))
    actions = made.discover(info(1))
    assert [type(action) for action in actions] == [Stop, Report]
    stored = planner([0], {0: Position("a")})
    assert [type(action) for action in stored.discover(info(1))] == [Report]


def test_r11_a_selected_partition_whose_successors_are_not_selected_is_reported_with_them() -> None:
    made = planner([0])
    made.discover(info(0))
    _, report = made.discover(info(Partition(2, cursor_from=(0,)), Partition(1, cursor_from=(0,))))
    assert isinstance(report, Report)
    assert report.text == (
        "is no longer listed, and partitions 1, 2, which may take its cursor, are not selected: it "
        "stops at its cursor '_first'. To read on, select them, too"
    )
    made = planner([0], {0: Position("a")})
    (report,) = made.discover(info(Partition(1, cursor_from=(0,))))
    assert isinstance(report, Report)
    assert report.text.endswith(
        "partition 1, which may take its cursor, is not selected: it stops at its cursor 'a'. "
        "To read on, select it, too"
    )


# ---------------------------------------------------------------------- order


def test_r08_a_selected_child_waits_for_its_selected_parent() -> None:
    made = planner([0, 1])
    listed = info(
        Partition(0, closed=True, last_cursor="z"),
        Partition(1, starts_after=0),
        Partition(2, starts_after=0),
    )
    assert started(made.discover(listed)) == {0: FIRST}
    assert started(commit(made, 0, "z")) == {1: FIRST}


def test_r08_a_parent_that_is_not_selected_is_not_waited_for() -> None:
    made = planner([1])
    assert started(made.discover(info(0, Partition(1, starts_after=0)))) == {1: FIRST}


def test_r08_a_parent_that_is_not_selected_may_be_gone() -> None:
    made = planner([0])
    made.discover(info(0))
    made.select([1])
    assert started(made.discover(info(0, Partition(1, starts_after=7)))) == {1: FIRST}


def test_r08_a_parent_that_is_gone_is_lost_as_without_a_selection() -> None:
    """Both were read before, without a selection, and 7 not to its end."""
    child = Partition(1, starts_after=7)
    for selected in ([0, 1], None):
        made = planner(selected, {0: Position("a"), 7: Position("b")})
        assert started(made.discover(info(0, child))) == {0: "a"}
        (fail,) = (a for a in made.discover(info(0, child)) if isinstance(a, Fail))
        assert isinstance(fail.error, LostPartitionError)
        made = planner(selected, {0: Position("a"), 7: Position("b", "drained")})
        assert started(made.discover(info(0, child))) == {0: "a", 1: FIRST}


def test_r09_what_vanished_is_lost_as_without_a_selection() -> None:
    """Partition 1 had a position, and 2 may hold its history."""
    for selected in ([0, 2], None):
        made = planner(selected, {0: Position("a"), 1: Position("b")})
        assert started(made.discover(info(0, Partition(2, cursor_from=(7,))))) == {0: "a"}
        actions = made.discover(info(0, Partition(2, cursor_from=(7,))))
        (fail,) = (a for a in actions if isinstance(a, Fail))
        assert isinstance(fail.error, LostPartitionError)
        assert "partition 1 had one and vanished" in str(fail.error)


def test_r09_an_old_cursor_is_not_taken_while_those_that_took_it_have_vanished() -> None:
    """The publisher was rolled back behind a split into 1 and 2, and has split 0 again (R11)."""
    stored = {0: Position("a", "superseded"), 1: Position("b"), 2: Position("c")}
    made = planner(None, stored)
    split = info(Partition(3, cursor_from=(0,)), Partition(4, cursor_from=(0,)))
    assert not started(made.discover(split))
    actions = made.discover(split)
    assert not started(actions)
    errors = {a.partition: a.error for a in actions if isinstance(a, Fail)}
    assert errors.keys() == {3, 4}
    assert all(isinstance(error, LostPartitionError) for error in errors.values())
    assert "only finds the cursor that 0 had, while partitions 1, 2 had one" in str(errors[3])


def test_r08_order_is_not_kept_across_a_partition_that_is_not_selected() -> None:
    made = planner([0, 2])
    listed = info(
        Partition(0, closed=True),
        Partition(1, closed=True, starts_after=0),
        Partition(2, starts_after=1),
    )
    assert set(started(made.discover(listed))) == {0, 2}


# ---------------------------------------------------------------------- first start


def test_r07_only_selected_partitions_are_asked_for_their_end() -> None:
    made = planner([1], start="last")
    assert made.unresolved(info(0, 1)) == [1]
    assert saved(made.discover(info(0, 1), ends={1: "e"})) == {1: Position("e")}


def test_r07_start_counts_when_none_of_the_selected_has_a_position() -> None:
    made = planner([1], {0: Position("a")}, start="last")
    assert made.unresolved(info(0, 1)) == [1]
    assert started(made.discover(info(0, 1), ends={1: "e"})) == {1: "e"}


def test_r07_start_must_not_name_a_partition_that_is_not_selected() -> None:
    made = planner([1], {3: Position("a")}, start={3: "c"})
    with pytest.raises(LineageError, match=r"partition 3: .*not selected"):
        made.discover(info(0, Partition(1, cursor_from=(3,))))
    assert made.entries == {}


def test_r07_a_cursor_for_a_selected_partition() -> None:
    assert started(planner([1], start={1: "c"}).discover(info(0, 1))) == {1: "c"}


# ---------------------------------------------------------------------- cursor transfer


def test_r09_a_cursor_is_transferred_among_selected_partitions() -> None:
    made = planner([0, 1], {0: Position("a")})
    actions = made.discover(info(Partition(1, cursor_from=(0,)), Partition(2, cursor_from=(0,))))
    assert saved(actions) == {1: Position("a"), 0: Position("a", "superseded", 2)}
    assert started(actions) == {1: "a"}
    # A consumer without the selection finds what it needs for the other successor.
    whole = planner(None, saved(actions))
    listed = info(Partition(1, cursor_from=(0,)), Partition(2, cursor_from=(0,)))
    assert started(whole.discover(listed)) == {1: "a", 2: "a"}


@pytest.mark.parametrize("status", ["open", "drained"])
@pytest.mark.parametrize("others", [{}, {3: Position("c")}])
def test_r09_the_cursor_of_an_ancestor_that_is_not_selected_is_left_to_it(
    status: Any, others: dict[int, Position]
) -> None:
    stored = {0: Position("a", status), **others}
    made = planner([1, 3], stored)
    actions = made.discover(info(Partition(1, cursor_from=(0,)), 3))
    (fail,) = [action for action in actions if isinstance(action, Fail)]
    assert fail.partition == 1
    assert "partition 1: is to take over the cursor that is stored for partition 0" in str(
        fail.error
    )
    assert not {0, 1} & saved(actions).keys()
    assert set(started(actions)) == {3}


@pytest.mark.parametrize("start", ["first", "last"])
def test_r09_a_superseded_cursor_of_others_is_taken_and_left_as_it_is(start: Any) -> None:
    stored = {0: Position("a", "superseded", 4), 9: Position("b", "superseded", 4)}
    made = planner([1], stored, start=start)
    listed = info(Partition(1, cursor_from=(0, 9)), Partition(2, cursor_from=(0, 9)))
    actions = made.discover(listed)
    assert saved(actions) == {1: Position("a")}
    assert started(actions) == {1: "a"}


def test_r09_an_ancestor_that_is_neither_stored_nor_selected_does_not_count() -> None:
    made = planner([1])
    assert started(made.discover(info(0, Partition(1, cursor_from=(0,))))) == {1: FIRST}


def test_r09_what_went_to_successors_that_are_not_selected_is_not_lost() -> None:
    """Partition 4 came after 0 and was split to 5 before anyone saw it; 1 was split to 2."""
    stored = {0: Position("a"), 1: Position("b")}
    made = planner([0, 1, 5], stored)
    closed = Partition(0, closed=True, last_cursor="a")
    listed = info(closed, Partition(5, cursor_from=(4,)), Partition(2, cursor_from=(1,)))
    actions = made.discover(listed)
    assert not [action for action in actions if isinstance(action, Fail)]
    assert started(actions) == {5: FIRST}
    # Later the successor is split itself. What it took the cursor of is no more lost than before.
    made = planner([0, 1], stored)
    made.discover(info(closed, Partition(2, cursor_from=(1,))))
    made.select([5])
    actions = made.discover(info(closed, Partition(5, cursor_from=(4,)), 3))
    assert started(actions) == {5: FIRST}


def test_r09_a_successor_that_is_not_selected_takes_nothing() -> None:
    made = planner([0], {0: Position("a")})
    made.discover(info(0))
    actions = made.discover(info(0, Partition(1, cursor_from=(0,))))
    assert actions == []
    assert made.entries[0].state is State.READING


# ---------------------------------------------------------------------- growing


def test_partitions_added_to_the_selection_are_started_by_the_next_discovery() -> None:
    made = planner([0])
    listed = info(Partition(0, closed=True, last_cursor="z"), Partition(1, starts_after=0))
    made.discover(listed)
    made.select([1])
    assert made.selected == frozenset({0, 1})
    assert made.discover(listed) == []
    assert started(commit(made, 0, "z")) == {1: FIRST}


def test_a_stored_position_counts_when_its_partition_is_added() -> None:
    made = planner([0], {1: Position("b", "open", 3)})
    made.select([1])
    assert started(made.discover(info(0, 1))) == {0: FIRST, 1: "b"}
    assert made.checkpoint(1, "c") == Position("c", "open", 4)


@pytest.mark.parametrize(
    ("roots", "among", "found"),
    [
        ({0}, {1, 2, 3, 4, 5}, {1, 2, 3, 4}),
        ({0}, {2, 3, 5}, {3}),
        ({5}, {1, 2, 3, 4}, set()),
        ({1, 5}, {2, 9}, {2}),
    ],
)
def test_descendants_are_found_by_both_split_methods(
    roots: set[int], among: set[int], found: set[int]
) -> None:
    listed = {
        4: Partition(4, starts_after=3),
        3: Partition(3, cursor_from=(0,)),
        2: Partition(2, starts_after=1),
        1: Partition(1, starts_after=0),
        5: Partition(5),
    }
    if 1 not in among:
        listed.pop(4)
    assert descendants(listed, roots, among) == found


# ---------------------------------------------------------------------- any topology


@st.composite
def topologies(draw: st.DrawFn) -> tuple[list[Partition], set[int]]:
    """Closed partitions, each after an earlier one or none, and some of them."""
    size = draw(st.integers(1, 8))
    parents = [draw(st.none() | st.integers(0, id - 1)) if id else None for id in range(size)]
    listed = [
        Partition(id, closed=True, last_cursor=f"end of {id}", starts_after=parent)
        for id, parent in enumerate(parents)
    ]
    chosen = draw(st.sets(st.integers(0, size - 1), min_size=1))
    return draw(st.permutations(listed)), chosen


@given(topologies(), st.dictionaries(st.integers(0, 7), st.just(Position("x")), max_size=3))
def test_any_selection_is_read_in_order_and_nothing_else(
    topology: tuple[list[Partition], set[int]], stored: dict[int, Position]
) -> None:
    listed, chosen = topology
    made = planner(chosen, stored)
    actions = made.discover(info(*listed))
    drained: list[int] = []
    touched: set[int] = set()
    while actions:
        touched |= {a.partition for a in actions if isinstance(a, (Start, Stop, Fail))}
        touched |= saved(actions).keys()
        actions = []
        for id in list(made.runnable()):
            drained.append(id)
            actions += commit(made, id, f"end of {id}")
    assert touched == chosen
    assert sorted(drained) == sorted(chosen)
    parent_of = {p.id: p.starts_after for p in listed}
    for position, id in enumerate(drained):
        if parent_of[id] in chosen:
            assert parent_of[id] in drained[:position]
    assert made.finished()
