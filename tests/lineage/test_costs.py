"""What a discovery costs grows with its partitions, and no faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from feedapi_client.lineage.planner import Planner
from feedapi_client.lineage.states import Save
from feedapi_client.model import FeedInfo, Partition

SIZE = 200


class Id(int):
    """Counts how often any id is looked up in a set or a dictionary, or passed on the way."""

    looked_up = 0

    def __hash__(self) -> int:
        Id.looked_up += 1
        return int.__hash__(self)


def chain_by_cursors(size: int) -> list[Partition]:
    ids = list(map(Id, range(size)))
    return [Partition(id, cursor_from=(ids[id - 1],) if id else ()) for id in ids]


def chain_of_parents(size: int) -> list[Partition]:
    ids = list(map(Id, range(size)))
    parents = [None, *ids]
    return [
        Partition(id, closed=id + 1 < size, last_cursor="e", starts_after=parents[id]) for id in ids
    ]


def renumbered(size: int) -> list[Partition]:
    ids = list(map(Id, range(2 * size)))
    return [Partition(id, cursor_from=(ids[id - size],) if id >= size else ()) for id in ids]


def one_parent(size: int) -> list[Partition]:
    first, *others = map(Id, range(size))
    parent = Partition(first, closed=True, last_cursor="e")
    return [parent, *(Partition(id, starts_after=first) for id in others)]


def merged(size: int) -> list[Partition]:
    *ids, last = map(Id, range(size + 1))
    return [*map(Partition, ids), Partition(last, cursor_from=tuple(ids))]


@pytest.mark.parametrize(
    "shape", [chain_by_cursors, chain_of_parents, renumbered, one_parent, merged]
)
@pytest.mark.parametrize("shared", [False, True])
def test_what_a_discovery_costs_grows_with_its_partitions(
    shape: Callable[[int], list[Partition]], shared: bool
) -> None:
    def cost(size: int) -> int:
        partitions = shape(size)
        planner = Planner(feed="http://feed", shared=shared)
        for listed in (partitions[:1], *[partitions] * 3):
            Id.looked_up = 0
            for action in planner.discover(
                FeedInfo("v2-draft", {each.id: each for each in listed})
            ):
                if isinstance(action, Save):
                    planner.saved(action.positions)
            if shared:
                began = planner.begin_load()
                stored = {id: e.position for id, e in planner.entries.items() if e.position}
                planner.refresh(stored, owned=stored, others=(), began=began, looked=began)
        return Id.looked_up

    assert cost(2 * SIZE) <= 2.5 * cost(SIZE)
