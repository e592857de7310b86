"""Any selection of any tree of partitions is read in order, and nothing else is touched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from feedapi_client import FeedInfo, Partition, Position
from feedapi_client.lineage.planner import Planner
from feedapi_client.lineage.states import Fail, Save, Start, Stop

Tree = tuple[dict[int, int | None], list[int], set[int]]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Closed partitions, each after an earlier one or none, in any order, and some of them."""
    size = draw(st.integers(1, 8))
    parents = {id: draw(st.none() | st.integers(0, id - 1)) if id else None for id in range(size)}
    chosen = draw(st.sets(st.integers(0, size - 1), min_size=1))
    return parents, draw(st.permutations(range(size))), chosen


@given(trees(), st.dictionaries(st.integers(0, 7), st.just(Position("x")), max_size=3))
def test_r08_any_selection_is_read_in_order(tree: Tree, stored: dict[int, Position]) -> None:
    parents, order, chosen = tree
    listed = {id: Partition(id, True, f"end of {id}", parents[id]) for id in order}
    planner = Planner(feed="http://feed", partitions=chosen)
    planner.load(stored)
    actions = planner.discover(FeedInfo("v2-draft", listed))
    drained: list[int] = []
    touched: set[int] = set()
    while actions:
        touched |= {a.partition for a in actions if isinstance(a, Start | Stop | Fail)}
        touched |= {id for a in actions if isinstance(a, Save) for id in a.positions}
        actions = []
        for id in [e.id for e in planner.entries.values() if e.running]:
            drained.append(id)
            planner.delivered(id)
            actions += planner.released(id, planner.checkpoint(id, f"end of {id}"))
    assert sorted(drained) == sorted(touched) == sorted(chosen)
    assert planner.finished()
    for at, id in enumerate(drained):
        assert parents[id] not in chosen.difference(drained[:at])
