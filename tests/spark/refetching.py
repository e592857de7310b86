"""A simple stream of a feed, as a control: offsets are cursors, and a replay fetches again.

The checks of the tests must find that it loses or doubles events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from feedapi_client.model import FIRST
from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.spark.batch import rows
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.fetch import Target, fetch
from feedapi_client.spark.schema import spark_schema
from feedapi_client.spark.source_options import SourceOptions, parse_options


@dataclass
class Part(InputPartition):
    """A cursor, and the number of events that the driver saw behind it when it planned."""

    partition: int
    cursor: str
    sequence: int
    events: int


class RefetchingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Fetches to plan, and fetches again to read."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    def initialOffset(self) -> dict[str, Any]:
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        pass

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        end = {}
        limit = self.options.max_events_per_partition
        connection = FeedConnection(self.options)
        for partition in connection.info.partitions:
            cursor, sequence = start.get(str(partition), [FIRST, 0])
            target = Target(partition, cursor)
            result = fetch(connection, target, limit=limit)
            end[str(partition)] = [result.cursor, sequence + result.events]
        return end if any(end[p][1] != start.get(p, [FIRST, 0])[1] for p in end) else start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        parts: list[InputPartition] = []
        for partition, (_, sequence) in end.items():
            cursor, before = start.get(partition, [FIRST, 0])
            parts.append(Part(int(partition), cursor, before, sequence - before))
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Part)
        if not partition.events:
            return
        target = Target(partition.partition, partition.cursor, sequence=partition.sequence)
        batches: list[CheckpointedEvents] = []
        connection = FeedConnection(self.options)
        fetch(connection, target, limit=partition.events, receive=batches.append)
        if batches:
            yield rows(connection, target, partition.sequence, batches)


class RefetchingSource(DataSource):
    """``format("refetching")``."""

    @classmethod
    def name(cls) -> str:
        return "refetching"

    def schema(self) -> StructType:
        return spark_schema()

    def streamReader(self, schema: StructType) -> RefetchingReader:
        return RefetchingReader(
            parse_options(
                {name: value for name, value in self.options.items() if name != "staginglocation"}
            )
        )
