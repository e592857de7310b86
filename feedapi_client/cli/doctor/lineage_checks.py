"""Checks of the lineage of partitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from feedapi_client.cli.doctor import needs
from feedapi_client.cli.doctor.check import CheckSection, Finding, Level
from feedapi_client.cli.doctor.evidence import FeedEvidence
from feedapi_client.errors import LineageError
from feedapi_client.lineage.graph import suspected_missing_edges, validate
from feedapi_client.protocol.negotiation import partition_id

_FIELDS = ("startsAfterPartition", "cursorFromPartitions")
_OLD_FIELDS = ("startsAfterParent", "splitFromAncestors")
_PARTITIONS = "specification, Discovery call, partitions"
_METHOD_1 = "specification, Partitions, method 1"
_METHOD_2 = "specification, Partitions, method 2"
_FIELD = "publishers in the field"
_V2 = needs.dialects("v2-draft", "v2-token")

SECTION = CheckSection("Lineage")


@SECTION.check(
    "one-split-method",
    Level.MUST,
    requirement="A partition has `startsAfterPartition` or `cursorFromPartitions`, not both.",
    cost="A consumer refuses the whole discovery: it can't know where to begin.",
    source=_PARTITIONS,
    rules=("R12",),
    needs=(needs.INFO, _V2),
)
def _one_method(evidence: FeedEvidence) -> Iterator[Finding]:
    for partition in evidence.partitions.values():
        if partition.starts_after is not None and partition.cursor_from:
            yield Finding("it has startsAfterPartition and cursorFromPartitions", partition.id)


@SECTION.check(
    "lineage-types",
    Level.MUST,
    requirement="`startsAfterPartition` is an id, `cursorFromPartitions` a list of ids.",
    cost="A consumer refuses the whole discovery.",
    source=_PARTITIONS,
    rules=("R12",),
    needs=(needs.DOCUMENT,),
)
def _lineage_types(evidence: FeedEvidence) -> Iterator[Finding]:
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


@SECTION.check(
    "no-cycle",
    Level.MUST,
    requirement="No partition descends from itself.",
    cost="A consumer refuses the whole discovery.",
    source=_PARTITIONS,
    rules=("R12",),
    needs=(needs.INFO, _V2),
)
def _no_cycle(evidence: FeedEvidence) -> Iterator[Finding]:
    assert evidence.info is not None
    partitions = {
        id: replace(p, cursor_from=()) if p.starts_after is not None else p
        for id, p in evidence.partitions.items()
    }
    try:
        validate(replace(evidence.info, partitions=partitions))
    except LineageError as error:
        yield Finding(error.message, error.partition)


@SECTION.check(
    "parent-closed",
    Level.MUST,
    requirement="`startsAfterPartition` points to a closed partition.",
    cost="The children wait for ever: their parent never ends.",
    source=_METHOD_1,
    rules=("R8",),
    needs=(needs.INFO, _V2),
)
def _parents_are_closed(evidence: FeedEvidence) -> Iterator[Finding]:
    for partition in evidence.partitions.values():
        parent = evidence.partitions.get(
            -1 if partition.starts_after is None else partition.starts_after
        )
        if parent is not None and not parent.closed:
            yield Finding(f"it starts after partition {parent.id}, which is open", partition.id)


@SECTION.check(
    "parent-listed",
    Level.MUST,
    requirement="A parent stays in the list, with the history before the split.",
    cost="A new consumer never sees that history. One that waited for the parent ends with "
    "`LostPartitionError`.",
    source=_METHOD_1,
    rules=("R8",),
    needs=(needs.INFO, _V2),
)
def _parents_are_listed(evidence: FeedEvidence) -> Iterator[Finding]:
    for partition in evidence.partitions.values():
        parent = partition.starts_after
        if parent is not None and parent not in evidence.partitions:
            yield Finding(f"it starts after partition {parent}, which is not listed", partition.id)


@SECTION.check(
    "ancestor-gone",
    Level.MUST,
    requirement="The partitions in `cursorFromPartitions` are no longer listed.",
    cost="Their whole history is on the new partitions too: a new consumer may read it twice.",
    source=_METHOD_2,
    rules=("R9",),
    needs=(needs.INFO, _V2),
)
def _ancestors_are_gone(evidence: FeedEvidence) -> Iterator[Finding]:
    for partition in evidence.partitions.values():
        for ancestor in partition.cursor_from:
            if ancestor in evidence.partitions:
                yield Finding(
                    f"it takes its cursor from partition {ancestor}, which is still listed",
                    partition.id,
                )


def _lineage_values(entry: dict[str, Any]) -> Iterator[Any]:
    for name in (*_FIELDS, *_OLD_FIELDS):
        value = entry.get(name)
        yield from value if isinstance(value, list) else (value,)


@SECTION.check(
    "lineage-string",
    Level.DEVIATION,
    requirement="`startsAfterPartition` and `cursorFromPartitions` hold strings.",
    cost="This library accepts numbers. Clients with typed decoders fail at the discovery.",
    source=_FIELD,
    rules=("R12",),
    needs=(needs.DOCUMENT,),
)
def _lineage_is_strings(evidence: FeedEvidence) -> Iterator[Finding]:
    numbers = [
        entry
        for entry in evidence.entries
        if any(type(value) is int for value in _lineage_values(entry))
    ]
    if numbers:
        yield Finding(f"the lineage of {len(numbers)} partitions holds numbers")


@SECTION.check(
    "lineage-names",
    Level.DEVIATION,
    requirement="Lineage is in `startsAfterPartition` and `cursorFromPartitions`, not in "
    "`startsAfterParent` and `splitFromAncestors`, as one example spells them.",
    cost="Other clients don't see the lineage: they read out of order, or from the beginning.",
    source=_FIELD,
    rules=("R12",),
    needs=(needs.DOCUMENT,),
)
def _lineage_names(evidence: FeedEvidence) -> Iterator[Finding]:
    for name, wanted in zip(_OLD_FIELDS, _FIELDS, strict=True):
        count = sum(name in entry for entry in evidence.entries)
        if count:
            yield Finding(f"{count} partitions have {name} in place of {wanted}")


@SECTION.check(
    "lineage-zero",
    Level.DEVIATION,
    requirement="A partition without a parent has no `startsAfterPartition`: 0 is a partition.",
    cost="No parent 0 can be trusted: the children of partition 0 are read beside it.",
    source=_FIELD,
    rules=("R8", "R12"),
    needs=(needs.DOCUMENT,),
)
def _no_zero_values(evidence: FeedEvidence) -> Iterator[Finding]:
    for entry in evidence.entries:
        parent = entry.get(_FIELDS[0])
        if partition_id(entry.get("id")) == 0 and type(parent) is int and parent == 0:
            yield Finding("startsAfterPartition is 0, which is the partition itself", 0)


@SECTION.check(
    "lineage-edge",
    Level.DEVIATION,
    requirement="Where a partition is closed and others replace it, they name it, partition 0 "
    "included.",
    cost="Children are read beside their parent, out of order, unless each consumer gives "
    "`lineage=`.",
    source=_FIELD,
    rules=("R8",),
    needs=(needs.INFO, _V2, needs.CLOSED),
)
def _edges_are_listed(evidence: FeedEvidence) -> Iterator[Finding]:
    suspected = suspected_missing_edges(None, evidence.partitions)
    if suspected is not None:
        yield Finding(str(suspected))
