"""``spark.read.format("feedapi")``: every partition to its end."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator

import orjson
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, EqualTo, Filter, In, InputPartition

from feedapi_client.errors import CursorRejectedError
from feedapi_client.model import public_url
from feedapi_client.protocol.cursors import shown
from feedapi_client.protocol.decoder import CheckpointedEvents
from feedapi_client.spark.feed_connection import FeedConnection
from feedapi_client.spark.fetch import PartitionReader
from feedapi_client.spark.schema import RowBuilder
from feedapi_client.spark.snapshot import Chain, chains_to_read
from feedapi_client.spark.source_options import OptionError, SourceOptions
from feedapi_client.spark.target import Target


class FeedReader(DataSourceReader):
    """Reader of one batch read.

    The end of an open partition is fixed when the first action on the DataFrame starts. All scans
    of it see that end, also those of later actions, for an hour.
    """

    def __init__(self, options: SourceOptions, dataframe: str = "") -> None:
        self.options = options
        self._dataframe = dataframe or uuid.uuid4().hex
        self._wanted: frozenset[int] | None = None  # partitions, by filters of the query
        self._feeds: frozenset[str] | None = None

    def partitions(self) -> list[InputPartition]:
        """Return a task for each chain that is wanted. Raises `FeedError`, `OptionError`."""
        if self._feeds is not None and public_url(self.options.url) not in self._feeds:
            return []
        return list(chains_to_read(self.options, self._wanted, self._dataframe))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a chain. Raises `FeedError`, `OptionError`."""
        if not isinstance(partition, Chain):
            return  # a feed without partitions: Spark runs one task that has nothing to read
        connection = FeedConnection(self.options, partition.fetch, partition.info)
        for target in partition.targets:
            yield from _read(self.options, connection, target)


class FilteringFeedReader(FeedReader):
    """The same, reading only what filters of the query on partition and feed name.

    It is a class of its own because PySpark refuses a reader that takes filters, unless
    ``spark.sql.python.filterPushdown.enabled`` is set.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Take the filters on columns ``partition`` and ``feed``. Spark applies all of them too."""
        for one in filters:
            if isinstance(one, EqualTo | In) and one.attribute in (("partition",), ("feed",)):
                values = frozenset(one.value if isinstance(one, In) else [one.value])
                if one.attribute == ("partition",):
                    self._wanted = values & (values if self._wanted is None else self._wanted)
                else:
                    self._feeds = values & (values if self._feeds is None else self._feeds)
            yield one


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
            yield rows(options, connection, target, sequence, pending)
            sequence += sum(len(one.events) for one in pending)
            pending, size = [], 0
    if pending:
        yield rows(options, connection, target, sequence, pending)
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
    options: SourceOptions,
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
        connection.url if options.feed_column else None,
    )
    v1 = connection.info.dialect == "v1"
    headers = [orjson.dumps(event.headers) for event in events] if v1 else None
    return builder.build(b"\n".join([event._payload for event in events]), headers)
