"""R8: edges that a publisher leaves out are suspected, and added by `lineage=`."""

from __future__ import annotations

import pytest

from feedapi_client.errors import LineageError
from feedapi_client.lineage.graph import (
    SuspectedEdges,
    parse_lineage,
    suspected_missing_edges,
)
from feedapi_client.lineage.planner import Planner
from feedapi_client.lineage.states import Action, Report, Save, Start
from feedapi_client.model import FIRST, FeedInfo, Partition, Position


def listed(*partitions: int | Partition) -> dict[int, Partition]:
    made = [p if isinstance(p, Partition) else Partition(p) for p in partitions]
    return {p.id: p for p in made}


def info(*partitions: int | Partition) -> FeedInfo:
    return FeedInfo("v2-draft", listed(*partitions))


CLOSED = Partition(0, closed=True, last_cursor="z")


def reports(actions: list[Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, Report)]


def starts(actions: list[Action]) -> list[int]:
    return [action.partition for action in actions if isinstance(action, Start)]


class TestSuspected:
    def test_r08_a_closed_partition_without_children_beside_new_roots_is_suspected(self) -> None:
        found = suspected_missing_edges({0, 9}, listed(CLOSED, 9, 1, 2))
        assert found == SuspectedEdges((0,), (1, 2))

    @pytest.mark.parametrize(
        "current",
        [
            listed(0, 9, 1),
            listed(CLOSED, 9),
            listed(CLOSED, 9, Partition(1, starts_after=0), 2),
            listed(CLOSED, 9, Partition(1, cursor_from=(0,)), 2),
            listed(CLOSED, 9, Partition(1, starts_after=9)),
        ],
        ids=["open", "nothing new", "child", "successor", "no root"],
    )
    def test_r08_everything_else_is_not(self, current: dict[int, Partition]) -> None:
        assert suspected_missing_edges(listed(0, 9), current) is None

    def test_r08_in_a_single_discovery_roots_with_larger_ids_count_as_new(self) -> None:
        assert suspected_missing_edges(None, listed(CLOSED, 1, 2)) == ((0,), (1, 2))
        closed = Partition(2, closed=True)
        assert suspected_missing_edges(None, listed(0, 1, closed)) is None

    def test_r08_a_chain_of_missing_edges_is_suspected_whole(self) -> None:
        found = suspected_missing_edges(None, listed(CLOSED, Partition(1, closed=True), 2))
        assert found == ((0, 1), (1, 2))

    def test_r08_the_text_names_lineage(self) -> None:
        assert str(SuspectedEdges((0,), (1, 2))) == (
            "partition 0 is closed and no partition starts after it, while partitions 1, 2 have no "
            "parent: the publisher may have left out startsAfterPartition, and events may be read "
            "out of order. If so, give lineage={1: 0, 2: 0} (child: parent)"
        )
        many = str(SuspectedEdges((0, 3), tuple(range(4, 40))))
        assert "partitions 0, 3 are closed" in many
        assert "11: 0, ...}" in many


class TestParse:
    def test_r08_edges_can_be_given_as_text(self) -> None:
        assert parse_lineage("1:0") == {1: 0}
        assert parse_lineage(" 1:0, 2 : 0 ,1:0") == {1: 0, 2: 0}
        assert parse_lineage("3:none,4:None") == {3: None, 4: None}

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "1",
            "1:",
            ":0",
            "1:0,",
            "a:0",
            "1:32768",
            "1:-1",
            "1:0,1:2",
            "1:²",
            "none:1",
            "1:0,1:none",
        ],
    )
    def test_r08_any_other_text_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"must be pairs|two parents|integers from 0"):
            parse_lineage(text)


def planner(
    lineage: dict[int, int | None] | None = None, stored: dict[int, Position] | None = None
) -> Planner:
    made = Planner(feed="http://feed", lineage=lineage)
    made.load(stored or {})
    return made


class TestReported:
    def test_r08_it_is_reported_once_when_the_new_roots_appear(self) -> None:
        made = planner()
        assert reports(made.discover(info(0, 9))) == []
        (text,) = reports(made.discover(info(CLOSED, 9, 1, 2)))
        assert "lineage={1: 0, 2: 0}" in text
        assert reports(made.discover(info(CLOSED, 9, 1, 2))) == []
        assert reports(made.discover(info(CLOSED, 9, 1, 2, 3))) == []

    def test_r08_it_is_reported_when_the_partition_closed_before(self) -> None:
        made = planner()
        made.discover(info(0))
        assert reports(made.discover(info(CLOSED))) == []
        assert len(reports(made.discover(info(CLOSED, 1)))) == 1

    def test_r08_it_is_reported_after_a_restart(self) -> None:
        made = planner(stored={0: Position("a"), 9: Position("b")})
        assert len(reports(made.discover(info(CLOSED, 9, 1)))) == 1

    def test_r08_it_is_reported_at_the_first_start(self) -> None:
        assert len(reports(planner().discover(info(CLOSED, 1)))) == 1

    def test_r08_only_what_appeared_with_the_closed_partition_is_named(self) -> None:
        made = planner()
        retired = Partition(3, closed=True, last_cursor="z")
        made.discover(info(0, 3, 5))
        assert reports(made.discover(info(0, retired, 5))) == []
        closed = Partition(5, closed=True, last_cursor="z")
        (text,) = reports(made.discover(info(0, retired, closed, 6, 7)))
        assert "lineage={6: 5, 7: 5}" in text
        assert "partition 5 is closed" in text

    def test_r08_what_is_drained_is_read_before_any_new_root(self) -> None:
        made = planner(stored={0: Position("z", "drained"), 9: Position("b")})
        assert reports(made.discover(info(CLOSED, 9, 1))) == []

    def test_r08_lineage_mends_it(self) -> None:
        made = planner({1: 0, 2: 0})
        actions = made.discover(info(CLOSED, 1, 2, 9))
        assert reports(actions) == []
        assert starts(actions) == [0, 9]
        assert made.entries[1].waits_for == (0,)
        made.delivered(0)
        actions = made.released(0, made.checkpoint(0, "z"))
        assert starts(actions) == [1, 2]
        assert Start(1, FIRST) in actions


class TestLineage:
    def test_r08_an_edge_that_is_listed_changes_nothing(self) -> None:
        made = planner({1: 0})
        assert starts(made.discover(info(CLOSED, Partition(1, starts_after=0)))) == [0]

    def test_r08_partitions_that_are_stored_need_not_be_listed(self) -> None:
        made = planner({1: 0}, {0: Position("z", "drained"), 1: Position("a")})
        assert starts(made.discover(info(1))) == [1]
        assert made.discover(info(2, 1)) == [Start(2, FIRST)]

    def test_r08_partitions_that_were_listed_once_may_be_gone(self) -> None:
        made = planner({1: 0})
        made.discover(info(CLOSED, 1))
        made.discover(info(CLOSED))

    @pytest.mark.parametrize(
        ("lineage", "partitions", "problem"),
        [
            ({1: 1}, [CLOSED, 1], "partition 1: with the edges of lineage= startsAfterPartition"),
            ({1: 0, 0: 1}, [CLOSED, 1], "with the edges of lineage= the lineage has a cycle"),
            ({1: 0}, [CLOSED, Partition(1, cursor_from=(5,))], "cursorFromPartitions 5: a split"),
            ({1: 0}, [CLOSED, 2, Partition(1, starts_after=2)], "with startsAfterPartition 2"),
            (
                {1: None},
                [CLOSED, Partition(1, starts_after=0)],
                "starts after nobody, and the feed",
            ),
            ({1: 0, 0: 1}, [1], "with the edges of lineage= the lineage has a cycle"),
        ],
        ids=[
            "self",
            "cycle",
            "both methods",
            "another parent",
            "nobody",
            "cycle with one asleep",
        ],
    )
    def test_r08_impossible_edges_are_errors_that_change_nothing(
        self, lineage: dict[int, int], partitions: list[int | Partition], problem: str
    ) -> None:
        made = planner(lineage)
        with pytest.raises(LineageError, match=problem):
            made.discover(info(*partitions))
        assert made.entries == {}

    @pytest.mark.parametrize("lineage", [{"1": 0}, {None: 1}, {True: 0}, {32768: 0}, {1: -1}])
    def test_r08_only_ids_are_accepted(self, lineage: dict[int, int]) -> None:
        with pytest.raises(ValueError, match="lineage must map"):
            planner(lineage)

    def test_r08_an_edge_may_be_declared_before_the_split(self) -> None:
        made = planner({1: 0, 2: 0})
        assert made.discover(info(0, 9)) == [
            Save({0: Position(FIRST), 9: Position(FIRST)}),
            Start(0, FIRST),
            Start(9, FIRST),
        ]
        assert starts(made.discover(info(CLOSED, 1, 2, 9))) == []
        assert made.entries[1].waits_for == made.entries[2].waits_for == (0,)

    def test_r08_an_edge_to_a_partition_never_seen_is_reported_once_and_counts_later(self) -> None:
        made = planner({1: 7})
        actions = made.discover(info(1))
        assert starts(actions) == [1]
        (text,) = reports(actions)
        assert "partition 1 starts after partition 7, which was never listed" in text
        assert reports(made.discover(info(1))) == []
        made = planner({1: 7}, {0: Position("a")})
        made.discover(info(0))
        made.discover(info(0, Partition(7, closed=True), 1))
        assert made.entries[1].waits_for == (7,)

    def test_r08_a_restart_while_a_replica_lags_does_not_fail(self) -> None:
        made = planner({1: 0, 3: 1}, {0: Position("a")})
        assert starts(made.discover(info(0))) == [0]
        assert reports(made.discover(info(0))) == []

    def test_r08_a_contradiction_keeps_the_last_good_topology(self) -> None:
        made = planner({1: 0})
        made.discover(info(0, 2))
        with pytest.raises(LineageError, match="with startsAfterPartition 2"):
            made.discover(info(0, 2, Partition(1, starts_after=2)))
        assert set(made.entries) == {0, 2}

    def test_r08_an_earlier_discovery_may_lack_partitions_that_lineage_names(self) -> None:
        made = planner({1: 0}, {0: Position("a")})
        made.discover(info(0), earlier=True)
        actions = made.discover(info(CLOSED, 1))
        assert reports(actions) == []
        assert made.entries[1].waits_for == (0,)

    def test_r08_a_selection_is_not_taken_for_a_missing_edge(self) -> None:
        made = Planner(feed="http://feed", partitions=[0, 2])
        made.load({})
        assert reports(made.discover(info(CLOSED, Partition(1, starts_after=0), 2))) == []


def of_go(*partitions: int | Partition) -> FeedInfo:
    return FeedInfo("v2-token", listed(*partitions), token="t")


ZERO = Partition(0, closed=True)


class TestPartitionZero:
    """The published Go library leaves `startsAfterPartition` out where it is 0."""

    def test_r08_roots_wait_for_partition_0_until_it_is_drained(self) -> None:
        made = planner()
        made.discover(of_go(0, 9))
        made.delivered(9)
        made.released(9, made.checkpoint(9, "k"))
        actions = made.discover(of_go(ZERO, 9, 1, 2))
        assert starts(actions) == []
        assert made.entries[1].waits_for == made.entries[2].waits_for == (0,)
        (text,) = reports(actions)
        assert text.startswith("partition 0 is closed and no partition starts after it")
        assert "partitions 1, 2 may do so" in text
        assert "lineage={1: None}" in text
        assert reports(made.discover(of_go(ZERO, 9, 1, 2, 3))) == []
        assert made.entries[9].running
        assert starts(made.ended(0, FIRST, asked_closed=True)) == [1, 2, 3]

    def test_r08_they_wait_at_the_first_start_and_after_a_restart(self) -> None:
        made = planner()
        assert starts(made.discover(of_go(ZERO, 1, 2))) == [0]
        made = planner(stored={0: Position("a"), 9: Position("b"), 1: Position(FIRST)})
        assert starts(made.discover(of_go(ZERO, 9, 1, 2))) == [0, 9]

    def test_r08_what_has_an_ancestor_is_not_held_and_nothing_waits_in_a_circle(self) -> None:
        zero = Partition(0, closed=True, starts_after=4)
        successor = Partition(3, cursor_from=(8,))
        made = planner()
        parent = Partition(4, closed=True, last_cursor="e")
        assert starts(made.discover(of_go(zero, parent, successor, 1))) == [4]
        assert made.entries[0].waits_for == (4,)
        assert made.entries[1].waits_for == (0,)

    @pytest.mark.parametrize(
        "partitions",
        [
            [0, 1, 2],
            [ZERO, Partition(1, starts_after=0), 2],
            [ZERO, Partition(1, cursor_from=(0,)), 2],
            [1, 2],
        ],
        ids=["open", "child", "successor", "not listed"],
    )
    def test_r08_otherwise_nobody_waits(self, partitions: list[int | Partition]) -> None:
        made = planner()
        assert 2 in starts(made.discover(of_go(*partitions)))

    def test_r08_nobody_waits_in_another_dialect_without_order_or_behind_a_drained_one(
        self,
    ) -> None:
        assert starts(planner().discover(info(ZERO, 1))) == [0, 1]
        unordered = Planner(feed="http://feed", ordered=False)
        unordered.load({})
        assert starts(unordered.discover(of_go(ZERO, 1))) == [0, 1]
        made = planner(stored={0: Position("z", "drained")})
        actions = made.discover(of_go(ZERO, 1))
        assert starts(actions) == [1]
        assert reports(actions) == []

    def test_r08_lineage_says_that_one_comes_after_nobody(self) -> None:
        made = planner({3: None})
        assert starts(made.discover(of_go(ZERO, 1, 3))) == [0, 3]
        assert made.entries[1].waits_for == (0,)

    def test_r08_a_first_start_at_the_end_waits_for_nothing(self) -> None:
        made = Planner(feed="http://feed", start="last")
        made.load({})
        actions = made.discover(of_go(ZERO, 1), ends={0: "z", 1: "e"})
        assert starts(actions) == [1]
        assert reports(actions) == []

    def test_r08_a_cursor_that_start_gives_is_a_beginning(self) -> None:
        made = Planner(feed="http://feed", start={1: "e"})
        made.load({})
        assert starts(made.discover(of_go(ZERO, 1, 2))) == [0, 1]
