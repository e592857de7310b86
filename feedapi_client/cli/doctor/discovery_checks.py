"""Checks of the discovery document, each as a function that yields findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from feedapi_client.cli.doctor import needs
from feedapi_client.cli.doctor.check import CheckSection, Finding, Level
from feedapi_client.cli.doctor.evidence import FeedEvidence, WireDiscovery
from feedapi_client.protocol import text
from feedapi_client.protocol.negotiation import partition_id

_NEGOTIATION = "specification, Protocol negotiation"
_PARTITIONS = "specification, Discovery call, partitions"
_FLAGS = "specification, Discovery call, flags"
_FIELD = "publishers in the field"
_V2 = needs.dialects("v2-draft", "v2-token")

SECTION = CheckSection("Discovery")


def _is_discovery(found: WireDiscovery) -> bool:
    if found.answer.status == 400:
        return found.answer.problem is None and found.info is not None
    listed = (found.document or {}).get("partitions", False)
    return found.answer.problem is None and (listed is None or isinstance(listed, list))


def _not_a_discovery(found: WireDiscovery) -> str:
    if found.answer.status != 200:
        return f"status {found.answer.status}"
    if found.answer.cut:
        return f"longer than {len(found.answer.body)} bytes, which is as much as was read"
    return (
        "status 200 with JSON that lists no partitions"
        if found.document
        else ("status 200 with a body that is no JSON object")
    )


@SECTION.check(
    "discovery-answers",
    Level.MUST,
    requirement="A GET without arguments is answered with status 200 and a JSON object that "
    "lists `partitions`; by a v1 feed with status 400.",
    cost="A consumer does not start. One that runs goes on with the topology it knows, and "
    "does not see splits.",
    source=_NEGOTIATION,
    rules=("R1", "R10"),
)
def _answers(evidence: FeedEvidence) -> Iterator[Finding]:
    wrong = [d for d in evidence.discoveries if not _is_discovery(d)]
    if wrong:
        found = wrong[0]
        what = str(found.answer) if not found.answer.ok else _not_a_discovery(found)
        yield Finding(f"{len(wrong)} of {len(evidence.discoveries)} discoveries: {what}")


def _shown(value: object) -> str:
    return ascii(value)[:60]


@SECTION.check(
    "partition-id",
    Level.MUST,
    requirement="Each partition has an `id` that holds an integer from 0 to 32767.",
    cost="A consumer refuses the whole discovery.",
    source=_PARTITIONS,
    rules=("R12",),
    needs=(needs.DOCUMENT,),
)
def _ids_in_range(evidence: FeedEvidence) -> Iterator[Finding]:
    listed: Any = (evidence.discoveries[0].document or {}).get("partitions")
    for index, entry in enumerate(listed if isinstance(listed, list) else ()):
        if not isinstance(entry, dict):
            yield Finding(f"partitions[{index}] is no object")
        elif partition_id(entry.get("id")) is None:
            yield Finding(f"partitions[{index}] has the id {_shown(entry.get('id'))}")


@SECTION.check(
    "partition-id-string",
    Level.MUST,
    requirement="An `id` is a string, without leading zeros.",
    cost="This library accepts numbers. Clients with typed decoders fail at the discovery.",
    source=_PARTITIONS,
    rules=("R12",),
    needs=(needs.DOCUMENT,),
)
def _ids_are_strings(evidence: FeedEvidence) -> Iterator[Finding]:
    ids = [entry.get("id") for entry in evidence.entries]
    numbers = [id for id in ids if type(id) is int]
    if numbers:
        yield Finding(f"{len(numbers)} ids are numbers, such as {numbers[0]}")
    padded = [
        id
        for id in ids
        if isinstance(id, str) and partition_id(id) is not None and str(int(id)) != id
    ]
    if padded:
        yield Finding(f"{len(padded)} ids have leading zeros, such as {_shown(padded[0])}")


@SECTION.check(
    "partition-unique",
    Level.MUST,
    requirement="No partition is listed twice.",
    cost="A consumer refuses the whole discovery.",
    source=_PARTITIONS,
    rules=("R12",),
    needs=(needs.DOCUMENT,),
)
def _ids_are_unique(evidence: FeedEvidence) -> Iterator[Finding]:
    ids = Counter(partition_id(entry.get("id")) for entry in evidence.entries)
    for id, count in ids.items():
        if id is not None and count > 1:
            yield Finding(f"it is listed {count} times", id)


def _entry_types(entry: dict[str, Any]) -> Iterator[Finding]:
    id = partition_id(entry.get("id"))
    if not isinstance(entry.get("closed"), (bool, type(None))):
        yield Finding(f"closed is {_shown(entry['closed'])}, not a boolean", id)
    if not isinstance(entry.get("lastCursor"), (str, type(None))):
        yield Finding(f"lastCursor is {_shown(entry['lastCursor'])}, not a string", id)


@SECTION.check(
    "discovery-types",
    Level.MUST,
    requirement="`closed` is a boolean; `lastCursor` and `token` are strings; `stream` and "
    "`exactlyOnce` are booleans or objects; `filters` is a list of strings.",
    cost="A consumer refuses the whole discovery.",
    source=_FLAGS,
    rules=("R12",),
    needs=(needs.DOCUMENT,),
)
def _field_types(evidence: FeedEvidence) -> Iterator[Finding]:
    document = evidence.discoveries[0].document or {}
    for name in ("stream", "exactlyOnce"):
        if not isinstance(document.get(name), (bool, dict, type(None))):
            yield Finding(f"{name} is {_shown(document[name])}, not a boolean or an object")
    filters = document.get("filters")
    if filters is not None and not (
        isinstance(filters, list) and all(isinstance(name, str) for name in filters)
    ):
        yield Finding(f"filters is {_shown(filters)}, not a list of strings")
    token = document.get("token")
    if token is not None and not (isinstance(token, str) and (not token or text.are_valid(token))):
        yield Finding("token is not printable ASCII of at most 16 KiB")
    for entry in evidence.entries:
        yield from _entry_types(entry)


@SECTION.check(
    "last-cursor-useful",
    Level.DEVIATION,
    requirement="A closed partition has `lastCursor`, in a published feed too.",
    cost="A consumer can't tell the end from a replica that lags: it asks again for "
    "`Limits.settle_time`, before the children begin.",
    source=_FIELD,
    rules=("R6",),
    needs=(needs.dialects("v2-token"), needs.CLOSED),
)
@SECTION.check(
    "last-cursor-listed",
    Level.MUST,
    requirement="In a draft feed, a closed partition has `lastCursor`.",
    cost="A consumer can't tell the end from a replica that lags: it asks again for "
    "`Limits.settle_time`, before the children begin.",
    source=_PARTITIONS,
    rules=("R6",),
    needs=(needs.dialects("v2-draft"), needs.CLOSED),
)
def _last_cursor_listed(evidence: FeedEvidence) -> Iterator[Finding]:
    for partition in evidence.partitions.values():
        if partition.closed and partition.last_cursor is None:
            yield Finding("it is closed and has no lastCursor", partition.id)


@SECTION.check(
    "partitions-listed",
    Level.DEVIATION,
    requirement="Discovery lists a partition.",
    cost="A consumer waits for one, and is not ready until then.",
    source=_FIELD,
    rules=("R7",),
    needs=(needs.DOCUMENT, _V2),
)
def _lists_partitions(evidence: FeedEvidence) -> Iterator[Finding]:
    empty = [d for d in evidence.discoveries if d.info is not None and not d.info.partitions]
    if empty:
        listed = "null" if (empty[0].document or {}).get("partitions") is None else "an empty list"
        yield Finding(f"{len(empty)} of {len(evidence.discoveries)} discoveries have {listed}")


@SECTION.check(
    "partition-stays",
    Level.MUST,
    requirement="An open partition stays listed, until others name it in `cursorFromPartitions`.",
    cost="A consumer stops reading it and reports it as vanished. After a rollback `feedapi "
    "cursors restore` moves its cursors back.",
    source="specification, Partitions, method 2",
    rules=("R11",),
    needs=(needs.DISCOVERIES,),
)
def _partitions_stay(evidence: FeedEvidence) -> Iterator[Finding]:
    infos = [d.info for d in evidence.discoveries if d.info is not None and d.info.partitions]
    for before, now in pairwise(infos):
        inherited = {id for each in now.partitions.values() for id in each.cursor_from}
        for id, partition in before.partitions.items():
            if not partition.closed and id not in now.partitions and id not in inherited:
                yield Finding("it was open, is no longer listed, and none takes it over", id)


@SECTION.check(
    "last-cursor-text",
    Level.MUST,
    requirement="`lastCursor` is printable ASCII of at most 16 KiB.",
    cost="A consumer refuses the whole discovery: it could neither store the cursor nor send it.",
    source=_FIELD,
    rules=("R18",),
    needs=(needs.DOCUMENT,),
)
def _last_cursor_text(evidence: FeedEvidence) -> Iterator[Finding]:
    for entry in evidence.entries:
        cursor = entry.get("lastCursor")
        if isinstance(cursor, str) and cursor and not text.are_valid(cursor):
            yield Finding(f"lastCursor is {text.problem(cursor)}", partition_id(entry.get("id")))


@SECTION.check(
    "discovery-usable",
    Level.MUST,
    requirement="A consumer of this library accepts the discovery.",
    cost="It does not start.",
    source=_NEGOTIATION,
    rules=("R1", "R12"),
    needs=(needs.DOCUMENT,),
)
def _usable(evidence: FeedEvidence) -> Iterator[Finding]:
    found = evidence.discoveries[0]
    if found.document is not None and found.refusal:
        yield Finding(found.refusal)


@SECTION.check(
    "closed-final",
    Level.MUST,
    requirement="A closed partition stays closed, and its `lastCursor` stays what it is.",
    cost="A consumer is done with it: what comes later is never read.",
    source="specification, Partitions, starting and closing partitions",
    rules=("R6",),
    needs=(needs.DISCOVERIES, needs.CLOSED),
)
def _closed_is_final(evidence: FeedEvidence) -> Iterator[Finding]:
    infos = [d.info for d in evidence.discoveries if d.info is not None]
    for before, now in pairwise(infos):
        for id, partition in before.partitions.items():
            later = now.partitions.get(id)
            if not partition.closed or later is None:
                continue
            if not later.closed:
                yield Finding("it was closed, and is open in a later discovery", id)
            elif partition.last_cursor != later.last_cursor:
                yield Finding("it is closed, and its lastCursor changed", id)


@SECTION.check(
    "discovery-stable",
    Level.DEVIATION,
    requirement="All replicas, versions and caches answer discovery alike, and the token "
    "changes with the partitions only.",
    cost="Refusals and rediscoveries in turn: a consumer gets on slowly, and stops after "
    "`RetryPolicy.refused_for`.",
    source=_FIELD,
    rules=("R2", "R10"),
    needs=(needs.DISCOVERIES,),
)
def _stable(evidence: FeedEvidence) -> Iterator[Finding]:
    seen: list[Any] = []
    for found in evidence.discoveries:
        topology = found.topology
        if topology is None:
            continue
        if topology in seen[:-1] and topology != seen[-1]:
            yield Finding("a discovery says what an earlier one said, and one between them did not")
            return
        seen.append(topology)
    changes = [now for before, now in pairwise(seen) if before != now]
    lineages = [topology[2] for topology in seen]
    if len(changes) > 1 and all(lineage == lineages[0] for lineage in lineages):
        yield Finding(
            f"dialect or token changed {len(changes)} times in {len(seen)} discoveries, "
            "although the partitions did not"
        )
