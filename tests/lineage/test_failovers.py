"""Databases that lose the last saves of cursors, while instances remember them (R9, R17)."""

from __future__ import annotations

from feedapi_client.lineage.planner import Planner
from feedapi_client.lineage.states import Action, Save
from feedapi_client.model import FeedInfo, Partition, Position


def discovery(*partitions: Partition) -> FeedInfo:
    return FeedInfo("v2-draft", {each.id: each for each in partitions})


def saves(actions: list[Action]) -> list[Save]:
    return [action for action in actions if isinstance(action, Save)]


def test_r09_a_successor_whose_transfer_was_lost_takes_its_cursor_with_the_ancestor_again() -> None:
    """An instance knows from its last load that 0 is superseded, and the store has lost that.

    A save of the successor alone would be taken: it and 0, which is open there, hold one cursor.
    """
    planner = Planner(feed="http://feed", shared=True)
    open_at = Position("c", revision=33)
    planner.load({0: open_at})
    planner.discover(discovery(Partition(0)))
    transferred = {
        0: Position("c", "superseded", revision=40, replaces=33),
        4: Position("c", revision=7),
    }
    planner.refresh(transferred, owned=(), others=(), began=planner.begin_load())
    successors = [Partition(id, cursor_from=(0,)) for id in (4, 5)]
    (save,) = saves(planner.discover(discovery(*successors)))
    # 5 has no position yet: it is saved beside the row that the store has to hold for it.
    assert {id: each.replaces for id, each in save.positions.items()} == {0: 40, 5: None}
    assert list(save.unchanged) == [0]
