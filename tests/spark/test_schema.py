"""Columns: how payloads become rows, also those that a type can't hold."""

from __future__ import annotations

import pyarrow as pa
import pytest

from feedapi_client.spark.schema import RowBuilder, arrow_schema, spark_schema


@pytest.mark.parametrize("payload", [b'{"a":"\xff\xfe"}', rb'{"a":"\ud800"}', b"1e999"])
def test_text_is_kept_byte_for_byte_whatever_it_holds(payload: bytes) -> None:
    builder = RowBuilder(0, 0, 0, [(1, "c")])
    assert builder.build(payload).column("data").cast(pa.binary()).to_pylist() == [payload]


@pytest.mark.parametrize("feed_column", [False, True])
def test_columns_for_spark_and_for_arrow_are_the_same(feed_column: bool) -> None:
    of_spark = spark_schema(feed_column=feed_column)
    of_arrow = arrow_schema(feed_column=feed_column)
    assert of_spark.names == of_arrow.names
    assert [f.nullable for f in of_spark] == [f.nullable for f in of_arrow]
