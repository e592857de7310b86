"""What is checked before the first micro-batch: the session, its catalog, and SQL of the user."""

from __future__ import annotations

import re

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from feedapi_client.spark.ingest.columns import Rows
from feedapi_client.spark.ingest.gold import latest
from feedapi_client.spark.ingest.identity import forgotten
from feedapi_client.spark.ingest.job import Ingest, IngestError

_DELTA_JAR = re.compile(r"delta-spark_(\d+\.\d+)_2\.13")
_DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def check_session(spark: SparkSession, job: Ingest) -> None:
    """Raise `IngestError` when the session lacks what the pipeline needs."""
    if job.is_files:
        return
    _check_delta_version(spark)
    _check_delta_installed(spark)
    _check_delta_settings(spark)
    _check_schemas(spark, job)


def check_sql(job: Ingest, rows: Rows) -> None:
    """Raise `IngestError` when `delete_when` or `partition_by` do not fit the columns."""
    if job.transform is not None:
        return  # which may add any column
    output = rows.output()
    known = {name.lower() for name in output.columns}
    unknown = [name for name in job.partition_by if name.lower() not in known]
    if unknown:
        raise IngestError(f"partition_by names {', '.join(unknown)}, which output does not have")
    if job.delete_when is None:
        return
    try:
        _ = latest(output, job.key, job.delete_when, prefix=job.prefix).schema
    except PySparkException as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise IngestError(f"delete_when {job.delete_when!r} is no condition: {reason}") from error


def _check_delta_installed(spark: SparkSession) -> None:
    nowhere = "/nowhere/at/all"
    try:
        # Twice: Spark logs a stack trace for a single path that does not exist.
        _ = spark.read.format("delta").load([nowhere, nowhere]).schema
    except Exception as error:
        if not re.search("DATA_SOURCE_NOT_FOUND|FAILED_CLASS_LOAD", str(error)):
            return  # the format is there, and the path is not
        raise IngestError(
            f"format delta is not installed in this Spark {spark.version}: start it with Delta's "
            "jar for that version (spark.jars.packages), or take format parquet"
        ) from error


def _check_delta_version(spark: SparkSession) -> None:
    """A jar for another release of Spark fails somewhere in the first micro-batch."""
    given = " ".join(
        spark.conf.get(name, "") or "" for name in ("spark.jars", "spark.jars.packages")
    )
    built_for = set(_DELTA_JAR.findall(given))
    here = ".".join(spark.version.split(".")[:2])
    if built_for and here not in built_for:
        raise IngestError(
            f"Delta's jar is built for Spark {', '.join(sorted(built_for))}, and this is Spark "
            f"{spark.version}: take delta-spark_{here}_2.13, or where there is none, the PySpark "
            "that the jar is built for"
        )


def _check_delta_settings(spark: SparkSession) -> None:
    missing = [
        f"--conf {name}={value}"
        for name, value in _DELTA.items()
        if value not in (spark.conf.get(name, "") or "")
    ]
    if missing:
        raise IngestError(
            f"format delta needs settings that this session lacks: {' '.join(missing)}"
        )


def _check_schemas(spark: SparkSession, job: Ingest) -> None:
    tables = (job.output, job.bronze, job.rejected, job.gold)
    for table in filter(None, tables):
        schema = table.rpartition(".")[0]
        if schema and "`" not in table and not spark.catalog.databaseExists(schema):
            raise IngestError(
                f'there is no schema {schema} for table {table}: spark.sql("CREATE SCHEMA '
                f'{schema}"){forgotten(spark)}'
            )
