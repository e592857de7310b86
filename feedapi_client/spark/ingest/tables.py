"""`CatalogTable`: a table of Delta, Iceberg or another format with a catalog.

Every row has the columns ``feed``, ``query`` and ``batch``. One commit of the table replaces the
rows of a micro-batch. A table property for each query says which feed it writes, also when none of
its rows is in the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from urllib.parse import quote, unquote

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import LongType, StringType, StructField, StructType

from feedapi_client.retry import Backoff, retry_sync
from feedapi_client.spark.ingest.identity import (
    Identity,
    check_missing,
    check_new_query,
    check_other_feed,
)
from feedapi_client.spark.ingest.job import Ingest, IngestError

_CONFLICT = re.compile(
    r"\bConcurrent\w*Exception|DELTA_CONCURRENT|DELTA_METADATA_CHANGED|MetadataChangedException|"
    r"TABLE_OR_VIEW_ALREADY_EXISTS|DELTA_PROTOCOL_CHANGED|"
    r"ProtocolChangedException|CommitFailedException|ValidationException: Found conflicting"
)
_ATTEMPTS = 20
_PROPERTY = "feedapi.query."


class CatalogTable:
    """One table. Other queries and commands may write to it at the same time.

    Arguments:
        optional: whether the table may lack batches of its query, which a transform writes.
    """

    def __init__(
        self,
        job: Ingest,
        name: str,
        partition_by: Sequence[str] = (),
        *,
        optional: bool = False,
    ) -> None:
        self.job = job
        self.name = name
        self.partition_by = list(partition_by)
        self.optional = optional
        self._prepared = False

    def check(self, spark: SparkSession, who: Identity, schema: StructType | None) -> None:
        """Raise `IngestError` when the query must not write here.

        Arguments:
            schema: columns to be written; None when only a transform decides.
        """
        if not spark.catalog.tableExists(self.name):
            if who.last_batch >= 0 and not self.optional:
                check_missing(self.name, who.last_batch)
            return
        self._compare(spark, schema, who)
        if who.query is None:
            own = F.col(who.column("feed")) == who.feed
            if not self.job.append and not spark.table(self.name).where(own).isEmpty():
                check_new_query(self.name, who.feed)
            return
        feed = self._feed_of(spark, who.query)
        if feed is None and who.last_batch >= 0 and not self.optional:
            check_missing(self.name, who.last_batch)
        if feed not in (None, who.feed):
            check_other_feed(self.name, who.feed, who.query)

    def write(self, rows: DataFrame, who: Identity, number: int) -> None:
        """Write a micro-batch in place of an earlier attempt."""
        named = rows.withColumns(
            {
                who.column("feed"): F.lit(who.feed),
                who.column("query"): F.lit(who.query),
                who.column("batch"): F.lit(number).cast("long"),
            }
        )
        self.prepare(named.sparkSession, named.schema, who)
        own = (F.col(who.column("query")) == who.query) & (F.col(who.column("batch")) == number)
        columns = self._aligned(named)
        options = dict(self.job.writer_options)
        retry_conflicts(lambda: columns.writeTo(self.name).options(**options).overwrite(own))

    def batches(
        self, spark: SparkSession, who: Identity, numbers: Sequence[int]
    ) -> DataFrame | None:
        """Return the rows of these micro-batches of the query, None when there are none."""
        if not numbers or not spark.catalog.tableExists(self.name):
            return None
        batch = F.col(who.column("batch")).between(min(numbers), max(numbers))
        return spark.table(self.name).where((F.col(who.column("query")) == who.query) & batch)

    def prepare(self, spark: SparkSession, schema: StructType, who: Identity) -> None:
        """Create the table, or add the columns that are new."""
        if self._prepared:
            return
        if spark.catalog.tableExists(self.name):
            self._compare(spark, schema, who)
            self._add_columns(spark, schema)
        else:
            self._create(spark, schema, who)
        self._note(spark, who)
        self._prepared = True

    def _feed_of(self, spark: SparkSession, query: str) -> str | None:
        """Return which feed the query writes here, None when it never wrote."""
        properties = spark.sql(f"SHOW TBLPROPERTIES {self.name}").collect()
        feeds = [row["value"] for row in properties if row["key"] == f"{_PROPERTY}{query}"]
        return unquote(feeds[0]) if feeds else None

    def _note(self, spark: SparkSession, who: Identity) -> None:
        """Note the query, unless `_create` did. It changes metadata, once in a query's life."""
        if self._feed_of(spark, str(who.query)) is None:
            # Quoted, because parameters of SQL are not allowed here.
            note = f"'{_PROPERTY}{who.query}' = '{quote(who.feed, safe='')}'"
            sql = f"ALTER TABLE {self.name} SET TBLPROPERTIES ({note})"
            retry_conflicts(lambda: spark.sql(sql))

    def _create(self, spark: SparkSession, schema: StructType, who: Identity) -> None:
        nullable = StructType([StructField(f.name, f.dataType) for f in schema])
        empty = spark.createDataFrame([], nullable).writeTo(self.name).using(self.job.format)
        empty = empty.options(**self.job.writer_options)
        empty = empty.tableProperty(f"{_PROPERTY}{who.query}", quote(who.feed, safe=""))
        if self.partition_by:
            empty = empty.partitionedBy(*[F.col(name) for name in self.partition_by])

        def create() -> None:
            if not spark.catalog.tableExists(self.name):
                empty.create()

        retry_conflicts(create)  # another query may create it at the same time

    def _add_columns(self, spark: SparkSession, schema: StructType) -> None:
        known = {name.lower() for name in spark.table(self.name).columns}
        new = ", ".join(
            f"`{field.name}` {field.dataType.simpleString()}"
            for field in schema
            if field.name.lower() not in known
        )
        if new:
            retry_conflicts(lambda: spark.sql(f"ALTER TABLE {self.name} ADD COLUMNS ({new})"))

    def _aligned(self, rows: DataFrame) -> DataFrame:
        """Return the rows with all columns of the table: those that they lack are null."""
        given = {name.lower(): name for name in rows.columns}
        table = rows.sparkSession.table(self.name).schema
        return rows.select(
            *(
                F.col(given[field.name.lower()]).alias(field.name)
                if field.name.lower() in given
                else F.lit(None).cast(field.dataType).alias(field.name)
                for field in table
            )
        )

    def _compare(self, spark: SparkSession, schema: StructType | None, who: Identity) -> None:
        """Raise `IngestError` when the table's columns are not those of this pipeline."""
        table = spark.table(self.name).schema
        types = {field.name.lower(): field.dataType.simpleString() for field in table}
        for name, kind in (("feed", StringType()), ("query", StringType()), ("batch", LongType())):
            if types.get(who.column(name).lower()) != kind.simpleString():
                raise IngestError(
                    f"{self.name} has no column {who.column(name)} {kind.simpleString()}: another "
                    "program, or another prefix, made this table. Write to another one"
                )
        for field in schema or ():
            before = types.get(field.name.lower())
            if before not in (None, field.dataType.simpleString()):
                raise IngestError(
                    f"{self.name}: column {field.name} is {before} and would become "
                    f"{field.dataType.simpleString()}: keep the type, or write to another table"
                )
        found = [c.name for c in spark.catalog.listColumns(self.name) if c.isPartition]
        if [name.lower() for name in found] != [name.lower() for name in self.partition_by]:
            raise IngestError(
                f"{self.name} is partitioned by {found}, not by {self.partition_by}: keep that, "
                "or write to another table"
            )


def retry_conflicts(write: Callable[[], object]) -> None:
    """Write, and write again after a conflict with another writer of the table.

    Raises:
        Exception: the write failed in another way, or conflicts did not end.
    """

    backoff = Backoff(attempts=_ATTEMPTS, max_delay=5.0, retry_if=_is_conflict)
    retry_sync(write, backoff)


def _is_conflict(error: Exception) -> bool:
    # PySpark 4.2 passes Delta's exceptions on as py4j's, not as a PySparkException.
    return bool(_CONFLICT.search(str(error)))
