"""The planner's actions for each input, rule by rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from feedapi_client import (
    AmbiguousLineageError,
    FeedInfo,
    LineageError,
    LostPartitionError,
    NoProgressError,
    Partition,
    Position,
    ProtocolError,
)
from feedapi_client.lineage.planner import (
    Action,
    Drained,
    Fail,
    Planner,
    Rediscover,
    Report,
    Save,
    Start,
    State,
    Stop,
)
from feedapi_client.model import FIRST, LAST


def info(*partitions: Partition | int) -> FeedInfo:
    listed = [p if isinstance(p, Partition) else Partition(p) for p in partitions]
    return FeedInfo("v2-draft", {p.id: p for p in listed})


def planner(stored: Mapping[int, Position] | None = None, **options: Any) -> Planner:
    made = Planner(feed="http://feed", **options)
    made.load(stored or {})
    return made


def of(kind: type[Any], actions: list[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def states(made: Planner) -> dict[int, str]:
    return {entry.id: entry.state.value for entry in made.entries.values()}


def commit(made: Planner, partition: int, cursor: str) -> list[Action]:
    """Deliver a batch up to the cursor, commit it, and ask for the next."""
    made.delivered(partition)
    return made.released(partition, made.checkpoint(partition, cursor))


# ---------------------------------------------------------------------- R4, R5, R6


@pytest.mark.parametrize("ordered", [True, False])
def test_r04_a_child_waits_only_when_ordered(ordered: bool) -> None:
    made = planner(ordered=ordered)
    actions = made.discover(info(Partition(0, closed=True), Partition(1, starts_after=0)))
    assert {action.partition for action in of(Start, actions)} == ({0} if ordered else {0, 1})
    assert states(made)[1] == ("waiting" if ordered else "reading")


def test_r05_a_checkpoint_changes_nothing() -> None:
    made = planner()
    made.discover(info(0))
    made.delivered(0)
    assert made.checkpoint(0, "a") == made.checkpoint(0, "a") == Position("a", "open", 2)
    assert made.entries[0].position == Position(FIRST)
    assert made.checkpoint(0, "b", after=Position("a", "open", 2)) == Position("b", "open", 3)


def test_r05_lineage_advances_when_the_batch_is_released() -> None:
    made = planner()
    made.discover(info(Partition(0, closed=True, last_cursor="z"), Partition(1, starts_after=0)))
    made.delivered(0)
    position = made.checkpoint(0, "z")
    assert position.status == "drained"
    assert states(made)[1] == "waiting"
    assert of(Start, made.released(0, position)) == [Start(1, FIRST)]


def test_r05_a_batch_released_without_a_commit_drains_nothing() -> None:
    made = planner()
    made.discover(info(Partition(0, closed=True, last_cursor="z"), Partition(1, starts_after=0)))
    made.delivered(0)
    assert made.released(0) == []
    assert states(made) == {0: "reading", 1: "waiting"}


def test_r06_a_committed_last_cursor_stops_and_rediscovers_and_saves_nothing_twice() -> None:
    made = planner()
    made.discover(info(Partition(0, closed=True, last_cursor="z")))
    assert commit(made, 0, "z") == [Stop(0), Drained(0, "z"), Rediscover()]
    assert states(made) == {0: "drained"}


def test_r06_a_last_cursor_that_is_learned_later_drains_and_saves() -> None:
    made = planner()
    made.discover(info(0))
    commit(made, 0, "z")
    actions = made.discover(info(Partition(0, closed=True, last_cursor="z")))
    assert of(Save, actions) == [Save({0: Position("z", "drained", 3)})]
    assert states(made) == {0: "drained"}


def test_r06_without_last_cursor_the_end_counts_if_closed_was_known_before_the_request() -> None:
    made = planner()
    made.discover(info(Partition(0, closed=True)))
    commit(made, 0, "z")
    assert made.ended(0, "z", asked_closed=False) == []
    assert states(made) == {0: "reading"}
    assert of(Save, made.ended(0, "z", asked_closed=True)) == [
        Save({0: Position("z", "drained", 3)})
    ]


def test_r06_the_end_of_an_open_partition_is_caught_up_until_the_next_event() -> None:
    made = planner()
    made.discover(info(0))
    commit(made, 0, "z")
    assert made.ended(0, "z", asked_closed=False) == []
    assert states(made) == {0: "caught up"}
    assert made.finished()
    made.progressed(0)
    assert states(made) == {0: "reading"}
    assert not made.finished()


def test_r06_a_caught_up_partition_that_closes_is_asked_again_at_once() -> None:
    made = planner()
    made.discover(info(0))
    commit(made, 0, "z")
    made.ended(0, "z", asked_closed=False)
    assert made.discover(info(Partition(0, closed=True))) == [Start(0, "z")]


def test_r06_an_uncommitted_end_drains_nothing_and_is_reported_once_if_children_wait() -> None:
    made = planner()
    made.discover(info(Partition(0, closed=True), Partition(1, starts_after=0)))
    made.delivered(0)
    made.released(0)
    (report,) = made.ended(0, "z", asked_closed=True)
    assert isinstance(report, Report)
    assert "not committed" in report.text
    assert made.ended(0, "z", asked_closed=True) == []
    assert of(Start, made.released(0, made.checkpoint(0, "z"))) == [Start(1, FIRST)]


def test_r06_a_drained_partition_that_opens_again_is_read_on() -> None:
    made = planner({0: Position("z", "drained", 4)})
    made.discover(info(Partition(0, closed=True)))
    assert states(made) == {0: "drained"}
    assert of(Start, made.discover(info(0))) == [Start(0, "z")]
    assert made.checkpoint(0, "zz") == Position("zz", "open", 6)


# ---------------------------------------------------------------------- R7


def test_r07_the_first_start_is_one_save_before_all_else() -> None:
    actions = planner().discover(info(0, 1, Partition(2, closed=True)))
    assert actions[0] == Save({p: Position(FIRST) for p in range(3)})
    assert len(of(Save, actions)) == 1


def test_r07_start_last_asks_only_for_ends_that_discovery_leaves_out() -> None:
    made = planner(start="last")
    listed = info(
        0,
        Partition(1, last_cursor="l1"),
        Partition(2, closed=True, last_cursor="l2"),
        Partition(3, closed=True),
    )
    assert made.unresolved(listed) == [0, 3]
    (save, *rest) = made.discover(listed, ends={0: "e0", 3: "e3"})
    assert save == Save(
        {
            0: Position("e0"),
            1: Position("l1"),
            2: Position("l2", "drained"),
            3: Position("e3", "drained"),
        }
    )
    assert {action.partition for action in of(Start, rest)} == {0, 1}


@pytest.mark.parametrize("start", ["first", "last"])
def test_r07_a_later_partition_starts_at_its_first_event_and_is_not_saved_before_a_commit(
    start: Any,
) -> None:
    made = planner(start=start)
    made.discover(info(0), ends={0: "e"})
    assert made.unresolved(info(0, 1)) == []
    assert made.discover(info(0, 1)) == [Start(1, FIRST)]
    assert made.checkpoint(1, "a") == Position("a", "open", 1)


def test_r07_start_counts_for_the_first_discovery_of_an_empty_store_only() -> None:
    made = planner(start="last")
    assert made.discover(info()) == []
    assert made.starts_first
    assert made.unresolved(info(0)) == [0]
    assert of(Start, made.discover(info(0), ends={0: "e"})) == [Start(0, "e")]
    assert not made.starts_first
    assert made.unresolved(info(0, 1)) == []
    stored = planner({0: Position("a")}, start="last")
    assert stored.unresolved(info(0, 1)) == []
    assert of(Start, stored.discover(info(0, 1))) == [Start(0, "a"), Start(1, FIRST)]


def test_r07_no_position_is_ever_last() -> None:
    with pytest.raises(NoProgressError, match="present end is not known"):
        planner(start="last").discover(info(0))
    made = planner(start={0: LAST})
    assert made.unresolved(info(0, 1)) == [0]
    (save, *_) = made.discover(info(0, 1), ends={0: "e"})
    assert save == Save({0: Position("e"), 1: Position(FIRST)})
    with pytest.raises(LineageError, match="only of a listed partition"):
        planner(start={0: LAST}).discover(info(Partition(1, cursor_from=(0,))))


def test_r06_a_drained_partition_that_holds_more_is_read_on() -> None:
    made = planner({0: Position("a")})
    made.discover(info(Partition(0, closed=True), Partition(1, starts_after=0)))
    assert made.reopened(0) == []
    made.ended(0, "a", asked_closed=True)
    assert made.entries[0].state is State.DRAINED
    assert made.reopened(0) == [Save({0: Position("a", "open", 3)}), Start(0, "a")]
    assert (made.entries[0].state, made.entries[1].state) == (State.READING, State.READING)
    assert made.released(0, made.checkpoint(0, "b")) == []
    drained = made.ended(0, "b", asked_closed=True)
    assert of(Save, drained) == [Save({0: Position("b", "drained", 5)})]


def test_r07_a_mapping_gives_the_cursors() -> None:
    (save, *_) = planner(start={1: "c"}).discover(info(0, 1))
    assert save.positions == {0: Position(FIRST), 1: Position("c")}  # type: ignore[union-attr]


def test_r07_a_mapping_that_names_an_unlisted_partition_is_an_error() -> None:
    with pytest.raises(LineageError, match="partition 9"):
        planner(start={9: "c"}).discover(info(0, 1))


def test_r07_an_impossible_start_is_an_error() -> None:
    with pytest.raises(ValueError, match="start"):
        planner(start="middle")


# ---------------------------------------------------------------------- R8


def test_r08_a_child_of_an_open_parent_waits_with_one_warning() -> None:
    made = planner()
    listed = info(0, Partition(1, starts_after=0))
    assert len(of(Report, made.discover(listed))) == 1
    assert of(Report, made.discover(listed)) == []
    assert states(made)[1] == "waiting"


def test_r08_an_unlisted_parent_is_history_at_the_first_start_and_lost_later() -> None:
    fresh = planner()
    assert Start(1, FIRST) in fresh.discover(info(Partition(1, starts_after=0)))
    later = planner({9: Position("a")})
    (fail,) = of(Fail, later.discover(info(9, Partition(1, starts_after=0))))
    assert isinstance(fail.error, LostPartitionError)
    assert states(later)[1] == "parked"


@pytest.mark.parametrize(("status", "lost"), [("drained", False), ("open", True)])
def test_r08_a_stored_parent_that_left_the_list_has_to_be_drained(status: Any, lost: bool) -> None:
    made = planner({0: Position("a", status)})
    listed = info(Partition(1, starts_after=0))
    assert bool(of(Start, made.discover(listed))) is not lost
    assert bool(of(Fail, made.discover(listed))) is lost


@pytest.mark.parametrize("status", ["open", None])
def test_r08_a_partition_waits_for_the_parent_of_a_drained_parent(status: Any) -> None:
    # A failover lost the end of 0 alone, or an operator has rewound it.
    stored = {1: Position("e", "drained", 1)}
    if status:
        stored[0] = Position("a", status, 5)
    made = planner(stored)
    closed = Partition(0, closed=True), Partition(1, closed=True, starts_after=0)
    actions = made.discover(info(*closed, Partition(2, starts_after=1)))
    assert [action.partition for action in of(Start, actions)] == [0]
    assert made.entries[2].waits_for == (0,)
    commit(made, 0, "z")
    assert of(Start, made.ended(0, "z", asked_closed=True)) == [Start(2, FIRST)]


def test_r08_a_chain_is_read_parents_first() -> None:
    made = planner()
    listed = info(
        *[
            Partition(
                p,
                closed=p < 3,
                last_cursor="z" if p < 3 else None,
                starts_after=p - 1 if p else None,
            )
            for p in range(4)
        ]
    )
    assert of(Start, made.discover(listed)) == [Start(0, FIRST)]
    for p in range(3):
        assert of(Start, commit(made, p, "z")) == [Start(p + 1, FIRST)]


# ---------------------------------------------------------------------- R9


def test_r09_all_successors_and_the_ancestor_are_saved_at_once_and_then_started() -> None:
    made = planner({0: Position("a", "open", 7)})
    made.discover(info(0))
    actions = made.discover(info(Partition(1, cursor_from=(0,)), Partition(2, cursor_from=(0,))))
    assert of(Save, actions) == [
        Save({1: Position("a"), 2: Position("a"), 0: Position("a", "superseded", 8)})
    ]
    assert of(Start, actions) == [Start(1, "a"), Start(2, "a")]
    assert (
        actions.index(Stop(0)) < actions.index(of(Save, actions)[0]) < actions.index(Start(1, "a"))
    )


def test_r09_a_transfer_waits_for_the_batch_in_flight() -> None:
    made = planner({0: Position("a")})
    made.discover(info(0))
    made.delivered(0)
    assert of(Save, made.discover(info(Partition(1, cursor_from=(0,))))) == []
    actions = made.released(0, made.checkpoint(0, "b"))
    assert of(Save, actions) == [Save({1: Position("b"), 0: Position("b", "superseded", 3)})]
    assert of(Start, actions) == [Start(1, "b")]


def test_r09_an_abandoned_batch_transfers_the_older_cursor() -> None:
    made = planner({0: Position("a")})
    made.discover(info(0))
    made.delivered(0)
    made.discover(info(Partition(1, cursor_from=(0,))))
    assert of(Start, made.released(0)) == [Start(1, "a")]


def test_r09_a_batch_in_flight_delays_no_unrelated_transfer() -> None:
    made = planner({0: Position("a"), 1: Position("b")})
    made.discover(info(0, 1))
    made.delivered(0)
    actions = made.discover(
        info(Partition(2, cursor_from=(0, 9)), Partition(3, cursor_from=(1, 9)))
    )
    assert of(Start, actions) == [Start(3, "b")]
    assert of(Start, made.released(0)) == [Start(2, "a")]


def test_r09_the_successors_of_a_merge_wait_for_each_ancestor_in_flight() -> None:
    made = planner({0: Position("a"), 1: Position("a")})
    made.discover(info(0, 1))
    made.delivered(1)
    assert (
        of(
            Start,
            made.discover(info(Partition(2, cursor_from=(0, 1)), Partition(3, cursor_from=(0,)))),
        )
        == []
    )
    assert {action.partition for action in of(Start, made.released(1))} == {2, 3}


def test_r09_the_first_ancestor_that_is_not_superseded_counts() -> None:
    made = planner({0: Position("old", "superseded", 5), 1: Position("new")})
    actions = made.discover(
        info(Partition(2, cursor_from=(1, 0)), Partition(3, cursor_from=(1, 0)))
    )
    assert of(Start, actions) == [Start(2, "new"), Start(3, "new")]


def test_r09_a_late_successor_takes_the_superseded_cursor() -> None:
    made = planner({0: Position("a", "superseded", 5), 1: Position("far")})
    actions = made.discover(info(Partition(1, cursor_from=(0,)), Partition(2, cursor_from=(0,))))
    assert set(of(Start, actions)) == {Start(1, "far"), Start(2, "a")}


def test_r09_ancestors_at_different_cursors_are_ambiguous_and_at_the_same_are_not() -> None:
    made = planner({0: Position("a"), 1: Position("b")})
    (fail,) = of(Fail, made.discover(info(Partition(2, cursor_from=(0, 1)))))
    assert isinstance(fail.error, AmbiguousLineageError)
    assert (fail.partition, fail.error.partition) == (2, 2)
    same = planner({0: Position("a"), 1: Position("a")})
    assert of(Start, same.discover(info(Partition(2, cursor_from=(0, 1))))) == [Start(2, "a")]


def test_r09_without_any_position_a_successor_starts_at_the_first_event_or_is_lost() -> None:
    assert set(
        of(Start, planner({9: Position("a")}).discover(info(9, Partition(2, cursor_from=(0,)))))
    ) == {Start(9, "a"), Start(2, FIRST)}
    made = planner({9: Position("a")})
    made.discover(info(Partition(2, cursor_from=(0,))))
    (fail,) = of(Fail, made.discover(info(Partition(2, cursor_from=(0,)))))
    assert isinstance(fail.error, LostPartitionError)


def test_r09_a_successor_of_unknown_ancestors_is_reported_before_it_is_saved() -> None:
    """Unless nothing is stored, or the ancestor was seen and never read."""
    made = planner({0: Position("a", "drained")})
    drained = Partition(0, True, "a")
    actions = made.discover(info(drained, Partition(2, cursor_from=(1,))))
    (report,) = of(Report, actions)
    assert report.partition == 2
    assert "begins at its first event" in report.text
    assert "partition 1" in report.text
    assert actions.index(report) < actions.index(of(Save, actions)[0])
    assert of(Report, made.discover(info(drained, Partition(2, cursor_from=(1,))))) == []
    assert of(Report, planner().discover(info(Partition(2, cursor_from=(1,))))) == []
    seen = planner({0: Position("a")})
    seen.discover(info(Partition(0, True, "z"), Partition(1, starts_after=0)))
    later = info(Partition(0, True, "z"), Partition(2, cursor_from=(1,)))
    assert of(Report, seen.discover(later)) == []


@pytest.mark.parametrize("order", [1, -1])
def test_r09_ancestors_named_before_the_one_with_a_cursor_are_superseded_unknown_or_not(
    order: int,
) -> None:
    """3 was split into 5 and 6, and 5 into 2 and 4, before the consumer discovered again."""
    listed = [
        Partition(5, cursor_from=(3,)),
        Partition(6, cursor_from=(3,)),
        Partition(2, cursor_from=(7, 5, 3)),
        Partition(4, cursor_from=(5, 3)),
    ]
    made = planner({3: Position("c", revision=4)})
    actions = made.discover(info(*listed[::order]))
    (save,) = of(Save, actions)
    assert save.positions == {
        3: Position("c", "superseded", 5),
        5: Position("c", "superseded"),
        7: Position("c", "superseded"),
        2: Position("c"),
        4: Position("c"),
        6: Position("c"),
    }
    assert {action.partition for action in of(Start, actions)} == {2, 4, 6}
    # Discoveries that lag can't revive one, nor can they after a restart.
    assert of(Start, made.discover(info(3))) == []
    lagging = [Partition(5, cursor_from=(3,)), Partition(7, cursor_from=(5, 3)), 3]
    assert of(Start, made.discover(info(*lagging))) == []
    assert of(Start, planner(save.positions).discover(info(*lagging))) == []


def test_r17_a_successor_from_the_start_fences_a_consumer_that_still_reads_its_ancestor() -> None:
    """That one saves its first position of partition 1 too: revision 1, which is taken now."""
    made = planner({0: Position("a", "drained")})
    actions = made.discover(info(Partition(0, True, "a"), Partition(2, cursor_from=(1,))))
    assert of(Save, actions) == [
        Save({2: Position(FIRST), 1: Position(FIRST, "superseded")}),
    ]
    assert states(made) == {0: "drained", 1: "superseded", 2: "reading"}


def test_r09_a_partition_that_is_listed_again_is_not_lost() -> None:
    """An older instance, which knows no child, answered one discovery during a deployment."""
    made = planner({0: Position("a", "drained"), 4: Position("b")})
    made.discover(info(Partition(0, True), Partition(4, starts_after=0)))
    made.discover(info(0))
    assert states(made)[4] == "vanished"
    listed = Partition(0, True), Partition(4, starts_after=0), Partition(7, cursor_from=(5,))
    actions = made.discover(info(*listed))
    assert of(Fail, actions) == []
    assert states(made)[7] == "waiting"


@pytest.mark.parametrize("order", [1, -1])
def test_r09_the_ancestors_of_an_ambiguous_successor_stay_as_they_are(order: int) -> None:
    """Else the next start would find one of them live, and skip what the other one has unread."""
    split, merged = Partition(8, cursor_from=(3, 0)), Partition(9, cursor_from=(1, 7, 0, 3))
    stored = {1: Position("b"), 3: Position("a")}
    made = planner(stored)
    actions = made.discover(info(*[split, merged][::order]))
    assert of(Save, actions) == of(Start, actions) == []
    assert sorted(fail.partition for fail in of(Fail, actions)) == [8, 9]
    assert all(isinstance(fail.error, AmbiguousLineageError) for fail in of(Fail, actions))
    assert states(made) == {1: "vanished", 3: "vanished", 8: "parked", 9: "parked"}


def test_r09_a_late_successor_supersedes_those_named_before_too() -> None:
    made = planner({3: Position("c", "superseded", 2), 2: Position("far")})
    actions = made.discover(info(2, Partition(4, cursor_from=(5, 3))))
    assert of(Save, actions) == [Save({4: Position("c"), 5: Position("c", "superseded")})]


def test_r09_an_ancestor_that_is_not_selected_is_not_saved() -> None:
    made = Planner(feed="http://feed", partitions=[4])
    made.load({3: Position("c", "superseded", 2)})
    made.discover(info(Partition(4, cursor_from=(5, 3))))
    actions = made.discover(info(Partition(4, cursor_from=(5, 3))))
    assert of(Save, actions) == []
    assert 5 not in made.entries


def test_r09_a_discovery_that_lags_does_not_revive_the_ancestor_of_the_first_start() -> None:
    made = planner(start="last")
    actions = made.discover(info(Partition(1, cursor_from=(0,))), ends={1: "z"})
    assert actions[0] == Save({0: Position(FIRST, "superseded"), 1: Position("z")})
    assert made.discover(info(0)) == [
        Stop(1),
        Report(1, "is no longer listed and has no successor: it stops at its cursor 'z'"),
    ]
    assert of(Start, made.discover(info(0, Partition(1, cursor_from=(0,))))) == [Start(1, "z")]


def test_r09_an_ancestor_of_a_stored_successor_is_not_revived() -> None:
    made = planner({1: Position("z")})
    made.discover(info(Partition(1, cursor_from=(0,))))
    assert of(Save, made.discover(info(0))) == [Save({0: Position(FIRST, "superseded")})]
    assert states(made)[0] == "superseded"


def test_r17_two_first_starts_on_both_sides_of_a_split_fence_each_other() -> None:
    (before,) = of(Save, planner().discover(info(0)))
    for start in ("first", {1: "c"}):
        (after,) = of(Save, planner(start=start).discover(info(Partition(1, cursor_from=(0,)))))
        assert after.positions[0] == Position(FIRST, "superseded", revision=1)
        assert before.positions[0].revision == 1


def test_r09_at_the_first_start_a_listed_ancestor_is_superseded_by_its_successors() -> None:
    actions = planner().discover(info(0, Partition(1, cursor_from=(0,))))
    assert actions[0] == Save({0: Position(FIRST, "superseded"), 1: Position(FIRST)})
    assert of(Start, actions) == [Start(1, FIRST)]


def test_r09_successors_that_start_at_the_beginning_never_wait_for_each_other_in_a_cycle() -> None:
    listed = info(
        Partition(1, closed=True, cursor_from=(0,)),
        Partition(2, closed=True, starts_after=1),
        Partition(4, closed=True, cursor_from=(3,)),
        Partition(5, closed=True, starts_after=4),
    )
    made = planner()
    made.discover(listed)
    for _ in range(10):
        for partition in list(made.runnable()):
            if made.entries[partition].state is State.READING:
                made.ended(partition, made.entries[partition].cursor, asked_closed=True)
    assert {id for id, state in states(made).items() if state == "drained"} == {1, 2, 4, 5}


# ---------------------------------------------------------------------- R11, R12, R18


def test_r11_a_vanished_partition_stops_is_reported_and_comes_back() -> None:
    made = planner({0: Position("a")})
    made.discover(info(0))
    actions = made.discover(info())
    assert of(Stop, actions) == [Stop(0)]
    assert len(of(Report, actions)) == 1
    assert of(Save, actions) == []
    assert states(made) == {0: "vanished"}
    assert made.discover(info()) == []
    assert made.discover(info(0)) == [Start(0, "a")]


def test_r11_a_vanished_partition_with_a_successor_is_not_reported() -> None:
    made = planner({0: Position("a")})
    made.discover(info(0))
    assert of(Report, made.discover(info(Partition(1, cursor_from=(0,))))) == []


def test_r12_a_bad_discovery_leaves_everything_as_it_was() -> None:
    made = planner()
    made.discover(info(0))
    before = (states(made), made.graph)
    with pytest.raises(LineageError):
        made.discover(info(Partition(0, starts_after=1), Partition(1, starts_after=0)))
    assert (states(made), made.graph) == before


def test_r07_a_first_start_with_an_impossible_mapping_can_be_repeated() -> None:
    made = planner(start={9: "c"})
    with pytest.raises(LineageError):
        made.discover(info(0, 1))
    assert made.entries == {}
    assert set(of(Start, made.discover(info(0, 9)))) == {Start(0, FIRST), Start(9, "c")}


def test_r12_a_bad_first_discovery_can_be_repeated() -> None:
    made = planner(start="last")
    with pytest.raises(LineageError):
        made.discover(info(Partition(0, starts_after=0)))
    assert made.unresolved(info(0)) == [0]
    assert made.discover(info(0), ends={0: "e"})[0] == Save({0: Position("e")})


def test_r18_a_failure_parks_what_descends_from_it_and_nothing_else() -> None:
    made = planner()
    made.discover(
        info(
            9,
            Partition(0, closed=True),
            Partition(1, closed=True, starts_after=0),
            Partition(2, starts_after=1),
        )
    )
    error = ProtocolError("broken", partition=0)
    assert of(Stop, made.fail(0, error)) == [Stop(0)]
    assert states(made) == {9: "reading", 0: "parked", 1: "parked", 2: "parked"}
    assert made.entries[2].error is error


def test_r18_children_that_appear_later_are_parked_too() -> None:
    made = planner({0: Position("a")})
    made.discover(info(Partition(0, closed=True)))
    made.fail(0, ProtocolError("broken", partition=0))
    made.discover(
        info(
            Partition(0, closed=True), Partition(1, starts_after=0), Partition(2, cursor_from=(0,))
        )
    )
    assert states(made) == {0: "parked", 1: "parked", 2: "parked"}
    assert made.finished()


def test_r09_an_ancestor_that_is_listed_after_its_successor_began_is_not_read() -> None:
    made = planner({9: Position("a")})
    made.discover(info(9, Partition(1, cursor_from=(0,))))
    assert of(Start, made.discover(info(9, 0, Partition(1, cursor_from=(0,))))) == []
    assert states(made) == {0: "superseded", 1: "reading", 9: "reading"}


def test_finished_waits_for_batches_in_flight() -> None:
    made = planner()
    made.discover(info(0))
    made.delivered(0)
    made.ended(0, "z", asked_closed=False)
    assert not made.finished()
    made.released(0)
    assert made.finished()


def test_the_repr_shows_the_states() -> None:
    made = planner()
    made.discover(info(0, 1, Partition(2, closed=True), Partition(3, starts_after=2)))
    assert repr(made) == "<Planner of http://feed: 1 waiting, 3 reading>"


def test_r17_a_load_from_before_a_refused_save_is_not_what_is_stored() -> None:
    """Otherwise the partition would be read from a place that others have passed."""
    made = planner({0: Position("a")}, shared=True)
    made.discover(info(0))
    made.refresh({0: Position("a")}, owned=[0])
    before, loaded = made.begin_load(), {0: Position("a")}
    commit(made, 0, "b")
    made.refused([0])  # another instance has gone on to c
    assert of(Start, made.refresh(loaded, owned=[0], began=before)) == []
    stored = {0: Position("c", "open", 3)}
    assert of(Start, made.refresh(stored, owned=[0], began=made.begin_load())) == [Start(0, "c")]


def test_r08_a_parent_that_went_back_in_the_store_is_not_taken_for_an_old_load() -> None:
    made = planner({0: Position("a")}, shared=True)
    made.discover(info(Partition(0, closed=True)))
    made.refresh({0: Position("b", "drained", 2)}, owned=[], others=[1], began=made.begin_load())
    assert made.entries[0].state is State.DRAINED
    made.refresh({0: Position("a", "open", 1)}, owned=[], others=[1], began=made.begin_load())
    assert made.entries[0].state is State.ELSEWHERE
    assert made.entries[0].position == Position("a", "open", 1)


def test_r17_an_older_of_two_loads_that_overlap_is_not_taken() -> None:
    made = planner({0: Position("a")}, shared=True)
    made.discover(info(0))
    older, newer = made.begin_load(), made.begin_load()
    made.refresh({0: Position("b", "open", 2)}, owned=[], others=[0], began=newer)
    made.refresh({0: Position("a", "open", 1)}, owned=[], others=[0], began=older)
    assert made.entries[0].position == Position("b", "open", 2)


def test_r17_a_load_that_began_before_a_commit_does_not_overwrite_it() -> None:
    made = planner({0: Position("a")}, shared=True)
    made.discover(info(0))
    made.refresh({0: Position("a")}, owned=[0], others=[], began=made.begin_load())
    began = made.begin_load()
    made.delivered(0)
    committed = made.checkpoint(0, "b")
    made.released(0, committed)
    made.revoke([0])
    made.refresh({0: Position("a")}, owned=[], others=[0], began=began)
    assert made.entries[0].position == committed
    made.refresh({0: Position("a")}, owned=[], others=[0], began=made.begin_load())
    assert made.entries[0].position == Position("a"), "the commit was lost"


def test_r09_a_successor_waits_for_another_one_that_takes_the_same_cursor() -> None:
    """2 came of 0, and was split itself: another instance may have begun to read it."""
    made = planner({0: Position("a")}, shared=True)
    made.discover(info(0))
    looked = made.begin_load()
    made.refresh({0: Position("a")}, owned=[0], others=[], looked=looked)
    made.discover(info(Partition(3, cursor_from=(0,)), Partition(5, cursor_from=(2, 0))))
    assert made.entries[3].state is State.WAITING
    assert made.leasable() == [(0,), (0,)]
    again = made.begin_load()
    assert made.refresh({0: Position("a")}, owned=[0, 3], others=[], looked=looked) == []
    actions = made.refresh({0: Position("a")}, owned=[0, 3], others=[], looked=again)
    assert of(Start, actions) == [Start(3, "a")]
    assert [save.positions[3] for save in of(Save, actions)] == [Position("a")]


def test_r17_a_batch_in_flight_is_committed_after_what_it_was_read_from() -> None:
    """The database went back: what it has now is not what the batch comes after."""
    made = planner({0: Position("a")}, shared=True)
    made.discover(info(0))
    made.refresh({0: Position("a")}, owned=[0], others=[], began=made.begin_load())
    commit(made, 0, "b")
    made.delivered(0)
    made.revoke([0])
    made.refresh({0: Position("a")}, owned=[], others=[], began=made.begin_load())
    assert made.checkpoint(0, "c") == Position("c", "open", 3)
    made.released(0)
    made.refresh({0: Position("a")}, owned=[], others=[], began=made.begin_load())
    assert made.entries[0].position == Position("a")
