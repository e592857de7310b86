"""What is checked before the first micro-batch: the session, its catalog, and SQL of the user."""

from __future__ import annotations

import re

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from feedapi_client.spark.ingest.columns import IDENTITY
from feedapi_client.spark.ingest.delta_table import ORDER, latest
from feedapi_client.spark.ingest.ingest_errors import first_line
from feedapi_client.spark.ingest.ingest_table import forgotten
from feedapi_client.spark.ingest.job import Ingest, IngestError
from feedapi_client.spark.ingest.names import (
    as_url,
    catalog_takes,
    check_output,
    folded,
    same_tables,
)
from feedapi_client.spark.schema import spark_schema

_DELTA_JAR = re.compile(r"delta-spark_(\d+\.\d+)_2\.13")
_DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def check_session(spark: SparkSession, job: Ingest) -> None:
    """Raise `IngestError` when the session lacks what the pipeline needs."""
    if job.is_files:
        _check_encoding(spark, job)
        return
    _check_delta_version(spark)
    _check_delta_installed(spark)
    _check_delta_settings(spark)
    _check_schemas(spark, job)


def check_rows(job: Ingest, output: DataFrame) -> None:
    """Raise `IngestError` when `output`, or `gold`, can't be written with these rows.

    Arguments:
        output: the typed events, or what a transform makes of them. Only its columns count.
    """
    spark = output.sparkSession
    prefix = job.prefix if job.schema else ""
    try:
        check_output(job, output.schema, [f"{prefix}{n}" for n in IDENTITY], folded(spark, job))
        if job.gold is not None:
            _check_own_columns(job, output)
    except PySparkException as error:
        raise IngestError(f"the columns of output: {first_line(error)}") from error
    except ValueError as error:
        raise IngestError(str(error)) from error
    if job.delete_when is None:
        return
    try:
        _ = latest(output, job.key, job.delete_when, prefix=job.prefix).schema
    except PySparkException as error:
        raise IngestError(
            f"delete_when {job.delete_when!r} is no condition: {first_line(error)}"
        ) from error


def _check_own_columns(job: Ingest, output: DataFrame) -> None:
    """Raise ValueError when a transform lost the columns that gold's order comes from."""
    wanted = {f"{job.prefix}{f.name}": f.dataType for f in spark_schema() if f.name in ORDER}
    kinds = {field.name: field.dataType for field in output.schema}
    wrong = [name for name, kind in wanted.items() if kinds.get(name) != kind]
    if wrong:
        raise ValueError(
            f"gold needs the columns {', '.join(wrong)} of output as they are: the transform has "
            "to return them"
        )


def _check_encoding(spark: SparkSession, job: Ingest) -> None:
    """Java neither finds nor lists files with names that its locale has no characters for."""
    places = filter(None, (job.output, job.bronze, job.rejected, job.checkpoint))
    local = [place for place in places if as_url(place).startswith("file:")]
    names = [name for name in (job.feed_name, *local) if not name.isascii()]
    if not (local and names):
        return
    asked = "java_method('java.lang.System', 'getProperty', 'sun.jnu.encoding')"
    encoding = str(spark.range(1).selectExpr(asked).collect()[0][0])
    if encoding.upper() != "UTF-8":
        raise IngestError(
            f"{', '.join(names)}: Spark can't find files of such a name here, because Java takes "
            f"their names for {encoding}. Set LC_ALL=C.UTF-8 where Spark runs"
        )


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
    names = [name for name in (job.output, job.bronze, job.rejected, job.gold) if name]
    if len(same_tables(spark, job, names)) < len(names):
        here = spark.catalog.currentCatalog(), spark.catalog.currentDatabase()
        raise IngestError(
            f"output, bronze, rejected and gold must be different tables: of {', '.join(names)} "
            f"two are the same in {'.'.join(here)}"
        )
    for table in names:
        try:
            spark.catalog.tableExists(table)
        except PySparkException as error:
            raise IngestError(
                f"{table!r} can't be the name of a table: {first_line(error)}"
            ) from error
        if not catalog_takes(spark, table):
            raise IngestError(
                f"{table!r} can't be the name of a table: Spark's own catalog takes letters from a "
                "to z, digits and _"
            )
        schema = table.rpartition(".")[0]
        if schema and "`" not in table and not spark.catalog.databaseExists(schema):
            raise IngestError(
                f'there is no schema {schema} for table {table}: spark.sql("CREATE SCHEMA '
                f'{schema}"){forgotten(spark)}'
            )
