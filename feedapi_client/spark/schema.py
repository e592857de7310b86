"""The columns of ``format("feedapi")``, and how payloads become Arrow batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

try:
    import numpy as np
    import pyarrow as pa
    from pyspark.errors import PySparkException
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

from feedapi_client.model import without_lone_surrogates

CORRUPT = "_corrupt"
Payload = Literal["string", "variant"]

_NEWLINE = 10
_HEADERS = pa.map_(pa.string(), pa.string())
_VARIANT = pa.struct(
    [
        pa.field("value", pa.binary(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False, metadata={"variant": "true"}),
    ]
)


def spark_schema(payload: Payload, *, feed_column: bool = False) -> StructType:
    """Return the columns, in their order.

    - ``feed``: URL of the feed, without credentials and query; with `feed_column` only.
    - ``partition``: that the event was read from.
    - ``cursor``: of the checkpoint that closes the event's batch.
    - ``sequence``: number of the event within its partition, counted from 0 over a batch read, or
      over the whole life of a streaming query.
    - ``data``: the payload as sent.
    - ``headers``: of dialect v1; null where there are none.
    - ``depth``: number of partitions that come before this one in its lineage.

    With payload ``variant`` there is one more: ``_corrupt``, the payload as sent where it can't be
    a VARIANT (``data`` is null then): it is not UTF-8, or is nested too deeply. Bytes that are not
    UTF-8 are written as ``\\xNN``. An escape of half a surrogate pair becomes U+FFFD, as in
    `Event.json`.

    ``orderBy("depth", "sequence")`` restores the order within an entity of one feed.
    """
    variant = payload == "variant"
    fields = [
        *([StructField("feed", StringType(), False)] if feed_column else []),
        StructField("partition", IntegerType(), False),
        StructField("cursor", StringType(), False),
        StructField("sequence", LongType(), False),
        StructField("data", VariantType() if variant else StringType(), variant),
        StructField("headers", MapType(StringType(), StringType()), True),
        StructField("depth", IntegerType(), False),
    ]
    return StructType([*fields, StructField(CORRUPT, StringType(), True)] if variant else fields)


def arrow_schema(payload: Payload, *, feed_column: bool = False) -> pa.Schema:
    """Return the same columns for Arrow. PySpark compares types exactly."""
    variant = payload == "variant"
    fields = [
        *([pa.field("feed", pa.string(), nullable=False)] if feed_column else []),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("cursor", pa.string(), nullable=False),
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("data", _VARIANT if variant else pa.string(), nullable=variant),
        pa.field("headers", _HEADERS),
        pa.field("depth", pa.int32(), nullable=False),
    ]
    return pa.schema([*fields, pa.field(CORRUPT, pa.string())] if variant else fields)


@dataclass(slots=True)
class RowBuilder:
    """Builds the Arrow batches of one partition's events, one after the other.

    Arguments:
        sequence: number of the first event.
        checkpoints: (number of events, cursor of the checkpoint that closes them), in order.
        feed: what column ``feed`` says; None for rows without that column.
    """

    partition: int
    depth: int
    sequence: int
    payload: Payload
    checkpoints: Sequence[tuple[int, str]]
    feed: str | None = None
    built: int = 0
    """Events built so far."""

    def build(self, lines: bytes, headers: Sequence[bytes] | None = None) -> pa.RecordBatch:
        """Return the next batch. `lines` has a payload a line, `headers` a JSON object an event."""
        data = split_lines(lines)
        count = len(data)
        first = self.sequence + self.built
        variant = self.payload == "variant"
        payloads, *corrupt = variants(data) if variant else (data,)
        columns = [
            *([] if self.feed is None else [constant(self.feed, count, pa.string())]),
            constant(self.partition, count, pa.int32()),
            self._cursors(count),
            pa.array(np.arange(first, first + count, dtype=np.int64)),
            payloads,
            header_maps(headers) if headers else pa.nulls(count, _HEADERS),
            constant(self.depth, count, pa.int32()),
            *corrupt,
        ]
        self.built += count
        schema = arrow_schema(self.payload, feed_column=self.feed is not None)
        return pa.RecordBatch.from_arrays(columns, schema=schema)

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


def variants(data: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the JSON texts as VARIANT values, and as text those that can't be one.

    Each array is null where the other one is not.
    """
    raw = data.cast(pa.binary()).to_pylist()
    parsed = [_variant(text) for text in raw]
    corrupt = [
        text.decode(errors="backslashreplace") if one is None else None
        for text, one in zip(raw, parsed, strict=True)
    ]
    values = pa.array([b"" if one is None else one.value for one in parsed], pa.binary())
    metadata = pa.array([b"" if one is None else one.metadata for one in parsed], pa.binary())
    is_null = pa.array([one is None for one in parsed])
    structs = pa.StructArray.from_arrays([values, metadata], fields=list(_VARIANT), mask=is_null)
    return structs, pa.array(corrupt, pa.string())


def _variant(text: bytes) -> VariantVal | None:
    """Return the VARIANT of a JSON text; None where it can't be one."""
    try:
        return _parsed(text)
    except (ValueError, ArithmeticError, RecursionError, PySparkException):
        pass
    try:
        return _parsed(without_lone_surrogates(text))
    except (ValueError, ArithmeticError, RecursionError, PySparkException):
        return None


def _parsed(text: bytes) -> VariantVal:
    return VariantVal.parseJson(text.decode())


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
