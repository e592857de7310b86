"""Ingests a feed into tables, exactly once.

Run it as ``feedapi ingest``, or from code::

    feedapi ingest https://service/myfeed /data/orders \\
        --schema "id STRING, amount DOUBLE" --rejected /data/orders_rejected

Each micro-batch is written as a whole, with the id of the streaming query and its number, and once:
what an earlier attempt of it wrote stays, and is not written again. A query that would write a
feed's events a second time is refused.
"""

from feedapi_client.spark.ingest.delta_table import latest
from feedapi_client.spark.ingest.job import (
    CORRUPT,
    FILE_FORMATS,
    FORMATS,
    Ingest,
    IngestError,
    MicroBatchError,
    Summary,
    Transform,
    plain_message,
    trigger_options,
)
from feedapi_client.spark.ingest.parquet_table import read_table
from feedapi_client.spark.ingest.pipeline import Run, run, start

__all__ = [
    "CORRUPT",
    "FILE_FORMATS",
    "FORMATS",
    "Ingest",
    "IngestError",
    "MicroBatchError",
    "Run",
    "Summary",
    "Transform",
    "latest",
    "plain_message",
    "read_table",
    "run",
    "start",
    "trigger_options",
]
