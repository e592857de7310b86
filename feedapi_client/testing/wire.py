"""What the publisher writes: discovery objects and the lines of a response, in each dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from feedapi_client.model import DialectName, Partition
from feedapi_client.testing.log import PartitionLog

Headers = Mapping[int, Mapping[str, str]]
"""Event headers (dialect v1) by the event's feed-wide number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """What publishers in the field do differently. Assign a new one to `Publisher.quirks` at any time."""

    integer_ids: bool = False
    """Discovery holds partition ids as JSON integers."""
    integer_lineage: bool = False
    """Discovery holds lineage as JSON integers."""
    old_lineage_names: bool = False
    """`startsAfterParent` and `splitFromAncestors`, as in the specification's first example."""
    omit_parent_zero: bool = False
    """`startsAfterPartition` is left out when the parent is partition 0."""
    last_cursor: Literal["closed", "always", "never"] | None = None
    """Which partitions have `lastCursor`; None: the closed ones in dialect v2-draft, none in v2-token."""
    awkward_cursors: bool = False
    """Cursors hold characters that need percent-encoding."""
    ignore_event_types: bool = False
    """`event-types` and `skip-event-types` are ignored, which a publisher may do."""
    answers_v1: bool = False
    """A v2 publisher goes on to answer fetches in dialect v1."""
    keep_token: bool = False
    """A change of topology leaves the token as it is; only `rotate_token()` changes it."""
    unknown_partition: int = 404
    """Status for a partition that is not listed."""


def discovery(
    dialect: DialectName,
    partitions: Sequence[Partition],
    *,
    token: str,
    exactly_once: bool,
    stream: bool,
    filters: Sequence[str],
    quirks: Quirks,
) -> dict[str, Any]:
    """The discovery object."""
    found: dict[str, Any] = {"token": token} if dialect == "v2-token" else {}
    found["partitions"] = [_partition(one, dialect, quirks) for one in partitions]
    found["exactlyOnce"] = exactly_once
    if stream:
        found["stream"] = True
    if filters:
        found["filters"] = list(filters)
    return found


def _partition(partition: Partition, dialect: DialectName, quirks: Quirks) -> dict[str, Any]:
    lineage = int if quirks.integer_lineage else str
    fields: dict[str, Any] = {"id": partition.id if quirks.integer_ids else str(partition.id)}
    if partition.closed:
        fields["closed"] = True
    mode = quirks.last_cursor or ("closed" if dialect == "v2-draft" else "never")
    if mode == "always" or (mode == "closed" and partition.closed):
        fields["lastCursor"] = partition.last_cursor
    if partition.starts_after is not None and not (
        partition.starts_after == 0 and quirks.omit_parent_zero
    ):
        fields["startsAfterParent" if quirks.old_lineage_names else "startsAfterPartition"] = (
            lineage(partition.starts_after)
        )
    if partition.cursor_from:
        fields["splitFromAncestors" if quirks.old_lineage_names else "cursorFromPartitions"] = [
            lineage(one) for one in partition.cursor_from
        ]
    return fields


class LineWriter:
    """Encodes runs of events and checkpoints of one partition in one dialect. `v1_headers` are the names of the headers to include."""

    def __init__(
        self,
        dialect: DialectName,
        partition: int,
        v1_headers: Sequence[str] = (),
        headers: Headers | None = None,
    ) -> None:
        self._names = v1_headers
        self._headers = headers or {}
        lead = b'"partition":%d,' % partition if dialect == "v1" else b""
        self._event = (
            b"{"
            + lead
            + {"v1": b'"headers":{},"data":', "v2-draft": b'"event":', "v2-token": b'"data":'}[
                dialect
            ]
        )
        self._event_with_headers = b"{" + lead + b'"headers":%b,"data":%b}\n'
        self._checkpoint = b"{" + lead + b'"cursor":'

    def events(self, log: PartitionLog, indices: Sequence[int]) -> bytes:
        """The lines of the events at the indices."""
        if not indices:
            return b""
        if self._names and self._headers:
            return b"".join(self._with_headers(log, index) for index in indices)
        payloads = (
            log.payloads[indices.start : indices.stop]
            if isinstance(indices, range)
            else [log.payloads[index] for index in indices]
        )
        return self._event + (b"}\n" + self._event).join(payloads) + b"}\n"  # type: ignore[arg-type]

    def checkpoint(self, cursor: str) -> bytes:
        """The line of a checkpoint."""
        return self._checkpoint + orjson.dumps(cursor) + b"}\n"

    def _with_headers(self, log: PartitionLog, index: int) -> bytes:
        every = self._headers.get(log.seqs[index], {})
        chosen = (
            every
            if "_all" in self._names
            else {name: every[name] for name in self._names if name in every}
        )
        payload = log.payloads[index]
        assert payload is not None
        return self._event_with_headers % (orjson.dumps(dict(chosen)), payload)
