"""What was seen of the leases before a discovery decides nothing that the discovery asks for."""

from __future__ import annotations

from feedapi_client.lineage.planner import Planner
from feedapi_client.lineage.states import Save
from feedapi_client.model import FIRST, FeedInfo, Partition, Position

STORED = {0: Position(FIRST)}


def listed(*partitions: Partition) -> FeedInfo:
    return FeedInfo("v2-token", {each.id: each for each in partitions})


def test_r09_leases_seen_before_a_split_was_listed_do_not_permit_its_transfer() -> None:
    planner = Planner(feed="f", shared=True)
    planner.load(STORED)
    planner.discover(listed(Partition(0, False), Partition(1, False)))
    looked = planner.begin_load()  # nobody reads partition 1, which has no position
    planner.discover(listed(Partition(0, False), Partition(2, False, cursor_from=(1,))))

    late = planner.refresh(STORED, owned={0}, others=set(), looked=looked)
    assert not [action for action in late if isinstance(action, Save)]
    assert planner.looks_again

    looked = planner.begin_load()
    after = planner.refresh(STORED, owned={0}, others=set(), looked=looked)
    assert [set(action.positions) for action in after if isinstance(action, Save)] == [{1, 2}]


def test_r09_a_partition_that_another_instance_reads_is_not_transferred() -> None:
    planner = Planner(feed="f", shared=True)
    planner.load(STORED)
    planner.discover(listed(Partition(0, False), Partition(1, False)))
    planner.discover(listed(Partition(0, False), Partition(2, False, cursor_from=(1,))))
    actions = planner.refresh(STORED, owned={0}, others={1}, looked=planner.begin_load())
    assert not [action for action in actions if isinstance(action, Save)]


def test_r17_another_position_that_follows_a_failover_overtakes_what_was_saved() -> None:
    """A failover lost a save, and another instance has saved since."""
    made = Planner(feed="http://feed", shared=True)
    stored = {0: Position("a", "open", 3)}
    made.load(stored)
    made.discover(FeedInfo("v2-draft", {0: Partition(0)}))
    made.refresh(stored, owned={0}, others=set())
    began = made.begin_load()
    assert made.overtaken(stored, began) == set()
    for revision in (2, 4):
        assert made.overtaken({0: Position("b", "open", revision)}, began) == {0}
