"""R8: edges that a publisher leaves out are suspected, and added by `lineage=`."""

from __future__ import annotations

import pytest

from feedapi_client.errors import LineageError
from feedapi_client.lineage.actions import Action, Report, Start
from feedapi_client.lineage.missing_edges import (
    SuspectedEdges,
    parse_lineage,
    suspected_missing_edges,
)
from feedapi_client.lineage.planner import Planner
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

    @pytest.mark.parametrize(
        "text", ["", "1", "1:", ":0", "1:0,", "a:0", "1:32768", "1:-1", "1:0,1:2", "1:²"]
    )
    def test_r08_any_other_text_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"must be pairs|two parents|integers from 0"):
            parse_lineage(text)


def planner(
    lineage: dict[int, int] | None = None, stored: dict[int, Position] | None = None
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
            ({7: 0}, [CLOSED, 1], "partition 7: lineage= names this partition"),
            ({1: 7}, [CLOSED, 1], "partition 7: lineage= names this partition"),
            ({1: 1}, [CLOSED, 1], "partition 1: with the edges of lineage= startsAfterPartition"),
            ({1: 0, 0: 1}, [CLOSED, 1], "with the edges of lineage= the lineage has a cycle"),
            ({1: 0}, [CLOSED, Partition(1, cursor_from=(5,))], "cursorFromPartitions 5: a split"),
            ({1: 0}, [CLOSED, 2, Partition(1, starts_after=2)], "with startsAfterPartition 2"),
        ],
        ids=["child", "parent", "self", "cycle", "both methods", "another parent"],
    )
    def test_r08_impossible_edges_are_errors_that_change_nothing(
        self, lineage: dict[int, int], partitions: list[int | Partition], problem: str
    ) -> None:
        made = planner(lineage)
        with pytest.raises(LineageError, match=problem):
            made.discover(info(*partitions))
        assert made.entries == {}

    @pytest.mark.parametrize("lineage", [{"1": 0}, {1: None}, {True: 0}, {32768: 0}, {1: -1}])
    def test_r08_only_ids_are_accepted(self, lineage: dict[int, int]) -> None:
        with pytest.raises(ValueError, match="lineage must map"):
            planner(lineage)

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
