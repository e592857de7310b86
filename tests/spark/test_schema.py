"""Columns: how payloads become rows, also those that a type can't hold."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest

from feedapi_client.spark.schema import RowBuilder


@pytest.mark.parametrize("payload", [b'{"a":"\xff\xfe"}', rb'{"a":"\ud800"}', b"1e999"])
def test_text_is_kept_byte_for_byte_whatever_it_holds(payload: bytes) -> None:
    builder = RowBuilder(0, 0, 0, [(1, "c")])
    assert builder.build(payload).column("data").cast(pa.binary()).to_pylist() == [payload]


def test_no_process_of_the_source_loads_the_functions_of_arrow() -> None:
    """It would take each of them a tenth of a second."""
    program = (
        "import sys, pyspark.worker, feedapi_client.spark.batch, feedapi_client.spark.stream\n"
        "print('pyarrow.compute' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert found.stdout.split()[-1] == b"False"
