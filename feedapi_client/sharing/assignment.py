"""Which instance reads which partition. Pure: no input or output, no clock, no randomness.

Every instance computes this by itself. With the same view all come to the same result; with
different ones the compare-and-set of a claim decides, and the next round agrees.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

Unit = tuple[int, ...]
"""Partitions that one instance has to hold together, usually one alone. Sorted."""


class Plan(NamedTuple):
    claim: frozenset[int]
    give: frozenset[int]


def assign(owners: Mapping[int, str | None], instances: Collection[str]) -> dict[int, str]:
    """Return the instance that each unit is to be read by; `owners` may be dead.

    Balanced within one. Each instance keeps what it has, up to its share; where the units can't be
    divided evenly, those that have most have one more. Fewer moves are not possible.
    """
    if not instances:
        return {}
    held: dict[str, list[int]] = {name: [] for name in sorted(set(instances))}
    free: list[int] = []
    for unit in sorted(owners):
        held.get(owners[unit] or "", free).append(unit)
    share, remainder = divmod(len(owners), len(held))
    # The odd ones stay with those that have them: otherwise balanced instances would swap.
    most = sorted(held, key=lambda name: (-len(held[name]), name))
    shares = {name: share + (place < remainder) for place, name in enumerate(most)}
    for name, units in held.items():
        free += units[shares[name] :]
        del units[shares[name] :]
    free.sort()
    for name, units in held.items():
        missing = shares[name] - len(units)
        units += free[:missing]
        del free[:missing]
    return {unit: name for name, units in held.items() for unit in units}


def plan(
    me: str,
    instances: Collection[str],
    owners: Mapping[int, str | None],
    units: Iterable[Unit],
    *,
    pinned: Collection[int] = (),
) -> Plan:
    """`pinned` are partitions of `me` that it keeps, and that don't count; none is in two units."""
    living = {p: owner for p, owner in owners.items() if owner in instances}
    members = {unit[0]: unit for unit in units}
    known = {partition for unit in members.values() for partition in unit}
    # What another instance reads counts, although this one does not see that it can be read.
    members |= {p: (p,) for p, owner in living.items() if owner != me and p not in known}
    present = {
        first: next((living[p] for p in unit if p in living), None)
        for first, unit in members.items()
    }
    target = assign(present, instances)
    mine = {p for first, unit in members.items() if target[first] == me for p in unit}
    held = {p for p, owner in living.items() if owner == me}
    return Plan(frozenset(mine - living.keys()), frozenset(held - mine).difference(pinned))


def merged(units: Iterable[Iterable[int]]) -> list[Unit]:
    groups: dict[int, set[int]] = {}
    for unit in units:
        group = set(unit)
        for other in {id(groups[p]): groups[p] for p in group if p in groups}.values():
            group |= other
        groups.update(dict.fromkeys(group, group))
    return sorted({id(group): tuple(sorted(group)) for group in groups.values()}.values())
