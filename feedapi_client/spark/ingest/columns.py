"""The columns of the tables: typed events, and rejected events with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import DataType, StructField, StructType

from feedapi_client.spark.ingest.job import CORRUPT, Ingest, IngestError
from feedapi_client.spark.schema import spark_schema

IDENTITY = ("feed", "query", "batch")
"""Which feed, streaming query and micro-batch a row comes from."""

EVENT = ("partition", "cursor", "sequence", "depth", "headers")
REASON = "reason"
INGESTED_AT = "ingested_at"

_PARSED = "_feedapi_parsed"
_REASON = "_feedapi_reason"


def payload_schema(job: Ingest) -> StructType | None:
    """Return the schema of the payload, None without one.

    Needs an active Spark session.

    Raises:
        IngestError: the DDL is wrong, or a column has the name of one of ours.
    """
    if job.schema is None:
        return None
    try:
        schema = DataType.fromDDL(job.schema)
    except PySparkException as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise IngestError(f"schema {job.schema!r} can't be parsed: {reason}") from error
    if not isinstance(schema, StructType):
        raise IngestError(f"schema {job.schema!r} must be columns, such as 'id STRING, n INT'")
    _check_names(job, schema)
    return schema


def _check_names(job: Ingest, schema: StructType) -> None:
    ours = {f"{job.prefix}{name}".lower() for name in (*IDENTITY, *EVENT)} | {CORRUPT}
    if job.keep_data:
        ours.add(f"{job.prefix}data".lower())
    taken = [name for name in schema.names if name.lower() in ours]
    if taken:
        raise IngestError(
            f"schema columns {', '.join(taken)} have names of columns that the table gets from "
            "this library: give those a prefix, such as --prefix feed_"
        )
    known = {name.lower() for name in schema.names}
    unknown = [name for name in job.key if name.lower() not in known]
    if unknown:
        raise IngestError(f"key columns {', '.join(unknown)} are not in the schema")


class Rows:
    """The rows of one micro-batch for each table.

    Arguments:
        batch: rows of the source.
        schema: of the payload; None leaves it as it is.
    """

    def __init__(self, job: Ingest, batch: DataFrame, schema: StructType | None) -> None:
        self.job = job
        self.schema = schema
        self.parsed = batch if schema is None else self._parse(batch, schema)

    def bronze(self) -> DataFrame:
        """Every event as sent."""
        return self.parsed.select(*EVENT, "data").withColumn(INGESTED_AT, F.current_timestamp())

    def output(self) -> DataFrame:
        """The typed events, or every event without a schema."""
        if self.schema is None:
            return self.bronze()
        prefix = self.job.prefix
        columns = [F.col(name).alias(f"{prefix}{name}") for name in EVENT]
        if self.job.keep_data:
            columns.append(F.col("data").alias(f"{prefix}data"))
        columns += [F.col(_PARSED).getField(name).alias(name) for name in self.schema.names]
        if self.job.rejected is None:
            corrupt = F.when(F.col(_REASON).isNotNull(), F.col("data"))
            return self.parsed.select(*columns, corrupt.alias(CORRUPT))
        return self.parsed.where(F.col(_REASON).isNull()).select(*columns)

    def rejected(self) -> DataFrame:
        """The events that don't fit the schema, with the reason."""
        rows = self.parsed.where(F.col(_REASON).isNotNull())
        return rows.select(*EVENT, "data", F.col(_REASON).alias(REASON)).withColumn(
            INGESTED_AT, F.current_timestamp()
        )

    def _parse(self, batch: DataFrame, schema: StructType) -> DataFrame:
        kept = StructType([*schema.fields, StructField(CORRUPT, DataType.fromDDL("STRING"))])
        parsed = F.from_json("data", kept, {"columnNameOfCorruptRecord": CORRUPT})
        required = [field.name for field in schema if not field.nullable]
        if self.job.gold is not None:
            required += [name for name in self.job.key if name not in required]
        return batch.withColumn(_PARSED, parsed).withColumn(_REASON, _reason(schema, required))


def _reason(schema: StructType, required: Sequence[str]) -> Column:
    """Return why the event does not fit: null when it fits, else names of fields, never values."""
    parsed = F.col(_PARSED)
    sent = F.from_json("data", "MAP<STRING, STRING>")
    wrong = [
        F.when(
            sent.getItem(field.name).isNotNull() & parsed.getField(field.name).isNull(),
            F.lit(f"{field.name} is not {field.dataType.simpleString()}"),
        )
        for field in schema
    ]
    missing = [
        F.when(
            sent.getItem(name).isNull() & parsed.getField(name).isNull(),
            F.lit(f"{name} is missing"),
        )
        for name in required
    ]
    corrupt = parsed.isNull() | parsed.getField(CORRUPT).isNotNull()
    known = F.concat_ws("; ", *(F.when(corrupt, one) for one in wrong), *missing)
    return (
        F.when(corrupt & sent.isNull(), F.lit("not a JSON object"))
        .when(known != "", known)
        .when(corrupt, F.lit("does not fit the schema"))
    )


def empty_rows(spark: SparkSession, job: Ingest, schema: StructType | None) -> Rows:
    """Return the rows of an empty micro-batch, to know the columns of the tables."""
    return Rows(job, spark.createDataFrame([], spark_schema()), schema)
