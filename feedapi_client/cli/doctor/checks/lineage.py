"""Checks of the lineage of partitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from feedapi_client.cli.doctor.checks.base import Finding
from feedapi_client.cli.doctor.checks.discovery import partition_id
from feedapi_client.cli.doctor.evidence import Evidence
from feedapi_client.errors import LineageError
from feedapi_client.lineage.graph import validate
from feedapi_client.lineage.missing_edges import suspected_missing_edges

_FIELDS = ("startsAfterPartition", "cursorFromPartitions")
_OLD_FIELDS = ("startsAfterParent", "splitFromAncestors")


def one_method(evidence: Evidence) -> Iterator[Finding]:
    """A partition uses one split method."""
    for partition in evidence.partitions.values():
        if partition.starts_after is not None and partition.cursor_from:
            yield Finding("it has startsAfterPartition and cursorFromPartitions", partition.id)


def no_cycle(evidence: Evidence) -> Iterator[Finding]:
    """Nothing descends from itself."""
    assert evidence.info is not None
    partitions = {
        id: replace(p, cursor_from=()) if p.starts_after is not None else p
        for id, p in evidence.partitions.items()
    }
    try:
        validate(replace(evidence.info, partitions=partitions))
    except LineageError as error:
        yield Finding(error.message, error.partition)


def parents_are_closed(evidence: Evidence) -> Iterator[Finding]:
    """`startsAfterPartition` names a closed partition."""
    for partition in evidence.partitions.values():
        parent = evidence.partitions.get(
            -1 if partition.starts_after is None else partition.starts_after
        )
        if parent is not None and not parent.closed:
            yield Finding(f"it starts after partition {parent.id}, which is open", partition.id)


def parents_are_listed(evidence: Evidence) -> Iterator[Finding]:
    """`startsAfterPartition` names a listed partition."""
    for partition in evidence.partitions.values():
        parent = partition.starts_after
        if parent is not None and parent not in evidence.partitions:
            yield Finding(f"it starts after partition {parent}, which is not listed", partition.id)


def ancestors_are_gone(evidence: Evidence) -> Iterator[Finding]:
    """`cursorFromPartitions` names partitions that are no longer listed."""
    for partition in evidence.partitions.values():
        for ancestor in partition.cursor_from:
            if ancestor in evidence.partitions:
                yield Finding(
                    f"it takes its cursor from partition {ancestor}, which is still listed",
                    partition.id,
                )


def lineage_types(evidence: Evidence) -> Iterator[Finding]:
    """Lineage fields hold ids."""
    for entry in evidence.entries:
        id = partition_id(entry.get("id"))
        for name in (_FIELDS[0], _OLD_FIELDS[0]):
            if entry.get(name) is not None and partition_id(entry[name]) is None:
                yield Finding(f"{name} is no id of a partition", id)
        for name in (_FIELDS[1], _OLD_FIELDS[1]):
            value = entry.get(name)
            if value is not None and not (
                isinstance(value, list) and all(partition_id(each) is not None for each in value)
            ):
                yield Finding(f"{name} is no list of ids of partitions", id)


def lineage_is_strings(evidence: Evidence) -> Iterator[Finding]:
    """Ids in lineage fields are strings."""
    numbers = [
        entry
        for entry in evidence.entries
        if any(type(value) is int for value in _lineage_values(entry))
    ]
    if numbers:
        yield Finding(f"the lineage of {len(numbers)} partitions holds numbers")


def _lineage_values(entry: dict[str, Any]) -> Iterator[Any]:
    for name in (*_FIELDS, *_OLD_FIELDS):
        value = entry.get(name)
        yield from value if isinstance(value, list) else (value,)


def lineage_names(evidence: Evidence) -> Iterator[Finding]:
    """Lineage fields have the names of the reference section."""
    for name, wanted in zip(_OLD_FIELDS, _FIELDS, strict=True):
        count = sum(name in entry for entry in evidence.entries)
        if count:
            yield Finding(f"{count} partitions have {name} in place of {wanted}")


def no_zero_values(evidence: Evidence) -> Iterator[Finding]:
    """A partition without a parent has no `startsAfterPartition`."""
    for entry in evidence.entries:
        parent = entry.get(_FIELDS[0])
        if partition_id(entry.get("id")) == 0 and type(parent) is int and parent == 0:
            yield Finding("startsAfterPartition is 0, which is the partition itself", 0)


def edges_are_listed(evidence: Evidence) -> Iterator[Finding]:
    """Children of a closed partition name it."""
    suspected = suspected_missing_edges(None, evidence.partitions)
    if suspected is not None:
        yield Finding(str(suspected))
