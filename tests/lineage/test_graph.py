"""R12 for the graph of partitions. The tests of the protocol cover errors in fields."""

from __future__ import annotations

import pytest

from feedapi_client import FeedInfo, LineageError, Partition
from feedapi_client.lineage.graph import Graph, validate


def graph(*partitions: Partition) -> Graph:
    return Graph({p.id: p for p in partitions}, feed="http://feed")


def test_r12_edges_are_indexed_in_both_directions() -> None:
    built = graph(
        Partition(0, closed=True),
        Partition(1, starts_after=0),
        Partition(2, starts_after=0),
        Partition(5, cursor_from=(4, 3)),
    )
    assert built.children == {0: [1, 2]}
    assert built.successors == {4: [5], 3: [5]}
    assert 0 in built
    assert 3 not in built
    assert len(built) == 4
    assert [p.id for p in built] == [0, 1, 2, 5]


@pytest.mark.parametrize(
    ("partitions", "named"),
    [
        ([Partition(7, starts_after=7)], 7),
        ([Partition(7, cursor_from=(7,))], 7),
        ([Partition(7, cursor_from=(3, 7))], 7),
        ([Partition(0), Partition(7, starts_after=0, cursor_from=(0,))], 7),
        ([Partition(7, starts_after=8), Partition(8, starts_after=7)], None),
        (
            [
                Partition(7, starts_after=8),
                Partition(8, starts_after=9),
                Partition(9, starts_after=7),
            ],
            None,
        ),
        ([Partition(7, cursor_from=(8,)), Partition(8, cursor_from=(7,))], None),
        ([Partition(7, starts_after=8), Partition(8, cursor_from=(7,))], None),
    ],
)
def test_r12_impossible_lineage_names_the_partition(
    partitions: list[Partition], named: int | None
) -> None:
    with pytest.raises(LineageError) as caught:
        graph(*partitions)
    assert caught.value.feed == "http://feed"
    if named is None:
        assert caught.value.partition in {p.id for p in partitions}
        assert "cycle" in str(caught.value)
    else:
        assert caught.value.partition == named


def test_r12_unlisted_parents_and_ancestors_are_no_error() -> None:
    assert len(graph(Partition(1, starts_after=0), Partition(2, cursor_from=(9, 8)))) == 2


def test_r12_a_chain_of_all_partitions_is_built_without_recursion() -> None:
    chain = {p: Partition(p, closed=True, starts_after=p - 1 if p else None) for p in range(32768)}
    assert len(validate(FeedInfo("v2-draft", chain))) == 32768


def test_the_repr_shows_the_edges() -> None:
    shown = repr(graph(Partition(0), Partition(1, starts_after=0), Partition(2, cursor_from=(9,))))
    assert "3 partitions" in shown
    assert "0→1" in shown
    assert "9⇒2" in shown


def test_r21_the_middle_of_a_long_cycle_is_left_out_of_the_message() -> None:
    partitions = [Partition(n, starts_after=(n + 1) % 1000) for n in range(1000)]
    with pytest.raises(LineageError, match=r"more \.\.\.") as caught:
        graph(*partitions)
    assert len(str(caught.value)) < 200
