"""``feedapi ingest``. The module `feedapi_client.spark.ingest` parses its arguments and runs it."""

from __future__ import annotations

import typer

from feedapi_client.cli.common.extras import run_adapter


def ingest(context: typer.Context) -> None:
    """Ingest a feed into a table with Spark, exactly once: Parquet, Delta, Iceberg ... (extra spark)."""
    run_adapter(context, "feedapi_client.spark.ingest", "spark")
