"""The table of transitions: complete, reachable, and enforced."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest

from feedapi_client import FeedError, FeedInfo, LostPartitionError, Partition, Position
from feedapi_client.lineage import planner as planner_module
from feedapi_client.lineage.planner import Entry, Planner
from feedapi_client.lineage.states import (
    TRANSITIONS,
    IllegalTransitionError,
    State,
    move_entry,
)
from feedapi_client.model import FIRST

W, R, C, D, S, V, P, E = State
Pair = tuple[State, State]

LISTED: list[Pair] = [(source, target) for source, target, _, _ in TRANSITIONS]
UNLISTED: list[Pair] = [
    pair for pair in product(State, State) if pair[0] is not pair[1] and pair not in LISTED
]


def info(*partitions: Partition) -> FeedInfo:
    return FeedInfo("v2-draft", {p.id: p for p in partitions})


def started(*partitions: Partition, stored: Mapping[int, Position] | None = None) -> Planner:
    planner = Planner(feed="http://feed")
    planner.load(stored or {})
    planner.discover(info(*partitions))
    return planner


def caught_up() -> Planner:
    planner = started(Partition(0))
    planner.ended(0, FIRST, asked_closed=False)
    return planner


def drained() -> Planner:
    return started(Partition(0, closed=True), stored={0: Position("z", "drained")})


def commit(planner: Planner, partition: int, cursor: str) -> None:
    planner.delivered(partition)
    planner.released(partition, planner.checkpoint(partition, cursor))


def discovered(planner: Planner, *partitions: Partition) -> Planner:
    planner.discover(info(*partitions))
    return planner


def failed(planner: Planner) -> None:
    planner.fail(0, FeedError("broken"))


def shared(*partitions: Partition, owned: bool = False) -> Planner:
    """A planner of an instance that shares the feed; with `owned` it holds all leases."""
    planner = Planner(feed="http://feed", shared=True)
    planner.load({})
    planner.discover(info(*partitions))
    if owned:
        planner.refresh({}, owned=planner.graph.partitions)
    return planner


def refreshed(planner: Planner, *statuses: str, back: bool = False) -> Planner:
    """Take positions that another instance has saved; with `back` it has taken them back since."""
    stored = {id: Position("z", status, 9) for id, status in enumerate(statuses)}  # type: ignore[arg-type]
    planner.refresh(stored)
    if back:
        planner.discover(info())
        planner.refresh({id: at.advance(status="open") for id, at in stored.items()})
    return planner


def restored(status: Any) -> None:
    """The cursor of partition 0 was moved back to it while this instance runs."""
    planner = refreshed(shared(Partition(0, closed=True)), "superseded")
    planner.refresh({0: Position("z", status, 10)}, owned=[0])


MOVED_BACK = {0: Position("a"), 1: Position("b"), 2: Position("a", "superseded", 2)}


def begun_before_its_edge(*, caught_up: bool = False) -> Planner:
    """Partition 1 is listed as a successor of 0 only after it began."""
    planner = started(Partition(0), stored={0: Position("a")})
    discovered(planner, Partition(0), Partition(1))
    if caught_up:
        planner.ended(1, FIRST, asked_closed=False)
    return planner


def drained_behind() -> Planner:
    """A drained partition whose parent is gone."""
    return started(stored={9: Position("a"), 0: Position("z", "drained")})


def refused(planner: Planner) -> None:
    planner.refused([0])


def shared_caught_up() -> Planner:
    planner = shared(Partition(0), owned=True)
    planner.ended(0, FIRST, asked_closed=False)
    return planner


def transferred() -> Planner:
    """Partition 0 has just been transferred by this instance."""
    planner = Planner(feed="http://feed", shared=True)
    planner.load({0: Position("a")})
    planner.discover(info(Partition(0)))
    planner.refresh({0: Position("a")}, owned=[0])
    return discovered(planner, SUCCESSOR)


def parent_open_again_elsewhere() -> Planner:
    """The child of a parent that was drained, which the next discovery lists as open."""
    planner = shared(Partition(0, closed=True), CHILD)
    return discovered(refreshed(planner, "drained"), Partition(0), CHILD)


def split_again() -> Planner:
    """Partition 0 was split, the publisher was rolled back, and the cursor moved back to 0."""
    back = {0: Position("b", "open", 3), 1: Position("a", "superseded", 2)}
    return discovered(started(Partition(0), stored=back), SUCCESSOR)


SUCCESSOR = Partition(1, cursor_from=(0,))
CHILD = Partition(1, starts_after=0)


def parent_and_child_open_again() -> None:
    closed = (Partition(0, closed=True), Partition(1, closed=True, starts_after=0))
    both = {0: Position("z", "drained"), 1: Position("z", "drained")}
    discovered(started(*closed, stored=both), Partition(0), CHILD)


def child_listed_again() -> Planner:
    """Partition 1, which waited for 0, is not listed for the moment."""
    return discovered(started(Partition(0), CHILD), Partition(0))


SCENARIOS: dict[Pair, Callable[[], Any]] = {
    (W, R): lambda: started(Partition(0)),
    (W, D): drained,
    (W, S): lambda: started(Partition(0), SUCCESSOR),
    (W, V): lambda: started(stored={0: Position("a")}),
    (W, P): lambda: failed(started(Partition(0, closed=True), CHILD)),
    (R, C): caught_up,
    (R, D): lambda: commit(started(Partition(0, closed=True, last_cursor="z")), 0, "z"),
    (R, S): lambda: discovered(started(Partition(0)), Partition(0), SUCCESSOR),
    (R, V): lambda: discovered(started(Partition(0))),
    (R, P): lambda: failed(started(Partition(0))),
    (C, R): lambda: caught_up().progressed(0),
    (C, D): lambda: discovered(caught_up(), Partition(0, closed=True, last_cursor=FIRST)),
    (C, S): lambda: discovered(caught_up(), Partition(0), SUCCESSOR),
    (C, V): lambda: discovered(caught_up()),
    (C, P): lambda: failed(caught_up()),
    (D, R): lambda: discovered(drained(), Partition(0)),
    (D, W): parent_and_child_open_again,
    (D, S): lambda: discovered(drained(), SUCCESSOR),
    (V, R): lambda: discovered(discovered(started(Partition(0))), Partition(0)),
    (V, W): lambda: discovered(child_listed_again(), Partition(0), CHILD),
    (V, S): lambda: discovered(discovered(started(Partition(0))), SUCCESSOR),
    (V, P): lambda: discovered(discovered(child_listed_again()), CHILD),
    (V, D): lambda: refreshed(discovered(shared(Partition(0))), "drained"),
    (W, E): lambda: shared(Partition(0)),
    (R, E): lambda: shared(Partition(0), owned=True).revoke([0]),
    (C, E): lambda: shared_caught_up().revoke([0]),
    (D, E): parent_open_again_elsewhere,
    (S, W): split_again,
    (S, E): lambda: refused(transferred()),
    (V, E): lambda: discovered(discovered(shared(Partition(0))), Partition(0)),
    (E, R): lambda: shared(Partition(0), owned=True),
    (E, W): parent_open_again_elsewhere,
    (E, D): lambda: refreshed(shared(Partition(0, closed=True)), "drained"),
    (E, S): lambda: refreshed(shared(Partition(0)), "superseded"),
    (E, V): lambda: discovered(shared(Partition(0))),
    (E, P): lambda: failed(shared(Partition(0))),
    (R, W): lambda: discovered(begun_before_its_edge(), SUCCESSOR),
    (C, W): lambda: discovered(begun_before_its_edge(caught_up=True), SUCCESSOR),
    (D, P): lambda: discovered(drained_behind(), Partition(0, starts_after=9)),
    (D, V): lambda: discovered(refreshed(shared(Partition(0, closed=True)), "drained", back=True)),
    (S, V): lambda: discovered(refreshed(shared(Partition(0)), "superseded", back=True)),
    (S, R): lambda: restored("open"),
    (S, D): lambda: restored("drained"),
    (S, P): lambda: discovered(started(stored=MOVED_BACK), Partition(2, cursor_from=(0, 1))),
}


def test_every_listed_transition_has_a_scenario() -> None:
    assert set(SCENARIOS) == set(LISTED)
    assert len(LISTED) == len(set(LISTED)), "one row for each pair of states"


@pytest.mark.parametrize("pair", LISTED, ids=" to ".join)
def test_a_listed_transition_is_reached(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[Pair] = []

    def recorded(entry: Entry, state: State) -> None:
        moves.append((entry.state, state))
        move_entry(entry, state)

    monkeypatch.setattr(planner_module, "move_entry", recorded)
    SCENARIOS[pair]()
    assert pair in moves


@pytest.mark.parametrize(("source", "target"), UNLISTED)
def test_an_unlisted_transition_is_refused(source: State, target: State) -> None:
    entry = Entry(5, source)
    with pytest.raises(IllegalTransitionError) as caught:
        move_entry(entry, target)
    error = caught.value
    assert (error.partition, error.source, error.target) == (5, source, target)
    assert f"partition 5 must not go from '{source}' to '{target}'" in str(error)
    assert entry.state is source


def test_an_illegal_transition_is_no_feed_error_and_survives_pickling() -> None:
    error = IllegalTransitionError(5, State.PARKED, State.READING)
    assert FeedError not in type(error).__mro__
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_only_parked_is_final() -> None:
    assert set(State) - {source for source, _ in LISTED} == {State.PARKED}


def test_a_final_state_is_kept_after_any_discovery() -> None:
    planner = started(Partition(0), SUCCESSOR)
    failed_child = Partition(3, starts_after=2)
    planner.discover(info(Partition(0), SUCCESSOR, failed_child))
    assert isinstance(planner.entries[3].error, LostPartitionError)
    for listed in [(), (Partition(0), SUCCESSOR, failed_child), (failed_child,)]:
        planner.discover(info(*listed))
        assert planner.entries[0].state is State.SUPERSEDED
        assert planner.entries[3].state is State.PARKED
