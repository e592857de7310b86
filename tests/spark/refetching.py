"""The plain way to make a stream of a feed, which the tests must be able to tell from ours: offsets are cursors, and a replay fetches again."""

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
from feedapi_client.protocol.decoder import Run
from feedapi_client.spark.batch import _rows
from feedapi_client.spark.fetch import Feed, PartitionReader, Target
from feedapi_client.spark.options import SourceOptions, parse_options
from feedapi_client.spark.schema import spark_schema


@dataclass
class Part(InputPartition):
    """From a cursor, as many events as the driver saw when it planned."""

    partition: int
    cursor: str
    sequence: int
    events: int


class RefetchingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans by fetching, and fetches once more to read."""

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
        feed = Feed(self.options)
        for partition in feed.info.partitions:
            cursor, sequence = start.get(str(partition), [FIRST, 0])
            outcome = PartitionReader(
                feed, Target(partition, cursor), limit=self.options.max_events_per_partition
            ).read()
            end[str(partition)] = [outcome.cursor, sequence + outcome.events]
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
        runs: list[Run] = []
        feed = Feed(self.options)
        PartitionReader(feed, target, limit=partition.events).read(runs.append)
        if runs:
            yield _rows(self.options, feed, target, partition.sequence, runs)


class RefetchingSource(DataSource):
    """``format("refetching")``."""

    @classmethod
    def name(cls) -> str:
        return "refetching"

    def schema(self) -> StructType:
        return spark_schema("string")

    def streamReader(self, schema: StructType) -> RefetchingReader:
        return RefetchingReader(
            parse_options(
                {name: value for name, value in self.options.items() if name != "staginglocation"}
            )
        )
