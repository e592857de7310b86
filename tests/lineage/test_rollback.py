"""R11: a publisher that goes back behind a split, and forward again."""

from __future__ import annotations

from feedapi_client import FeedInfo, Partition, Position
from feedapi_client.lineage.planner import Planner, State
from feedapi_client.lineage.states import Save, Start
from feedapi_client.model import FIRST
from feedapi_client.operations.repair import restored_positions

SUPERSEDED = Position("60", "superseded", 3)


def info(*partitions: Partition | int) -> FeedInfo:
    listed = [p if isinstance(p, Partition) else Partition(p) for p in partitions]
    return FeedInfo("v2-draft", {p.id: p for p in listed})


def planner(stored: dict[int, Position], *, shared: bool = False) -> Planner:
    made = Planner(feed="http://feed", shared=shared)
    made.load(stored)
    return made


def successor(id: int, *ancestors: int) -> Partition:
    return Partition(id, cursor_from=ancestors or (0,))


class TestListedAgain:
    def test_r11_a_superseded_partition_that_is_listed_open_is_a_problem(self) -> None:
        made = planner({0: SUPERSEDED, 10: Position("80")})
        assert [type(action) for action in made.discover(info(0))][:1] != [Start]
        (text,) = made.listed_again().values()
        assert "feedapi cursors restore" in text
        assert made.entries[0].state is State.SUPERSEDED

    def test_r11_it_is_none_any_more_once_the_publisher_goes_forward(self) -> None:
        made = planner({0: SUPERSEDED, 10: Position("80")})
        made.discover(info(0))
        made.discover(info(successor(10)))
        assert made.listed_again() == {}
        assert made.entries[10].running

    def test_r11_a_publisher_may_go_on_listing_what_it_has_split(self) -> None:
        made = planner({0: Position("60")})
        made.discover(info(0, successor(10)))
        assert made.entries[0].state is State.SUPERSEDED
        assert made.listed_again() == {}
        made.discover(info(0, successor(11, 10)))
        assert made.listed_again() == {}, "11 descends from 0 by way of 10"

    def test_r11_a_closed_one_that_is_superseded_is_none(self) -> None:
        made = planner({0: SUPERSEDED, 10: Position("80")})
        made.discover(info(Partition(0, closed=True)))
        assert made.listed_again() == {}

    def test_r11_a_drained_partition_is_read_on_and_is_a_problem_until_it_goes_on(self) -> None:
        made = planner({0: Position("z", "drained", 5)})
        made.discover(info(Partition(0, closed=True, last_cursor="z")))
        assert made.listed_again() == {}
        assert Start(0, "z") in made.discover(info(0))
        assert list(made.listed_again()) == [0]
        made.discover(info(0))
        assert list(made.listed_again()) == [0]
        made.delivered(0)
        made.released(0, made.checkpoint(0, "zz"))
        assert made.listed_again() == {}


class TestRestored:
    def test_r11_neither_back_nor_forward_repeats_or_skips(self) -> None:
        """0 was read up to 60 and renumbered to 10, which was read up to 80."""
        stored = {0: SUPERSEDED, 10: Position("80", "open", 4)}
        stored |= restored_positions(stored, [0], [10], feed="f")
        assert stored == {0: Position("80", "open", 4), 10: Position("80", "superseded", 5)}
        made = planner(stored)
        assert made.discover(info(0)) == [Start(0, "80")]
        assert made.listed_again() == {}
        made.delivered(0)
        made.released(0, made.checkpoint(0, "100"))
        actions = made.discover(info(successor(10)))
        assert (
            Save({10: Position("100", "open", 6), 0: Position("100", "superseded", 6)}) in actions
        )
        assert Start(10, "100") in actions

    def test_r11_it_goes_forward_after_a_restart_too_and_to_new_partitions(self) -> None:
        stored = {0: Position("100", "open", 5), 10: Position("80", "superseded", 5)}
        made = planner(stored)
        actions = made.discover(info(successor(10), successor(11)))
        assert {Start(10, "100"), Start(11, "100")} <= set_of_starts(actions)
        assert made.entries[0].state is State.SUPERSEDED

    def test_r11_with_leases_the_owner_of_the_ancestor_transfers_again(self) -> None:
        stored = {0: Position("100", "open", 5), 10: Position("80", "superseded", 5)}
        made = planner(stored, shared=True)
        assert made.discover(info(successor(10))) == []
        assert made.leasable() == [(0,)]
        actions = made.refresh(stored, owned=[0], others=[])
        assert (
            Save({10: Position("100", "open", 6), 0: Position("100", "superseded", 6)}) in actions
        )

    def test_r11_a_running_instance_takes_a_restored_position(self) -> None:
        stored = {0: SUPERSEDED, 10: Position("80", "open", 4)}
        made = planner(stored, shared=True)
        made.discover(info(0))
        stored |= restored_positions(stored, [0], [10], feed="f")
        made.refresh(stored, owned=[0], others=[])
        assert made.entries[0].running
        assert made.entries[0].cursor == "80"

    def test_r11_a_superseded_partition_is_not_revived_by_a_discovery_that_lags(self) -> None:
        """0 was split into 10, and 10 into 20. Only an operator gives a cursor back."""
        made = planner({0: Position("60")})
        made.discover(info(successor(10)))
        made.discover(info(successor(20, 10, 0)))
        made.discover(info(successor(10)))
        assert made.entries[10].state is State.SUPERSEDED


def set_of_starts(actions: object) -> set[Start]:
    assert isinstance(actions, list)
    return {action for action in actions if isinstance(action, Start)}


def test_r11_a_first_position_is_never_given_back() -> None:
    """At a first start ancestors are superseded, and their successors are not."""
    made = planner({})
    made.discover(info(0, successor(10)))
    assert made.entries[10].position == Position(FIRST)
    assert made.entries[0].state is State.SUPERSEDED
