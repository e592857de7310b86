"""A Spark sink for Liftbridge: ``df.writeStream.format("liftbridge")``.

Needs the extras ``spark`` and ``liftbridge``. ::

    from feedapi_client.spark.liftbridge_sink import LiftbridgeDataSource

    spark.dataSource.register(LiftbridgeDataSource)
    messages = rows.selectExpr("data AS value", "data:entity::string AS key")
    messages.writeStream.format("liftbridge").option("stream", "orders").start()

Columns: ``value`` (string or binary) is required. Optional are ``key`` (string or binary),
``headers`` (map of strings to strings or binaries) and ``partition`` (a whole number: the partition
of the stream; by default the key chooses it). Liftbridge has no NULL: it becomes an empty value.

Each row is one message, acked before its task ends: at least once. A row that is written again,
after a failed task or a crash, has the same headers ``feedapi-query``, ``feedapi-batch`` and
``feedapi-row`` (see `feedapi_client.liftbridge.row_id`). That holds as long as the query computes
the same rows in the same order again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
import pyarrow as pa
from msgspec import Meta
from pyspark import TaskContext
from pyspark.sql import types as T  # noqa: N812 - its usual name
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from feedapi_client.liftbridge import AckPolicy, LiftbridgePublisher, Stream
from feedapi_client.liftbridge.message_publisher import publish_until_acked
from feedapi_client.liftbridge.stream_format import BATCH, QUERY, ROW
from feedapi_client.liftbridge.stream_model import check_publishable
from feedapi_client.spark.source_options import OptionError

_NATS = "nats://127.0.0.1:4222"
_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"
_TASK_SHIFT = 40
_TEXT = (T.StringType, T.BinaryType)
_WHOLE_NUMBER = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_OPTIONS_OF_SPARK = {"checkpointlocation", "path", "queryname"}
Positive = Annotated[int, Meta(gt=0)]
Text = Annotated[str, Meta(min_length=1)]


class SinkOptions(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename=lambda name: name.replace("_", ""),
):
    """The options of ``format("liftbridge")``. Only `stream` is required.

    Attributes:
        stream, subject, partitions: of the `Stream`.
        nats: URLs of NATS servers, separated by commas.
        nats_env: an environment variable of the executors that holds them instead.
        ack_timeout: seconds that each message waits for its ack.
        max_in_flight: maximum number of messages of a task that wait for their ack.
        attempts: number of attempts to publish without progress after which the task fails.
    """

    stream: Text
    subject: str = ""
    partitions: Positive = 1
    nats: Text = _NATS
    nats_env: str | None = None
    ack_policy: Literal["leader", "all"] = "all"
    ack_timeout: Annotated[float, Meta(gt=0, le=1e9)] = 10.0
    max_in_flight: Positive = 8192
    attempts: Positive = 10

    def __repr__(self) -> str:
        return f"<SinkOptions of {self.stream}>"  # `nats` may hold a password

    @property
    def target(self) -> Stream:
        return Stream(self.stream, self.subject, self.partitions)

    def servers(self) -> list[str]:
        urls = os.environ.get(self.nats_env, "") if self.nats_env else self.nats
        if not urls:
            raise OptionError(
                f"liftbridge sink: the environment variable {self.nats_env} "
                "is not set on the executors"
            )
        return [url.strip() for url in urls.split(",")]


class LiftbridgeDataSource(DataSource):
    """``format("liftbridge")``.

    Raises:
        OptionError: an option or a column is unknown, missing or wrong. Raised before a job starts.
    """

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "liftbridge"

    def streamWriter(self, schema: T.StructType, overwrite: bool) -> LiftbridgeWriter:  # noqa: N802
        """Return the writer of a streaming query."""
        if overwrite:
            raise OptionError(
                "liftbridge sink: messages can't be replaced: use outputMode append or update"
            )
        _check_columns(schema)
        return LiftbridgeWriter(parse_options(self.options))


class LiftbridgeWriter(DataSourceStreamArrowWriter):
    """Publishes rows on executors. Picklable."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        asyncio.run(self._publish(iterator))
        return WriterCommitMessage()

    async def _publish(self, batches: Iterator[pa.RecordBatch]) -> None:
        task = TaskContext.get()
        assert task is not None, "the sink runs in tasks of Spark"
        shared = {
            QUERY: (task.getLocalProperty(_QUERY_ID) or "").encode(),
            BATCH: (task.getLocalProperty(_BATCH_ID) or "").encode(),
        }
        first_row = task.partitionId() << _TASK_SHIFT
        count, options = 0, self._options
        async with LiftbridgePublisher(
            options.servers(),
            ack_policy=AckPolicy[options.ack_policy.upper()],
            ack_timeout=options.ack_timeout,
            max_in_flight=options.max_in_flight,
        ) as publisher:
            for batch in batches:
                for partition, positions, rows in _by_partition(batch):
                    headers = [
                        {**own, ROW: str(first_row + count + position).encode()}
                        for own, position in zip(_headers(rows), positions, strict=True)
                    ]
                    await publish_until_acked(
                        publisher,
                        options.target,
                        [value or b"" for value in _bytes(rows.column("value"))],
                        _bytes(rows.column("key")) if "key" in rows.schema.names else None,
                        headers,
                        headers=shared,
                        partition=partition,
                        attempts=options.attempts,
                    )
                count += batch.num_rows


def _by_partition(
    batch: pa.RecordBatch,
) -> Iterator[tuple[int | None, Sequence[int], pa.RecordBatch]]:
    """Yield rows and their positions by partition; None where the keys choose it."""
    if "partition" not in batch.schema.names:
        yield None, range(batch.num_rows), batch
        return
    positions: dict[int | None, list[int]] = {}
    for i, partition in enumerate(batch.column("partition").to_pylist()):
        positions.setdefault(partition, []).append(i)
    for partition, found in positions.items():
        yield partition, found, batch.take(pa.array(found))


def _headers(batch: pa.RecordBatch) -> list[dict[str, bytes]]:
    if "headers" not in batch.schema.names:
        return [{} for _ in range(batch.num_rows)]
    maps = batch.column("headers").cast(pa.map_(pa.string(), pa.binary())).to_pylist()
    return [{name: value or b"" for name, value in pairs or ()} for pairs in maps]


def _bytes(column: pa.Array) -> list[bytes | None]:
    return column.cast(pa.binary()).to_pylist()  # type: ignore[no-any-return]


def _check_columns(schema: T.StructType) -> None:
    allowed = {"value": _TEXT, "key": _TEXT, "partition": _WHOLE_NUMBER, "headers": (T.MapType,)}
    wrong = [
        f"{field.name} {field.dataType.simpleString()}"
        for field in schema
        if not _fits(field.dataType, allowed.get(field.name, ()))
    ]
    if wrong or "value" not in schema.names:
        raise OptionError(
            "liftbridge sink: the columns are value (string or binary), and optionally key "
            "(string or binary), partition (whole number) and headers (map of strings to strings "
            f"or binaries). Select them. Wrong or missing: {', '.join(wrong) or 'value'}"
        )


def _fits(found: T.DataType, kinds: tuple[type[T.DataType], ...]) -> bool:
    if isinstance(found, T.MapType) and T.MapType in kinds:
        return isinstance(found.keyType, T.StringType) and isinstance(found.valueType, _TEXT)
    return isinstance(found, kinds)


def parse_options(given: Mapping[str, str]) -> SinkOptions:
    """Raises `OptionError`, which never quotes a value of ``nats``."""
    options = {name.lower(): value.strip() for name, value in given.items()}
    own = {name: options[name] for name in options if name not in _OPTIONS_OF_SPARK}
    try:
        found = msgspec.convert(own, SinkOptions, strict=False)
        check_publishable(found.target.subject)
    except ValueError as error:
        raise OptionError(f"liftbridge sink: {error}") from error
    return found
