"""The graph of partitions, edges that are given or suspected, and options that hold no ids."""

from __future__ import annotations

import pytest

from feedapi_client import LineageError, Partition
from feedapi_client.lineage.graph import Graph, SuspectedEdges, descendants, parse_lineage


def graph(*partitions: Partition) -> Graph:
    return Graph({p.id: p for p in partitions}, feed="http://feed")


def test_r12_edges_are_indexed_in_both_directions_and_need_not_be_listed() -> None:
    closed = Partition(0, closed=True)
    children = [Partition(id, starts_after=0) for id in (1, 2)]
    built = graph(closed, *children, Partition(5, cursor_from=(4, 3)))
    assert built.children == {0: [1, 2]}
    assert built.successors == {4: [5], 3: [5]}
    assert [p.id for p in built] == [0, 1, 2, 5]
    assert (0 in built, 3 in built, len(built)) == (True, False, 4)
    assert repr(built) == "<Graph of 4 partitions: 0→1, 0→2, 4|3⇒5>"


def test_r12_a_chain_of_all_partitions_is_built_without_recursion() -> None:
    chain = [Partition(id, closed=True, starts_after=id - 1 if id else None) for id in range(32768)]
    assert len(graph(*chain)) == 32768


def test_r21_the_middle_of_a_long_cycle_is_left_out_of_the_message() -> None:
    with pytest.raises(LineageError, match=r"more \.\.\.") as caught:
        graph(*(Partition(id, starts_after=(id + 1) % 1000) for id in range(1000)))
    assert len(str(caught.value)) < 200


def test_r08_a_suspicion_says_what_to_do() -> None:
    assert "give lineage={1: 0, 2: 0} (child: parent)" in str(SuspectedEdges((0,), (1, 2)))
    many = str(SuspectedEdges((0, 3), tuple(range(4, 40))))
    assert "partitions 0, 3" in many
    assert "11: 0, ...}" in many


def test_r08_edges_can_be_given_as_text() -> None:
    assert parse_lineage("1:0") == {1: 0}
    assert parse_lineage(" 1:0, 2 : 0 ,1:0") == {1: 0, 2: 0}
    assert parse_lineage("3:none,4:None") == {3: None, 4: None}


def test_r08_any_other_text_is_refused() -> None:
    wrong = {
        "must be pairs": ["", "1", "1:", ":0", "1:0,", "a:0", "1:-1", "1:²", "none:1"],
        "two parents": ["1:0,1:2", "1:0,1:none"],
        "integers from 0": ["1:32768"],
    }
    for message, texts in wrong.items():
        for text in texts:
            with pytest.raises(ValueError, match=message):
                parse_lineage(text)


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
