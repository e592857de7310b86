"""Columns: how payloads become rows, also those that a type can't hold."""

from __future__ import annotations

import pyarrow as pa
import pytest

from feedapi_client.spark.schema import RowBuilder


@pytest.mark.parametrize("payload", [b'{"a":"\xff\xfe"}', rb'{"a":"\ud800"}', b"1e999"])
def test_text_is_kept_byte_for_byte_whatever_it_holds(payload: bytes) -> None:
    builder = RowBuilder(0, 0, 0, [(1, "c")])
    assert builder.build(payload).column("data").cast(pa.binary()).to_pylist() == [payload]
