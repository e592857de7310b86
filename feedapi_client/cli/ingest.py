"""``feedapi ingest``: passes its arguments on to `feedapi_client.spark.ingest`."""

from __future__ import annotations

import typer

from feedapi_client.cli.extras import run_adapter


def ingest(context: typer.Context) -> None:
    """Ingest a feed exactly once into Spark tables: Parquet or Delta (extra spark)."""
    run_adapter(context, "feedapi_client.spark.ingest", "spark")
