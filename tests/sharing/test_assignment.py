"""The assignment: balanced, sticky, fewest moves, and agreement from stale views."""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.sharing.assignment import assign, merged, plan

NAMES = ("a", "b", "c", "d", "e")
names = st.sets(st.sampled_from(NAMES), min_size=1)
owners = st.dictionaries(
    st.integers(0, 40), st.one_of(st.none(), st.sampled_from((*NAMES, "gone"))), max_size=30
)


def counts(result: dict[int, str], instances: set[str]) -> list[int]:
    found = Counter(result.values())
    return [found[name] for name in instances]


@given(owners, names, st.randoms())
def test_each_unit_has_one_owner_and_no_two_differ_by_more_than_one(
    present: dict[int, str | None], instances: set[str], random: Random
) -> None:
    """Assigning again moves nothing, and the order of the input does not matter."""
    result = assign(present, instances)
    assert result.keys() == present.keys()
    assert set(result.values()) <= instances
    assert max(counts(result, instances)) - min(counts(result, instances)) <= 1
    assert assign(result, instances) == result
    items, shuffled = list(present.items()), list(instances)
    random.shuffle(items)
    random.shuffle(shuffled)
    assert assign(dict(items), shuffled) == result


@given(st.integers(0, 40), names)
def test_who_joins_takes_only_its_share_and_who_leaves_moves_only_its_own(
    units: int, instances: set[str]
) -> None:
    before = assign(dict.fromkeys(range(units)), instances)
    after = assign(dict(before), {*instances, "new"})
    moved = {unit for unit in before if after[unit] != before[unit]}
    assert all(after[unit] == "new" for unit in moved)
    assert len(moved) in (units // (len(instances) + 1), -(-units // (len(instances) + 1)))
    left = assign(dict(after), instances)
    assert {u for u in after if left[u] != after[u]} == {u for u in after if after[u] == "new"}


@given(
    st.dictionaries(st.integers(0, 6), st.sampled_from((None, "a", "b", "c")), max_size=5), names
)
def test_no_balanced_assignment_needs_fewer_moves(
    present: dict[int, str | None], instances: set[str]
) -> None:
    instances &= {"a", "b", "c"}
    if not instances:
        return
    units = list(present)
    fewest = len(units)
    for choice in product(sorted(instances), repeat=len(units)):
        tried = dict(zip(units, choice, strict=True))
        if max(counts(tried, instances)) - min(counts(tried, instances)) <= 1:
            fewest = min(fewest, sum(tried[u] != present[u] for u in units))
    result = assign(present, instances)
    assert sum(result[u] != present[u] for u in units) == fewest


class Leases:
    """The shared table, and what each instance last saw of it."""

    def __init__(self, owners: dict[int, str | None]) -> None:
        self.owners = dict(owners)
        self.alive: set[str] = set()

    def round(self, me: str, units: list[tuple[int, ...]], view: dict[int, str | None]) -> int:
        """Act on a view that may be stale: a claim succeeds only where it is still free."""
        changes = 0
        decided = plan(me, self.alive, view, units)
        for partition in sorted(decided.claim):
            if self.owners.get(partition) not in self.alive:
                self.owners[partition] = me
                changes += 1
        for partition in decided.give:
            if self.owners.get(partition) == me:
                self.owners[partition] = None
                changes += 1
        return changes


@given(owners, st.lists(names, min_size=1, max_size=4), st.data())
def test_stale_views_in_any_order_settle_soon_after_the_last_change(
    present: dict[int, str | None], histories: list[set[str]], data: st.DataObject
) -> None:
    units: list[tuple[int, ...]] = [(partition,) for partition in sorted(present)]
    leases = Leases(present)
    for alive in histories:
        leases.alive = alive
        view = dict(leases.owners)  # all look at the same time, and act one after the other
        for name in data.draw(st.permutations(sorted(alive))):
            leases.round(name, units, view)
    for _ in range(3):  # one to give away, one to claim, one to spare for the stale round above
        for name in data.draw(st.permutations(sorted(leases.alive))):
            leases.round(name, units, dict(leases.owners))
    view = dict(leases.owners)
    assert all(leases.round(name, units, view) == 0 for name in sorted(leases.alive))
    held = Counter(leases.owners[p] for (p,) in units)
    shares = [held[name] for name in leases.alive]
    assert sum(shares) == len(units)
    assert max(shares) - min(shares) <= 1


def test_what_can_not_be_read_any_more_is_given_away() -> None:
    assert assign({1: "a"}, ()) == {}
    assert plan("a", {"a"}, {1: "a", 2: "a"}, [(1,)]).give == {2}
    assert plan("a", {"a"}, {1: "a", 2: "a"}, [(1,)], pinned={2}).give == frozenset()


def test_the_partitions_of_one_unit_come_together() -> None:
    owners: dict[int, str | None] = {1: "a", 2: "b", 3: "b"}
    units = merged([(1, 2), (3,)])
    assert plan("b", {"a", "b"}, owners, units).give == {2}
    assert plan("a", {"a", "b"}, owners, units).claim == frozenset()
    assert plan("a", {"a", "b"}, owners | {2: None}, units).claim == {2}


def test_units_with_a_common_partition_are_merged() -> None:
    assert merged([(1, 2), (5,), (3,), (2, 3), (5,)]) == [(1, 2, 3), (5,)]


def test_what_others_read_counts_although_it_is_not_seen() -> None:
    """Instance b has discovered partitions 2 and 3, which a does not list yet."""
    owners: dict[int, str | None] = {0: None, 1: None, 2: "b", 3: "b"}
    assert plan("a", {"a", "b"}, owners, [(0,), (1,)]).claim == {0, 1}
