"""``spark.read.format("feedapi")``: every partition to its end.

Spark plans each scan of an action by a call into a Python process that knows nothing of the others,
and with adaptive execution it may plan one again while others have run. A feed that grows meanwhile
would give a self-join two ends. So the first scan notes the ends that it found, in a file of the
driver's machine, under the id of the DataFrame. When an action ends is nothing that such a process
can know: the note is valid for an hour.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from feedapi_client.lineage.planner import Planner
from feedapi_client.lineage.states import Fail
from feedapi_client.model import FeedInfo
from feedapi_client.options import FetchOptions
from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.protocol.text import shown
from feedapi_client.spark.epoch import check_partitions, count_before, only
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.fetch import PatientFetch, Target, fix_ends, fixed_end, read_end
from feedapi_client.spark.schema import RowBuilder, event_columns
from feedapi_client.spark.source_options import OptionError, SourceOptions
from feedapi_client.spark.staging import MissingObjectError, Objects, StagingError, private_folder

_log = logging.getLogger(__name__)

SHARED_SECONDS = 3600.0
"""Seconds for which the scans of a DataFrame see the same ends."""


@dataclass(frozen=True)
class Chain(InputPartition):
    targets: list[Target]
    info: FeedInfo
    fetch: FetchOptions

    def __repr__(self) -> str:
        return f"Chain({[target.partition for target in self.targets]})"


class FeedReader(DataSourceReader):
    def __init__(self, options: SourceOptions, dataframe: str = "") -> None:
        self.options = options
        self._dataframe = dataframe or uuid.uuid4().hex

    def partitions(self) -> list[InputPartition]:
        """Return a task for each chain. Raises `FeedError`, `OptionError`."""
        connection = FeedConnection(self.options)
        seen = _noted(self.options, connection, self._dataframe)
        fetch, asked = connection.fetch_options, self.options.ending_cursors
        found: list[InputPartition] = []
        for chain in chains(self.options, connection, seen.info, seen.starts):
            targets = [
                replace(
                    target,
                    end=asked.get(target.partition, seen.ends.get(target.partition)),
                    required=target.partition in asked,
                )
                for target in chain
            ]
            info = only(seen.info, [target.partition for target in targets])
            found.append(Chain(targets, info, fetch))
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Chain):
            return  # a feed without partitions: Spark runs one task that has nothing to read
        connection = FeedConnection(self.options, partition.fetch, partition.info)
        for target in partition.targets:
            yield from _read(self.options, connection, target)


# ---------------------------------------------------------------------- the ends of one DataFrame


class _Seen(msgspec.Struct):
    """A feed when an action started. `starts`: of partitions that are read from their end on."""

    info: FeedInfo
    starts: dict[int, str]
    ends: dict[int, str | None]


def _noted(options: SourceOptions, connection: FeedConnection, dataframe: str) -> _Seen:
    """Return what the first scan of the DataFrame found, which may be this one."""
    folder = private_folder("feedapi-reads")  # Spark plans all scans on the driver's machine
    old = time.time() - SHARED_SECONDS
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            if file.stat().st_mtime <= old:
                file.unlink()
    note = Objects(folder.as_uri(), "")
    with suppress(MissingObjectError):
        return _read_note(connection, note.get(dataframe))
    seen = _look(options, connection)
    try:
        if not note.create(dataframe, msgspec.json.encode(seen)):
            return _read_note(connection, note.get(dataframe))
    except StagingError as error:
        _log.warning("another scan of this action may see another end of the feed: %s", error)
    return seen


def _read_note(connection: FeedConnection, note: bytes) -> _Seen:
    seen = msgspec.json.decode(note, type=_Seen)
    connection.restore(seen.info)
    return seen


def _look(options: SourceOptions, connection: FeedConnection) -> _Seen:
    info = connection.info
    if options.partitions is not None:
        check_partitions(options, info)
    if options.ending_cursors:
        check_partitions(options, info, options.ending_cursors.keys(), "endingCursors")
    planner = _planner(options, connection)
    starts = {partition: read_end(connection, partition) for partition in planner.unresolved(info)}
    read = [t.partition for chain in chains(options, connection, info, starts) for t in chain]
    asked = [p for p in read if p not in options.ending_cursors]
    ends = fix_ends(connection, asked)
    return _Seen(info, starts, ends)


# ---------------------------------------------------------------------- lineage chains


def chains(
    options: SourceOptions, connection: FeedConnection, info: FeedInfo, starts: Mapping[int, str]
) -> list[list[Target]]:
    """A partition is in the chain of its parent if that has no other child."""
    planner = _planner(options, connection)
    for action in planner.discover(info, ends=starts):
        if isinstance(action, Fail):
            raise action.error
    found: list[list[Target]] = []
    chain_of: dict[int, list[Target]] = {}
    cursors = {e.id: e.cursor for e in planner.entries.values() if e.running}
    depths: dict[int, int] = {}
    before = {id: [p for p in planner.preceding(id) if p in planner.graph] for id in cursors}
    count_before({id: dict.fromkeys(others, 1) for id, others in before.items()}, depths)
    for partition in sorted(cursors, key=lambda p: (depths[p], p)):
        target = Target(partition, cursors[partition], depth=depths[partition])
        parent = planner.graph.partitions[partition].starts_after
        only_child = parent is not None and len(planner.graph.children[parent]) == 1
        chain = chain_of.get(parent) if only_child and parent is not None else None
        if chain is None:
            chain = []
            found.append(chain)
        chain.append(target)
        chain_of[partition] = chain
    return found


def _planner(options: SourceOptions, connection: FeedConnection) -> Planner:
    """Return a planner that has read nothing. Children needn't wait: a batch reads them as well."""
    planner = Planner(
        feed=connection.url,
        start=options.starting_cursors,
        ordered=False,
        partitions=options.partitions,
        lineage=options.lineage,
        selects_events=bool(connection.fetch_options.selection()),
    )
    planner.load({})
    return planner


# ---------------------------------------------------------------------- rows


def _read(
    options: SourceOptions, connection: FeedConnection, target: Target
) -> Iterator[pa.RecordBatch]:
    """Yield the partition to its end, in Arrow batches of about `Limits.max_batch_bytes`."""
    end = fixed_end(connection, target, cut=True)
    reading = PatientFetch(connection, target, end=end)
    sequence = size = 0
    pending: list[CheckpointedEvents] = []
    for batch in reading.batches():
        if batch.events:
            pending.append(batch)
            size += batch.size
        if size >= options.limits.max_batch_bytes:
            yield rows(connection, target, sequence, pending)
            sequence += sum(len(one.events) for one in pending)
            pending, size = [], 0
    if pending:
        yield rows(connection, target, sequence, pending)
    if target.required and end is not None and (end.passed or not end.reached):
        raise OptionError(
            f"feedapi source: option endingCursors: partition {target.partition} of feed "
            f"{connection.url} has no checkpoint {shown(end.cursor)} on the way of this read: name "
            "a cursor of a checkpoint behind its start, as column cursor has"
        )


def rows(
    connection: FeedConnection,
    target: Target,
    sequence: int,
    batches: list[CheckpointedEvents],
) -> pa.RecordBatch:
    events = [event for batch in batches for event in batch.events]
    builder = RowBuilder(
        target.partition,
        target.depth,
        sequence,
        [(len(batch.events), batch.cursor) for batch in batches],
    )
    return builder.build(event_columns(events, headers=connection.info.dialect == "v1"))
