"""Columns: how payloads become rows, also those that a type can't hold."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import VariantVal

from feedapi_client.spark.schema import RowBuilder, arrow_schema, spark_schema


def rows(lines: list[bytes], payload: str) -> list[dict[str, object]]:
    builder = RowBuilder(0, 0, 0, payload, [(len(lines), "c")])  # type: ignore[arg-type]
    batch = builder.build(b"\n".join(lines))
    batch.validate(full=payload == "variant")
    assert batch.schema == arrow_schema(payload)  # type: ignore[arg-type]
    return list(batch.to_pylist()) if payload == "variant" else []


def value(row: dict[str, object]) -> object:
    data = row["data"]
    assert isinstance(data, dict)
    return VariantVal(data["value"], data["metadata"]).toPython()


CORRUPT = [
    (b'{"a":"\xff\xfe"}', '{"a":"\\xff\\xfe"}'),
    (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", None),
    (b'{"a":', '{"a":'),
]


@pytest.mark.parametrize(("payload", "kept"), CORRUPT, ids=["not UTF-8", "too deep", "no JSON"])
def test_payload_that_can_not_be_a_variant_is_kept_in_corrupt(
    payload: bytes, kept: str | None
) -> None:
    before, bad, after = rows([b'{"n":1}', payload, b'{"n":2}'], "variant")
    assert bad["data"] is None
    assert bad["_corrupt"] == (kept or payload.decode())
    assert [value(before), value(after)] == [{"n": 1}, {"n": 2}]
    assert before["_corrupt"] is after["_corrupt"] is None


def test_lone_surrogate_in_a_variant_is_the_replacement_character() -> None:
    (row,) = rows([rb'{"a":"x\ud800y"}'], "variant")
    assert value(row) == {"a": "x\ufffdy"}
    assert row["_corrupt"] is None


@pytest.mark.parametrize("payload", [b"1e999", b"9" * 400, b'{"a":1,"a":2}', b"NaN"])
def test_unusual_numbers_and_keys_block_no_partition(payload: bytes) -> None:
    (row,) = rows([payload], "variant")
    assert (row["data"] is None) != (row["_corrupt"] is None)


@pytest.mark.parametrize("payload", [b'{"a":"\xff\xfe"}', rb'{"a":"\ud800"}', b"1e999"])
def test_text_is_kept_byte_for_byte_whatever_it_holds(payload: bytes) -> None:
    builder = RowBuilder(0, 0, 0, "string", [(1, "c")])
    assert builder.build(payload).column("data").cast(pa.binary()).to_pylist() == [payload]


@pytest.mark.parametrize("feed_column", [False, True])
@pytest.mark.parametrize("payload", ["string", "variant"])
def test_columns_for_spark_and_for_arrow_are_the_same(payload: str, feed_column: bool) -> None:
    of_spark = spark_schema(payload, feed_column=feed_column)  # type: ignore[arg-type]
    of_arrow = arrow_schema(payload, feed_column=feed_column)  # type: ignore[arg-type]
    assert of_spark.names == of_arrow.names
    assert [f.nullable for f in of_spark] == [f.nullable for f in of_arrow]
