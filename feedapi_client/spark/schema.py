"""The columns of ``format("feedapi")``, and how events are staged and become rows of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import orjson
import pyarrow as pa
from pyspark.sql import types as T  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import to_arrow_schema

from feedapi_client.model import Event
from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.spark.staging import MOST_INFLATED, torn, unpack, whole

_HEADERS = pa.map_(pa.string(), pa.string())
EVENTS = pa.schema([("data", pa.binary()), ("headers", _HEADERS)])
"""What is staged of events. `data` is binary: a payload is kept as sent, also invalid UTF-8."""


def spark_schema() -> T.StructType:
    """Return the columns, in their order.

    - ``partition``: that the event was read from.
    - ``cursor``: of the checkpoint that closes the event's batch.
    - ``sequence``: number of the event within its partition, counted from 0 over a batch read, or
      over the whole life of a streaming query.
    - ``data``: the payload as sent.
    - ``headers``: of dialect v1; null where there are none.
    - ``depth``: number of partitions that come before this one in its lineage.

    ``orderBy("depth", "sequence")`` restores the order within an entity of one feed.
    """
    fields = [
        T.StructField("partition", T.IntegerType(), False),
        T.StructField("cursor", T.StringType(), False),
        T.StructField("sequence", T.LongType(), False),
        T.StructField("data", T.StringType(), False),
        T.StructField("headers", T.MapType(T.StringType(), T.StringType()), True),
        T.StructField("depth", T.IntegerType(), False),
    ]
    return T.StructType(fields)


def event_columns(events: Sequence[Event], *, headers: bool) -> pa.RecordBatch:
    payloads, count = [event._payload for event in events], len(events)
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.fromiter(map(len, payloads), np.int32, count), out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(payloads))]
    data = pa.Array.from_buffers(pa.binary(), count, buffers)
    maps = _header_maps(events) if headers else pa.nulls(count, _HEADERS)
    return pa.RecordBatch.from_arrays([data, maps], schema=EVENTS)


def _header_maps(events: Sequence[Event]) -> pa.Array:
    """Return null for an event without headers. A value that is no string is kept as JSON text."""
    headers = (event.headers for event in events)
    return pa.array(
        [[(name, _text(value)) for name, value in one.items()] if one else None for one in headers],
        _HEADERS,
    )


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else orjson.dumps(value).decode()


@dataclass(slots=True)
class RowBuilder:
    """Rows of a partition's events. `checkpoints`: (events, cursor that closes them), in order."""

    partition: int
    depth: int
    sequence: int
    checkpoints: Sequence[tuple[int, str]]
    built: int = 0

    def build(self, events: pa.RecordBatch) -> pa.RecordBatch:
        data, headers = events.columns
        count, first = len(events), self.sequence + self.built
        columns = [
            pa.repeat(pa.scalar(self.partition, pa.int32()), count),
            self._cursors(count),
            pa.array(np.arange(first, first + count, dtype=np.int64)),
            data.view(pa.string()),
            headers,
            pa.repeat(pa.scalar(self.depth, pa.int32()), count),
        ]
        self.built += count
        schema = to_arrow_schema(spark_schema())
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _cursors(self, count: int) -> pa.Array:
        ends = np.cumsum([number for number, _ in self.checkpoints])
        numbers = np.arange(self.built, self.built + count)
        which = np.searchsorted(ends, numbers, side="right")
        first, last = int(which[0]), int(which[-1])
        cursors = [cursor for _, cursor in self.checkpoints[first : last + 1]]
        return pa.array(cursors, pa.string()).take(pa.array(which - first))


# ---------------------------------------------------------------------- staged events


class StagedEvents:
    """One partition as an Arrow IPC stream in batches, compressed as it is fetched."""

    def __init__(self, *, headers: bool, batch_bytes: int) -> None:
        self.bytes = 0
        """Bytes that the events took in the responses."""
        self.checkpoints: list[tuple[int, str]] = []
        self._headers = headers
        self._batch_bytes = batch_bytes
        self._waiting: list[Event] = []
        self._written = 0
        self._sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
        self._writer = pa.ipc.new_stream(self._sink, EVENTS, options=options)

    @property
    def size(self) -> int:
        return int(self._sink.tell())

    def add(self, batch: CheckpointedEvents) -> None:
        if not batch.events:
            return
        self.bytes += batch.size
        self.checkpoints.append((len(batch.events), batch.cursor))
        self._waiting += batch.events
        if self.bytes - self._written >= self._batch_bytes:
            self._write()

    def finish(self) -> bytes:
        self._write()
        self._writer.close()
        return self._sink.getvalue().to_pybytes() if self.checkpoints else b""

    def _write(self) -> None:
        count, batches = len(self._waiting), round((self.bytes - self._written) / self._batch_bytes)
        step = -(-count // max(batches, 1)) or 1  # a checkpoint may close many events
        for at in range(0, count, step):
            events = self._waiting[at : at + step]
            self._writer.write_batch(event_columns(events, headers=self._headers))
        self._waiting, self._written = [], self.bytes


class _Staged(msgspec.Struct):
    """What the head of an object says of the rows of a partition."""

    partition: int
    events: int
    depth: int
    sequence: int
    checkpoints: list[tuple[Annotated[int, msgspec.Meta(gt=0)], str]]


def staged_rows(staged: bytes, key: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a staged object, a batch at a time.

    Raises `StagingError` for a torn object, and one that holds other rows than its head says.
    """
    results, body = unpack(staged, key)
    with whole(key):
        partitions = msgspec.convert(results, list[_Staged])
    stream = pa.BufferReader(pa.py_buffer(body))
    for one in partitions:
        if sum(number for number, _ in one.checkpoints) != one.events:
            raise torn(key)
        if not one.events:
            continue
        builder = RowBuilder(one.partition, one.depth, one.sequence, one.checkpoints)
        for events in _batches(stream, key):
            if builder.built + len(events) > one.events:
                raise torn(key)
            with whole(key, pa.ArrowException):
                rows = builder.build(events)
            yield rows
        if builder.built != one.events:
            raise torn(key)
    if stream.tell() != len(body):
        raise torn(key)


def _batches(stream: pa.BufferReader, key: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of one IPC stream, none of which takes more than `MOST_INFLATED`."""
    messages = pa.ipc.MessageReader.open_stream(stream)
    with whole(key, pa.ArrowException, OSError, StopIteration):
        if pa.ipc.read_schema(messages.read_next_message()) != EVENTS:
            raise torn(key)
    while True:
        with whole(key, pa.ArrowException, OSError):
            try:
                message = messages.read_next_message()
            except StopIteration:
                return
            if message.type != "record batch" or inflated_bytes(message) > MOST_INFLATED:
                raise torn(key)
            events = pa.ipc.read_record_batch(message, EVENTS)
            events.validate(full=True)  # Arrow takes the offsets of strings as they come
        if events.column(0).null_count:
            raise torn(key)
        yield events


def inflated_bytes(message: pa.ipc.Message) -> int:
    """Return the bytes that a record batch takes in memory. Nothing is decompressed.

    Arrow allocates what a compressed buffer says of itself in its first 8 bytes, and fails if it
    inflates to something else. Where the buffers are is in the message's metadata: a Flatbuffers
    table, by Message.fbs of Arrow's format, that Arrow has verified as it read the message.
    """
    metadata, body = memoryview(message.metadata), memoryview(message.body)

    def number(position: int, form: str = "<I") -> int:
        return int(struct.unpack_from(form, metadata, position)[0])

    def field(table: int, index: int) -> int:
        """Return where a field is, which the table need not have: then `table` itself."""
        fields = table - number(table, "<i")
        entry = 4 + 2 * index
        return table + (number(fields + entry, "<H") if entry < number(fields, "<H") else 0)

    header = field(number(0), 2)
    batch = header + number(header)
    if field(batch, 3) == batch:  # no `compression`
        return len(body)
    vector = field(batch, 2)
    buffers, total = vector + number(vector), 0
    for at in range(buffers + 4, buffers + 4 + 16 * number(buffers), 16):
        offset, length = struct.unpack_from("<qq", metadata, at)
        inflated = struct.unpack_from("<q", body, offset)[0] if length else 0
        total += max(length, inflated)  # -1: it is not compressed
    return total
