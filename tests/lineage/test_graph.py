"""The graph of partitions, and edges that are suspected."""

from __future__ import annotations

import pytest

from feedapi_client import LineageError, Partition
from feedapi_client.lineage.graph import Graph, SuspectedEdges, descendants


def graph(*partitions: Partition) -> Graph:
    return Graph({p.id: p for p in partitions}, feed="http://feed")


def test_r12_edges_are_indexed_in_both_directions_and_need_not_be_listed() -> None:
    closed = Partition(0, closed=True)
    children = [Partition(id, starts_after=0) for id in (1, 2)]
    built = graph(closed, *children, Partition(5, cursor_from=(4, 3)))
    assert built.children == {0: [1, 2]}
    assert built.successors == {4: [5], 3: [5]}
    assert [p.id for p in built] == [0, 1, 2, 5]
    assert (0 in built, 3 in built) == (True, False)


def test_r12_a_chain_of_all_partitions_is_built_without_recursion() -> None:
    chain = [Partition(id, closed=True, starts_after=id - 1 if id else None) for id in range(32768)]
    assert len(graph(*chain).partitions) == 32768


def test_r21_the_middle_of_a_long_cycle_is_left_out_of_the_message() -> None:
    with pytest.raises(LineageError, match=r"more \.\.\.") as caught:
        graph(*(Partition(id, starts_after=(id + 1) % 1000) for id in range(1000)))
    assert len(str(caught.value)) < 200


def test_r08_a_suspicion_says_what_to_do() -> None:
    assert "give lineage={1: 0, 2: 0} (child: parent)" in str(SuspectedEdges((0,), (1, 2)))
    many = str(SuspectedEdges((0, 3), tuple(range(4, 40))))
    assert "partitions 0, 3" in many
    assert "11: 0, ...}" in many


@pytest.mark.parametrize(
    ("roots", "among", "found"),
    [
        ({0}, {1, 2, 3, 4, 5}, {1, 2, 3, 4}),
        ({0}, {2, 3, 5}, {3}),
        ({5}, {1, 2, 3, 4}, set()),
        ({1, 5}, {2, 9}, {2}),
    ],
)
def test_r08_descendants_are_found_by_both_split_methods(
    roots: set[int], among: set[int], found: set[int]
) -> None:
    parents = {4: 3, 2: 1, 1: 0, 5: None} if 1 in among else {2: 1, 1: 0, 5: None}
    listed = {id: Partition(id, starts_after=parent) for id, parent in parents.items()}
    assert descendants(listed | {3: Partition(3, cursor_from=(0,))}, roots, among) == found
