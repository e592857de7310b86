"""The columns of ``format("feedapi")``, and how payloads become Arrow batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from pyspark.sql import types as T  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import to_arrow_schema

_NEWLINE = 10
_HEADERS = pa.map_(pa.string(), pa.string())


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
            data,
            header_maps(headers) if headers else pa.nulls(count, _HEADERS),
            constant(self.depth, count, pa.int32()),
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
