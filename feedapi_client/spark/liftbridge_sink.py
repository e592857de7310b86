"""A Spark sink for Liftbridge: ``df.writeStream.format("liftbridge")`` (extras ``spark`` and ``liftbridge``).

::

    from feedapi_client.spark.liftbridge_sink import LiftbridgeDataSource

    spark.dataSource.register(LiftbridgeDataSource)
    rows.selectExpr("data AS value", "data:entity::string AS key").writeStream.format("liftbridge").option("stream", "orders").start()

Columns: ``value`` (string or binary), and if wanted ``key`` (string or binary), ``headers`` (map of strings to strings or binaries), ``partition`` (the
stream's, a whole number; else the key chooses). Each row is one message, acked before its task ends: at least once. A row that is written again, after a
failed task or a crash, has the same headers ``feedapi-query``, ``feedapi-batch`` and ``feedapi-row`` (see `feedapi_client.liftbridge.row_id`), as long as
the query computes the same rows in the same order again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from feedapi_client.liftbridge import AckPolicy, LiftbridgePublisher, Stream
from feedapi_client.liftbridge.reader import BATCH, QUERY, ROW
from feedapi_client.liftbridge.retrying import publish_until_acked
from feedapi_client.spark.options import OptionError

_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"
_TASK_SHIFT = 40
_ACKED = {"leader": AckPolicy.LEADER, "all": AckPolicy.ALL}
_TEXT = (StringType, BinaryType)
_WHOLE = (ByteType, ShortType, IntegerType, LongType)


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of ``format("liftbridge")``: `stream` is required.

    `nats` are URLs with commas between them, or `nats_env` names an environment variable of the executors that holds them.
    """

    stream: Stream
    nats: str = field(default="nats://127.0.0.1:4222", repr=False)  # may hold a password
    nats_env: str | None = None
    ack_policy: AckPolicy = AckPolicy.ALL
    ack_timeout: float = 10.0
    max_in_flight: int = 8192
    attempts: int = 10

    def servers(self) -> list[str]:
        """Where NATS is."""
        given = os.environ.get(self.nats_env, "") if self.nats_env else self.nats
        if not given:
            raise OptionError(
                f"liftbridge sink: the environment variable {self.nats_env} is not set on the executors"
            )
        return [server.strip() for server in given.split(",")]


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """What one task has written."""

    rows: int


class LiftbridgeDataSource(DataSource):
    """``format("liftbridge")``. Raises `OptionError` for options and columns that are unknown, missing or wrong, before any job starts."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "liftbridge"

    def streamWriter(self, schema: StructType, overwrite: bool) -> LiftbridgeWriter:  # noqa: N802
        """The sink."""
        if overwrite:
            raise OptionError(
                "liftbridge sink: a stream only grows: use outputMode append or update"
            )
        _check_columns(schema)
        return LiftbridgeWriter(parse_options(self.options))


class LiftbridgeWriter(DataSourceStreamArrowWriter):
    """Publishes rows from executors. Picklable."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Publish the rows of one task and wait for all acks. Raises `LiftbridgeError`; Spark tries the task again."""
        return Written(asyncio.run(self._publish(iterator)))

    async def _publish(self, batches: Iterator[pa.RecordBatch]) -> int:
        task = TaskContext.get()
        assert task is not None, "the sink runs in tasks of Spark"
        shared = {
            QUERY: (task.getLocalProperty(_QUERY_ID) or "").encode(),
            BATCH: (task.getLocalProperty(_BATCH_ID) or "").encode(),
        }
        row = task.partitionId() << _TASK_SHIFT
        count, options = 0, self._options
        async with LiftbridgePublisher(
            options.servers(),
            ack_policy=options.ack_policy,
            ack_timeout=options.ack_timeout,
            max_in_flight=options.max_in_flight,
        ) as publisher:
            for batch in batches:
                for part, rows in _by_partition(batch):
                    headers = [
                        {**own, ROW: str(row + count + i).encode()}
                        for own, i in zip(_headers(rows), part.rows, strict=True)
                    ]
                    await publish_until_acked(
                        publisher,
                        options.stream,
                        _values(rows),
                        _keys(rows),
                        headers,
                        shared=shared,
                        partition=part.partition,
                        attempts=options.attempts,
                    )
                count += batch.num_rows
        return count


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a batch that go to one partition of the stream; None: where their keys say."""

    partition: int | None
    rows: Sequence[int]


def _by_partition(batch: pa.RecordBatch) -> Iterator[tuple[_Part, pa.RecordBatch]]:
    if "partition" not in batch.schema.names:
        yield _Part(None, range(batch.num_rows)), batch
        return
    places: dict[int | None, list[int]] = {}
    for i, partition in enumerate(batch.column("partition").to_pylist()):
        places.setdefault(partition, []).append(i)
    for partition, rows in places.items():
        yield _Part(partition, rows), batch.take(pa.array(rows))


def _values(batch: pa.RecordBatch) -> list[bytes]:
    values = _bytes(batch.column("value"))
    return [b"" if value is None else value for value in values]


def _keys(batch: pa.RecordBatch) -> list[bytes | None] | None:
    return _bytes(batch.column("key")) if "key" in batch.schema.names else None


def _headers(batch: pa.RecordBatch) -> list[dict[str, bytes]]:
    if "headers" not in batch.schema.names:
        return [{} for _ in range(batch.num_rows)]
    return [
        {name: _encoded(value) for name, value in pairs or ()}
        for pairs in batch.column("headers").to_pylist()
    ]


def _bytes(column: pa.Array) -> list[bytes | None]:
    return column.cast(pa.binary()).to_pylist()  # type: ignore[no-any-return]


def _encoded(value: str | bytes | None) -> bytes:
    return value.encode() if isinstance(value, str) else value or b""


def _check_columns(schema: StructType) -> None:
    allowed = {"value": _TEXT, "key": _TEXT, "partition": _WHOLE, "headers": (MapType,)}
    wrong = [
        f"{field.name} {field.dataType.simpleString()}"
        for field in schema
        if not _fits(field.dataType, allowed.get(field.name, ()))
    ]
    if wrong or "value" not in schema.names:
        raise OptionError(
            "liftbridge sink: the columns are value (string or binary), and if wanted key (string or binary), partition (whole number) and headers "
            f"(map of strings to strings or binaries): select them; these are not: {', '.join(wrong) or 'no value'}"
        )


def _fits(found: DataType, kinds: tuple[type[DataType], ...]) -> bool:
    if isinstance(found, MapType) and MapType in kinds:
        return isinstance(found.keyType, StringType) and isinstance(found.valueType, _TEXT)
    return isinstance(found, kinds)


def parse_options(given: Mapping[str, str]) -> SinkOptions:
    """The options, checked. Raises `OptionError`, which never quotes a value of `nats`."""
    known = {
        "stream",
        "subject",
        "partitions",
        "nats",
        "natsenv",
        "ackpolicy",
        "acktimeout",
        "maxinflight",
        "attempts",
    }
    options = {name.lower(): value for name, value in given.items()}
    unknown = sorted(options.keys() - known - {"checkpointlocation", "path", "queryname"})
    if unknown:
        raise OptionError(
            f"liftbridge sink: unknown option {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )
    if not options.get("stream"):
        raise OptionError("liftbridge sink: option stream is required")
    try:
        return SinkOptions(
            stream=Stream(
                options["stream"], options.get("subject", ""), int(options.get("partitions", "1"))
            ),
            nats=options.get("nats", "nats://127.0.0.1:4222"),
            nats_env=options.get("natsenv"),
            ack_policy=_ACKED[options.get("ackpolicy", "all").lower()],
            ack_timeout=float(options.get("acktimeout", "10")),
            max_in_flight=int(options.get("maxinflight", "8192")),
            attempts=int(options.get("attempts", "10")),
        )
    except (ValueError, KeyError) as error:
        raise OptionError(
            "liftbridge sink: partitions, maxInFlight and attempts are whole numbers, ackTimeout a number of seconds, ackPolicy leader or all"
        ) from error
