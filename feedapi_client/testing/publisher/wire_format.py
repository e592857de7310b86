"""What the publisher writes: discovery objects and the lines of a response, in each dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from feedapi_client.model import DialectName, Partition
from feedapi_client.testing.publisher.partition_log import PartitionLog
from feedapi_client.testing.publisher.quirks import Quirks

EventHeaders = Mapping[int, Mapping[str, str]]
"""Event headers (dialect v1) by the sequence number of the event."""


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
    """Return the discovery object."""
    found: dict[str, Any] = {"token": token} if dialect == "v2-token" else {}
    found["partitions"] = [_partition(partition, dialect, quirks) for partition in partitions]
    found["exactlyOnce"] = exactly_once
    if stream:
        found["stream"] = True
    if filters:
        found["filters"] = list(filters)
    return found


def _partition(partition: Partition, dialect: DialectName, quirks: Quirks) -> dict[str, Any]:
    lineage = int if quirks.integer_lineage else str
    starts_after, cursor_from = (
        ("startsAfterParent", "splitFromAncestors")
        if quirks.old_lineage_names
        else ("startsAfterPartition", "cursorFromPartitions")
    )
    fields: dict[str, Any] = {"id": partition.id if quirks.integer_ids else str(partition.id)}
    if partition.closed:
        fields["closed"] = True
    if lists_last_cursor(dialect, quirks, closed=partition.closed):
        fields["lastCursor"] = partition.last_cursor
    parent = partition.starts_after
    omitted = quirks.omit_starts_after or (parent == 0 and quirks.omit_parent_zero)
    if parent is not None and not omitted:
        fields[starts_after] = lineage(parent)
    if partition.cursor_from:
        fields[cursor_from] = [lineage(ancestor) for ancestor in partition.cursor_from]
    return fields


def lists_last_cursor(dialect: DialectName, quirks: Quirks, *, closed: bool) -> bool:
    """Return whether discovery holds the `lastCursor` of a partition."""
    mode = quirks.last_cursor or ("closed" if dialect == "v2-draft" else "never")
    return mode == "always" or (mode == "closed" and closed)


def _keys(dialect: DialectName, quirks: Quirks) -> tuple[bytes, bytes]:
    """Return how a line begins with its payload, and with its cursor."""
    name = "event" if (dialect == "v2-draft") is not quirks.swapped_payload_key else "data"
    names = ("data" if dialect == "v1" else name), "cursor"
    if quirks.pascal_case:
        names = names[0].capitalize(), names[1].capitalize()
    payload, cursor = (f'"{name}":'.encode() for name in names)
    return payload, cursor


class LineWriter:
    """Encodes the events and checkpoints of one partition in one dialect.

    Arguments:
        dialect: The dialect of the response.
        partition: The id of the partition.
        header_names: Names of the event headers to include (dialect v1); ``_all`` includes all.
        headers: The event headers of the feed.
        quirks: How the publisher names the fields.
    """

    def __init__(
        self,
        dialect: DialectName,
        partition: int,
        header_names: Sequence[str] = (),
        headers: EventHeaders | None = None,
        quirks: Quirks | None = None,
    ) -> None:
        self._header_names = header_names
        self._headers = headers or {}
        payload, cursor = _keys(dialect, quirks or Quirks())
        start = b"{" + (b'"partition":%d,' % partition if dialect == "v1" else b"")
        no_headers = b'"headers":{},' if dialect == "v1" else b""
        self._event = start + no_headers + payload
        self._event_with_headers = start + b'"headers":%b,' + payload + b"%b}\n"
        self._checkpoint = start + cursor

    def events(self, log: PartitionLog, indices: Sequence[int]) -> bytes:
        """Return the lines of the events at the indices of a log. None may be internal."""
        if not indices:
            return b""
        if self._header_names and self._headers:
            return b"".join(self._event_line(log, index) for index in indices)
        payloads = (
            log.payloads[indices.start : indices.stop]
            if isinstance(indices, range)
            else [log.payloads[index] for index in indices]
        )
        between = b"}\n" + self._event
        return self._event + between.join(payloads) + b"}\n"  # type: ignore[arg-type]

    def checkpoint(self, cursor: str) -> bytes:
        """Return the line of a checkpoint."""
        return self._checkpoint + orjson.dumps(cursor) + b"}\n"

    def _event_line(self, log: PartitionLog, index: int) -> bytes:
        headers = self._headers.get(log.seqs[index], {})
        if "_all" not in self._header_names:
            headers = {name: headers[name] for name in self._header_names if name in headers}
        payload = log.payloads[index]
        assert payload is not None
        return self._event_with_headers % (orjson.dumps(dict(headers)), payload)
