"""``spark.read.format("feedapi")``: every partition to its end."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import orjson
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from feedapi_client.errors import CursorRejectedError
from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.protocol.text import shown
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.fetch import PartitionReader, Target
from feedapi_client.spark.schema import RowBuilder
from feedapi_client.spark.snapshot import Chain, chains_to_read
from feedapi_client.spark.source_options import OptionError, SourceOptions


class FeedReader(DataSourceReader):
    """Reader of one batch read.

    The end of an open partition is fixed when the first action on the DataFrame starts. All scans
    of it see that end, also those of later actions, for an hour.
    """

    def __init__(self, options: SourceOptions, dataframe: str = "") -> None:
        self.options = options
        self._dataframe = dataframe or uuid.uuid4().hex

    def partitions(self) -> list[InputPartition]:
        """Return a task for each chain. Raises `FeedError`, `OptionError`."""
        return list(chains_to_read(self.options, self._dataframe))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a chain. Raises `FeedError`, `OptionError`."""
        if not isinstance(partition, Chain):
            return  # a feed without partitions: Spark runs one task that has nothing to read
        connection = FeedConnection(self.options, partition.fetch, partition.info)
        for target in partition.targets:
            yield from _read(self.options, connection, target)


def _read(
    options: SourceOptions, connection: FeedConnection, target: Target
) -> Iterator[pa.RecordBatch]:
    """Yield the partition to its end, in Arrow batches of about `Limits.max_batch_bytes`."""
    reader = PartitionReader(connection, target)
    sequence = size = 0
    pending: list[CheckpointedEvents] = []
    for batch in reader.batches():
        if batch.events:
            pending.append(batch)
            size += batch.size
        if size >= options.limits.max_batch_bytes:
            yield rows(connection, target, sequence, pending)
            sequence += sum(len(one.events) for one in pending)
            pending, size = [], 0
    if pending:
        yield rows(connection, target, sequence, pending)
    result = reader.result
    if result.refused is not None:
        raise CursorRejectedError(
            f"the publisher refused a fetch from {result.cursor!r} (status "
            f"{result.refused or 'not listed any more'}): the partitions changed while they were "
            "read. Read again",
            feed=connection.url,
            partition=target.partition,
        )
    if target.required and not result.reached:
        raise OptionError(
            f"feedapi source: option endingCursors: no checkpoint of partition {target.partition} "
            f"has the cursor {shown(target.end or '')}, also behind its start: it was read to its "
            "end"
        )


def rows(
    connection: FeedConnection,
    target: Target,
    sequence: int,
    batches: list[CheckpointedEvents],
) -> pa.RecordBatch:
    """Return the events of the batches as rows. `sequence` is the number of the first event."""
    events = [event for batch in batches for event in batch.events]
    builder = RowBuilder(
        target.partition,
        target.depth,
        sequence,
        [(len(batch.events), batch.cursor) for batch in batches],
    )
    v1 = connection.info.dialect == "v1"
    headers = [orjson.dumps(event.headers) for event in events] if v1 else None
    return builder.build(b"\n".join([event._payload for event in events]), headers)
