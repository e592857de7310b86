"""The columns of ``format("feedapi")``, and how payloads become Arrow batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

try:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql.types import (
        IntegerType,
        LongType,
        MapType,
        StringType,
        StructField,
        StructType,
        VariantType,
        VariantVal,
    )
except ImportError as error:  # pragma: no cover - the message is the point
    raise ImportError(
        "feedapi_client.spark needs the extra 'spark': pip install 'feedapi-client[spark]'"
    ) from error

import orjson

Payload = Literal["string", "variant"]

_NEWLINE = 10
_HEADERS = pa.map_(pa.string(), pa.string())
_VARIANT = pa.struct(
    [
        pa.field("value", pa.binary(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False, metadata={"variant": "true"}),
    ]
)


def spark_schema(payload: Payload) -> StructType:
    """Return the columns, in their order.

    - ``partition``: that the event was read from.
    - ``cursor``: of the checkpoint that closes the event's batch.
    - ``sequence``: number of the event within its partition, counted from 0 over a batch read, or
      over the whole life of a streaming query.
    - ``data``: the payload as sent.
    - ``headers``: of dialect v1; null where there are none.
    - ``depth``: number of partitions that come before this one in its lineage.

    ``orderBy("depth", "sequence")`` restores the order within an entity.
    """
    return StructType(
        [
            StructField("partition", IntegerType(), False),
            StructField("cursor", StringType(), False),
            StructField("sequence", LongType(), False),
            StructField("data", VariantType() if payload == "variant" else StringType(), False),
            StructField("headers", MapType(StringType(), StringType()), True),
            StructField("depth", IntegerType(), False),
        ]
    )


def arrow_schema(payload: Payload) -> pa.Schema:
    """Return the same columns for Arrow. PySpark compares types exactly."""
    return pa.schema(
        [
            pa.field("partition", pa.int32(), nullable=False),
            pa.field("cursor", pa.string(), nullable=False),
            pa.field("sequence", pa.int64(), nullable=False),
            pa.field("data", _VARIANT if payload == "variant" else pa.string(), nullable=False),
            pa.field("headers", _HEADERS),
            pa.field("depth", pa.int32(), nullable=False),
        ]
    )


@dataclass(slots=True)
class RowBuilder:
    """Builds the Arrow batches of one partition's events, one after the other.

    Arguments:
        sequence: number of the first event.
        checkpoints: (number of events, cursor of the checkpoint that closes them), in order.
    """

    partition: int
    depth: int
    sequence: int
    payload: Payload
    checkpoints: Sequence[tuple[int, str]]
    built: int = 0
    """Events built so far."""

    def build(self, lines: bytes, headers: Sequence[bytes] | None = None) -> pa.RecordBatch:
        """Return the next batch. `lines` has a payload a line, `headers` a JSON object an event."""
        data = split_lines(lines)
        count = len(data)
        first = self.sequence + self.built
        columns = [
            constant(self.partition, count, pa.int32()),
            self._cursors(count),
            pa.array(np.arange(first, first + count, dtype=np.int64)),
            variants(data) if self.payload == "variant" else data,
            header_maps(headers) if headers else pa.nulls(count, _HEADERS),
            constant(self.depth, count, pa.int32()),
        ]
        self.built += count
        return pa.RecordBatch.from_arrays(columns, schema=arrow_schema(self.payload))

    def _cursors(self, count: int) -> pa.Array:
        ends = np.cumsum(
            np.fromiter(
                (number for number, _ in self.checkpoints),
                dtype=np.int64,
                count=len(self.checkpoints),
            )
        )
        first = int(np.searchsorted(ends, self.built, side="right"))
        last = int(np.searchsorted(ends, self.built + count - 1, side="right"))
        if first == last:
            return constant(self.checkpoints[first][1], count, pa.string())
        which = (
            np.searchsorted(ends, np.arange(self.built, self.built + count), side="right") - first
        )
        return pa.array(
            [cursor for _, cursor in self.checkpoints[first : last + 1]], pa.string()
        ).take(pa.array(which))


def constant(value: Any, count: int, type: pa.DataType) -> pa.Array:
    """Return an array that repeats one value."""
    return pa.repeat(pa.scalar(value, type), count)


def split_lines(lines: bytes) -> pa.Array:
    """Return the lines as an array of strings, without a Python object for each line.

    The last line may lack its newline.
    """
    if not lines.endswith(b"\n"):
        lines += b"\n"
    raw = np.frombuffer(lines, dtype=np.uint8)
    ends = np.flatnonzero(raw == _NEWLINE)
    offsets = np.zeros(len(ends) + 1, dtype=np.int32)
    offsets[1:] = ends - np.arange(len(ends))
    return pa.StringArray.from_buffers(
        len(ends), pa.py_buffer(offsets), pa.py_buffer(lines.replace(b"\n", b""))
    )


def variants(data: pa.Array) -> pa.Array:
    """Return the JSON texts as VARIANT values."""
    parsed = [VariantVal.parseJson(text) for text in data.to_pylist()]
    values = pa.array([one.value for one in parsed], pa.binary())
    return pa.StructArray.from_arrays(
        [values, pa.array([one.metadata for one in parsed], pa.binary())], fields=list(_VARIANT)
    )


def header_maps(headers: Iterable[bytes]) -> pa.Array:
    """Return maps of strings, null for an event without headers.

    A header value that is not a string is kept as JSON text.
    """
    decoded = (orjson.loads(line) for line in headers)
    return pa.array(
        [
            [(name, _text(value)) for name, value in found.items()] if found else None
            for found in decoded
        ],
        _HEADERS,
    )


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else orjson.dumps(value).decode()
