"""Which instance reads which partition. Pure: no input or output, no clock, no randomness.

Every instance computes this by itself. With the same view all come to the same result; with
different ones the compare-and-set of a claim decides, and the next round agrees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

Unit = tuple[int, ...]
"""Partitions that one instance has to hold together, usually one alone. Sorted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one instance does next.

    Attributes:
        claim: partitions without a living owner that belong to its share.
        give: partitions that it holds and that exceed its share or can't be read any more.
    """

    claim: frozenset[int]
    give: frozenset[int]


def assign(owners: Mapping[int, str | None], instances: Collection[str]) -> dict[int, str]:
    """Return the instance that each unit is to be read by.

    Balanced within one. Each instance keeps what it has, up to its share; where the units can't be
    divided evenly, those that have most have one more. Fewer moves are not possible.

    Arguments:
        owners: the present owner of each unit. One that is not in `instances` counts as none.
        instances: the living instances. Without one nothing is assigned.
    """
    names = sorted(set(instances))
    if not names:
        return {}
    held: dict[str, list[int]] = {name: [] for name in names}
    free: list[int] = []
    for unit in sorted(owners):
        held.get(owners[unit] or "", free).append(unit)
    shares = _shares(held, len(owners))
    result: dict[int, str] = {}
    for name in names:
        result.update(dict.fromkeys(held[name][: shares[name]], name))
        free += held[name][shares[name] :]
    free.sort()
    for name in names:
        wanted = max(0, shares[name] - len(held[name]))
        result.update(dict.fromkeys(free[:wanted], name))
        del free[:wanted]
    return result


def _shares(held: Mapping[str, list[int]], units: int) -> dict[str, int]:
    """Return how many units each instance is to have."""
    share, remainder = divmod(units, len(held))
    # The odd ones stay with those that have them: otherwise balanced instances would swap.
    most = sorted(held, key=lambda name: (-len(held[name]), name))
    return {name: share + (place < remainder) for place, name in enumerate(most)}


def plan(
    me: str,
    instances: Collection[str],
    owners: Mapping[int, str | None],
    units: Iterable[Unit],
    *,
    pinned: Collection[int] = (),
) -> Plan:
    """Return what the instance `me` claims and gives away.

    Arguments:
        me: one of `instances`.
        instances: the living instances.
        owners: the owner of each lease, also of partitions that are in no unit.
        units: the partitions that can be read, as far as `me` sees. None is in two units.
        pinned: partitions of `me` that it keeps, and that don't count.
    """
    alive = set(instances)
    members = {unit[0]: unit for unit in units}
    known = {partition for unit in members.values() for partition in unit}
    # What another instance reads counts, although this one does not see that it can be read.
    for partition, owner in owners.items():
        if owner in alive and owner != me and partition not in known:
            members[partition] = (partition,)
    present = {first: _owner(unit, owners, alive) for first, unit in members.items()}
    target = assign(present, alive)
    claim, give = set(), set()
    for first, unit in members.items():
        for partition in unit:
            owner = owners.get(partition)
            if target[first] == me and owner not in alive:
                claim.add(partition)
            elif target[first] != me and owner == me:
                give.add(partition)
    give |= {p for p, owner in owners.items() if owner == me and p not in known}
    return Plan(frozenset(claim), frozenset(give.difference(pinned)))


def _owner(unit: Unit, owners: Mapping[int, str | None], alive: Collection[str]) -> str | None:
    """Return the instance that counts as the owner of a unit: that of its first owned partition."""
    found = (owners.get(partition) for partition in unit)
    return next((owner for owner in found if owner is not None and owner in alive), None)


def merged(units: Iterable[Iterable[int]]) -> list[Unit]:
    """Return the units, those with a common partition merged into one."""
    groups: dict[int, set[int]] = {}
    for unit in units:
        group = set(unit)
        for other in {id(groups[p]): groups[p] for p in group if p in groups}.values():
            group |= other
        groups.update(dict.fromkeys(group, group))
    return sorted({id(group): tuple(sorted(group)) for group in groups.values()}.values())


def spread(owners: Mapping[int, str | None]) -> dict[str, int]:
    """Return how many leases each owner has."""
    counts: dict[str, int] = defaultdict(int)
    for owner in owners.values():
        if owner is not None:
            counts[owner] += 1
    return dict(counts)
