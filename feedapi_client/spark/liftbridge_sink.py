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
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pyarrow as pa
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
_ACK_POLICIES = {"leader": AckPolicy.LEADER, "all": AckPolicy.ALL}
_TEXT = (T.StringType, T.BinaryType)
_WHOLE_NUMBER = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)


def _positive(number: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = number(text)
        if not 0 < value < math.inf:
            raise ValueError(text)
        return value

    return parse


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError(text)
    return text


_PARSERS: dict[str, Callable[[str], Any]] = {
    "stream": str,
    "subject": str,
    "partitions": _positive(int),
    "nats": _not_empty,
    "natsenv": str,
    "ackpolicy": lambda value: _ACK_POLICIES[value.lower()],
    "acktimeout": _positive(float),
    "maxinflight": _positive(int),
    "attempts": _positive(int),
}
_OPTIONS_OF_SPARK = {"checkpointlocation", "path", "queryname"}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of ``format("liftbridge")``. Only `stream` is required.

    Attributes:
        stream: options ``stream``, ``subject`` and ``partitions``.
        nats: URLs of NATS servers, separated by commas.
        nats_env: an environment variable of the executors that holds them instead.
        ack_policy: ``leader`` or ``all``.
        ack_timeout: seconds that each message waits for its ack.
        max_in_flight: maximum number of messages of a task that wait for their ack.
        attempts: number of attempts to publish without progress after which the task fails.
    """

    stream: Stream
    nats: str = field(default=_NATS, repr=False)  # may hold a password
    nats_env: str | None = None
    ack_policy: AckPolicy = AckPolicy.ALL
    ack_timeout: float = 10.0
    max_in_flight: int = 8192
    attempts: int = 10

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
            ack_policy=options.ack_policy,
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
                        options.stream,
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
    options = {name.lower(): value for name, value in given.items()}
    unknown = sorted(options.keys() - _PARSERS.keys() - _OPTIONS_OF_SPARK)
    if unknown:
        raise OptionError(
            f"liftbridge sink: unknown option {', '.join(unknown)}; "
            f"the options are {', '.join(sorted(_PARSERS))}"
        )
    if not options.get("stream"):
        raise OptionError("liftbridge sink: option stream is required")
    try:
        values = {name: _PARSERS[name](options[name]) for name in options if name in _PARSERS}
    except (ValueError, KeyError) as error:
        raise OptionError(
            "liftbridge sink: nats is a URL, partitions, maxInFlight and attempts are whole "
            "numbers above 0, ackTimeout a number of seconds, ackPolicy leader or all"
        ) from error
    try:
        stream = Stream(
            values.pop("stream"), values.pop("subject", ""), values.pop("partitions", 1)
        )
        check_publishable(stream.subject)
    except ValueError as error:
        raise OptionError(f"liftbridge sink: {error}") from error
    names = {one.name.replace("_", ""): one.name for one in fields(SinkOptions)}
    return SinkOptions(stream, **{names[name]: value for name, value in values.items()})
