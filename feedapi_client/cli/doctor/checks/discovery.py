"""Checks of the discovery document, each as a function that yields findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from feedapi_client.cli.doctor.checks.base import Finding
from feedapi_client.cli.doctor.evidence import Discovery, Evidence
from feedapi_client.protocol import cursors

_MAX_PARTITION = 32767


def partition_id(value: object) -> int | None:
    """Return the id of a partition, sent as a string or a number; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 5:
        value = int(value)
    if type(value) is int and 0 <= value <= _MAX_PARTITION:
        return value
    return None


def answers(evidence: Evidence) -> Iterator[Finding]:
    """The argument-less GET is answered by a discovery, or as v1 does."""
    wrong = [d for d in evidence.discoveries if not _is_discovery(d)]
    if wrong:
        found = wrong[0]
        what = str(found.answer) if not found.answer.ok else _not_a_discovery(found)
        yield Finding(f"{len(wrong)} of {len(evidence.discoveries)} discoveries: {what}")


def _is_discovery(found: Discovery) -> bool:
    if found.answer.status == 400:
        return found.answer.problem is None and found.info is not None
    listed = (found.document or {}).get("partitions")
    return found.answer.problem is None and isinstance(listed, list)


def _not_a_discovery(found: Discovery) -> str:
    if found.answer.status != 200:
        return f"status {found.answer.status}"
    if found.answer.cut:
        return f"longer than {len(found.answer.body)} bytes, which is as much as was read"
    return (
        "status 200 with JSON that lists no partitions"
        if found.document
        else ("status 200 with a body that is no JSON object")
    )


def ids_in_range(evidence: Evidence) -> Iterator[Finding]:
    """Each partition has an id from 0 to 32767."""
    listed: Any = (evidence.discoveries[0].document or {}).get("partitions")
    for index, entry in enumerate(listed if isinstance(listed, list) else ()):
        if not isinstance(entry, dict):
            yield Finding(f"partitions[{index}] is no object")
        elif partition_id(entry.get("id")) is None:
            yield Finding(f"partitions[{index}] has the id {_shown(entry.get('id'))}")


def ids_are_strings(evidence: Evidence) -> Iterator[Finding]:
    """Ids are strings, written in one way."""
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


def ids_are_unique(evidence: Evidence) -> Iterator[Finding]:
    """No partition is listed twice."""
    ids = Counter(partition_id(entry.get("id")) for entry in evidence.entries)
    for id, count in ids.items():
        if id is not None and count > 1:
            yield Finding(f"it is listed {count} times", id)


def field_types(evidence: Evidence) -> Iterator[Finding]:
    """Fields have the types that the specification gives them."""
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
    if token is not None and not (isinstance(token, str) and (not token or _valid(token))):
        yield Finding("token is not printable ASCII of at most 16 KiB")
    for entry in evidence.entries:
        yield from _entry_types(entry)


def _entry_types(entry: dict[str, Any]) -> Iterator[Finding]:
    id = partition_id(entry.get("id"))
    if not isinstance(entry.get("closed"), (bool, type(None))):
        yield Finding(f"closed is {_shown(entry['closed'])}, not a boolean", id)
    if not isinstance(entry.get("lastCursor"), (str, type(None))):
        yield Finding(f"lastCursor is {_shown(entry['lastCursor'])}, not a string", id)


def last_cursor_listed(evidence: Evidence) -> Iterator[Finding]:
    """Closed partitions have `lastCursor`."""
    for partition in evidence.partitions.values():
        if partition.closed and partition.last_cursor is None:
            yield Finding("it is closed and has no lastCursor", partition.id)


def last_cursor_text(evidence: Evidence) -> Iterator[Finding]:
    """`lastCursor` can be stored and sent."""
    for entry in evidence.entries:
        cursor = entry.get("lastCursor")
        if isinstance(cursor, str) and cursor and not _valid(cursor):
            yield Finding(f"lastCursor is {cursors.problem(cursor)}", partition_id(entry.get("id")))


def usable(evidence: Evidence) -> Iterator[Finding]:
    """A consumer accepts the discovery."""
    found = evidence.discoveries[0]
    if found.document is not None and found.refusal:
        yield Finding(found.refusal)


def stable(evidence: Evidence) -> Iterator[Finding]:
    """Discoveries don't go back to what an earlier one said."""
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


def closed_is_final(evidence: Evidence) -> Iterator[Finding]:
    """A closed partition stays closed, and its end stays where it is."""
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


def _valid(text: str) -> bool:
    return cursors.is_valid(text)


def _shown(value: object) -> str:
    return ascii(value)[:60]
