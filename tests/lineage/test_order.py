"""How many partitions come before each one."""

from __future__ import annotations

from feedapi_client.lineage.order import count_before, preceding

from feedapi_client.lineage.graph import Graph
from feedapi_client.model import Partition


def depths_of(*partitions: Partition, parents: dict[int, int] | None = None) -> dict[int, int]:
    graph = Graph({p.id: p for p in partitions})
    depths: dict[int, int] = {}
    before = {p.id: preceding(p, graph, parents or {}) for p in graph}
    count_before({id: dict.fromkeys(first, 1) for id, first in before.items()}, depths)
    return depths


def test_r08_depth_counts_the_parents() -> None:
    chain = Partition(0, starts_after=1), Partition(1, starts_after=3), Partition(3)
    assert depths_of(*chain) == {3: 0, 1: 1, 0: 2}


def test_r09_a_successor_comes_after_the_parent_of_its_ancestor() -> None:
    successor = Partition(2, cursor_from=(1,))
    assert depths_of(Partition(0, True), Partition(7, True), successor, parents={1: 0})[2] == 1


def test_r09_a_successor_of_unknown_ancestors_comes_after_every_closed_partition() -> None:
    chain = Partition(0, True), Partition(3, True, starts_after=0)
    assert depths_of(*chain, Partition(2, cursor_from=(1,)), Partition(4))[2] == 2


def test_r09_a_partition_that_descends_from_a_successor_does_not_come_before_it() -> None:
    found = depths_of(
        Partition(2, True, cursor_from=(1,)), Partition(3, True, starts_after=2), Partition(4)
    )
    assert found == {2: 0, 3: 1, 4: 0}


def test_depths_of_partitions_that_are_gone_still_count() -> None:
    depths = {0: 5}
    count_before({1: {0: 1}, 2: {0: 0, 9: 1}}, depths)
    assert depths == {0: 5, 1: 6, 2: 5}


def test_a_chain_of_all_partitions_is_counted_without_recursion() -> None:
    chain = [Partition(p, True, starts_after=p + 1) for p in range(32767)]
    assert depths_of(*chain, Partition(32767, True))[0] == 32767


def test_counting_ends_where_the_order_has_a_cycle() -> None:
    depths: dict[int, int] = {}
    count_before({1: {2: 1}, 2: {1: 1}}, depths)
    assert set(depths) == {1, 2}
