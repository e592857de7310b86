"""`DeltaTable` and `GoldTable`: Delta tables of a catalog.

A micro-batch is one commit a table. It carries the query and the number of the micro-batch as
Delta's transaction, so that a commit which is there is not made again, whoever repeats it. Nothing
that is committed is replaced or deleted. Table properties say which queries write a feed here.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types as T  # noqa: N812 - its usual name

from feedapi_client.retry import Backoff
from feedapi_client.spark.ingest.ingest_table import Identity, Table, identified
from feedapi_client.spark.ingest.job import IngestError, plain_message

ORDER = ("depth", "sequence", "partition")
"""The columns that the order of an entity's events comes from. The partition makes the latest one
the same in every attempt, even where a key is not what the feed is partitioned by."""
_OWNER = "feedapi.owner."
"""Followed by the feed and the query, or the run that goes on where the table ended. The value is
its number among them: the last one is the owner."""
_CONFLICT = re.compile(
    r"\bConcurrent\w*Exception|DELTA_CONCURRENT|DELTA_METADATA_CHANGED|MetadataChangedException|"
    r"TABLE_OR_VIEW_ALREADY_EXISTS|DELTA_PROTOCOL_CHANGED|ProtocolChangedException|"
    r"CommitFailedException|ValidationException: Found conflicting|FIELD_ALREADY_EXISTS|"
    r"DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION|is not empty and also not a"
)
"""The last two are of a table that another query creates: its folder is there before its commit."""
_ATTEMPTS = 20
_CATALOG = "spark.sql.catalogImplementation"
_ATTEMPTS_TO_PREPARE = 8
_MAPPING = "delta.columnMapping.mode"
_NOT_IN_FILES = frozenset(" ,;{}()\n\t=.")
_NEW = "_feedapi_new_"
_DELETED = "_feedapi_deleted"


class DeltaTable(Table):
    """One table. Other queries and commands may write to it at the same time."""

    def check(self, spark: SparkSession, who: Identity, schema: T.StructType | None) -> None:
        super().check(spark, who, schema)
        if schema is not None:
            none = identified(spark.createDataFrame([], schema), who, 0)
            try:
                retry_conflicts(lambda: self._write_none(none, who), _ATTEMPTS_TO_PREPARE)
            except Exception as error:  # Delta's are py4j's
                what = f"{self.name} can't be written: {plain_message(error).rstrip('.')}"
                if "SCHEMA_NOT_FOUND" in what:
                    of = self.name.rpartition(".")[0]
                    what += f'. spark.sql("CREATE SCHEMA {of}") makes it'
                    if spark.conf.get(_CATALOG, "in-memory") == "in-memory":
                        what += (
                            ". The catalog of this session is in memory, and forgets schemas and "
                            "tables when the process ends: give one that lasts, such as "
                            f"--conf {_CATALOG}=hive"
                        )
                raise IngestError(what) from error

    def place(self, spark: SparkSession) -> str:
        """As `Table.place`, with the schema that the session completes the name with."""
        if not self._exists(spark):
            return self.name
        found = spark.catalog.getTable(self.name)
        return ".".join([str(found.catalog), *(found.namespace or ()), found.name]).lower()

    def prepare(self, rows: DataFrame, who: Identity, number: int) -> None:
        spark, named = rows.sparkSession, identified(rows, who, number)

        def prepare() -> None:
            self._align(named, who)
            self.own(spark, who)

        if self._prepared != named.schema:
            retry_conflicts(prepare, _ATTEMPTS_TO_PREPARE)
            self._prepared = named.schema
        # Delta would drop it without a word. A repeated micro-batch is the last one in the table.
        if self.role == ("bronze" if self.job.bronze else "output"):
            self.check_ahead(who, number, self._last_batch(spark, who, after=number))

    def _write_none(self, none: DataFrame, who: Identity) -> None:
        self._align(none, who)

    def _align(self, rows: DataFrame, who: Identity) -> None:
        spark, fields = rows.sparkSession, [T.StructField(f.name, f.dataType) for f in rows.schema]
        options = {**self.job.writer_options, "mergeSchema": "true"}
        # Delta takes some names only under names of its own in the files.
        if not _NOT_IN_FILES.isdisjoint("".join(_names_in(rows.schema))):
            options[_MAPPING] = "name"
        self._compare(spark, rows.schema, who)
        if self._exists(spark) and _MAPPING in options.keys() - self._properties(spark).keys():
            self._alter(spark, f"SET TBLPROPERTIES ('{_MAPPING}' = 'name')")
        # Not `writeTo`, whose `partitionedBy` parses names without their quotes. Fields without
        # their metadata: Delta refuses defaults of another table.
        none = spark.createDataFrame([], T.StructType(fields)).write.format("delta")
        none = none.mode("append").options(**options)
        none.partitionBy(*map(quoted, self.partition_by)).saveAsTable(self.name)

    def write(self, rows: DataFrame, who: Identity, number: int) -> None:
        named = identified(rows, who, number)
        options = {**self.job.writer_options, **_transaction(who, number)}
        self._commit(rows.sparkSession, who, named.writeTo(self.name).options(**options).append)

    def _commit(self, spark: SparkSession, who: Identity, write: Callable[[], object]) -> None:
        """Write, also after a conflict: a query may have begun to go on where this one ended."""

        def checked() -> None:
            self.own(spark, who)
            write()

        retry_conflicts(checked)

    def batch(self, spark: SparkSession, who: Identity, number: int) -> DataFrame:
        own = (column(who.column("query")) == who.query) & (column(who.column("batch")) == number)
        return spark.table(self.name).where(own)

    def delete_newer(self, spark: SparkSession, who: Identity, last: Mapping[str, int]) -> None:
        """Delete what queries wrote after their `last` micro-batches in another table."""
        if not self._exists(spark):
            return
        query, batch = (quoted(who.column(name)) for name in ("query", "batch"))
        newer = " OR ".join(f"{query} = '{q}' AND {batch} > {number}" for q, number in last.items())
        if last and not spark.table(self.name).where(newer).isEmpty():
            sql = f"DELETE FROM {self.name} WHERE {newer}"  # noqa: S608 - ids of Spark, numbers
            retry_conflicts(lambda: spark.sql(sql))

    def check_half_written(self, spark: SparkSession, who: Identity, fits: Sequence[str]) -> None:
        """Raise where a micro-batch is to be repeated that this table, the first one, has already.

        `fits`: the schema and the key then, which say what fits. They are others now.
        """
        number = who.last_offset
        if number == who.last_batch or not self._has_commit(spark, who, number):
            return
        raise IngestError(
            f"{self.name} has micro-batch {number}, which is not finished, with another schema or "
            "key: events that fit one and not the other would be missing, or be in two tables. "
            f"Run once more with schema {fits[0]!r} and key {fits[1:]}; a new one counts from the "
            "next micro-batch on. Or begin a new checkpoint with --resume-from-table"
        )

    def _has_commit(self, spark: SparkSession, who: Identity, number: int) -> bool:
        """Whether a micro-batch was committed here, also one without rows: its log says so."""
        if not self._exists(spark):
            return False
        folder = spark.sql(f"DESCRIBE DETAIL {self.name}").select("location").collect()[0][0]
        log = spark.read.schema("txn STRUCT<appId: STRING, version: LONG>")
        commits = log.json(f"{folder}/_delta_log/*.json").select("txn.*")
        own = _transaction(who, number)
        same = (F.col("appId") == own["txnAppId"]) & (F.col("version") == number)
        return not commits.where(same).isEmpty()

    def _exists(self, spark: SparkSession) -> bool:
        return spark.catalog.tableExists(self.name)

    def owners(self, spark: SparkSession, who: Identity) -> dict[str, int]:
        prefix = self._property(who, "")
        found = [
            (int(value), name.removeprefix(prefix))
            for name, value in self._properties(spark).items()
            if name.startswith(prefix)
        ]
        return {name: number for number, name in sorted(found)}

    def _add_owner(self, spark: SparkSession, who: Identity, name: str) -> None:
        number = 1 + max(self.owners(spark, who).values(), default=0)
        own = self._property(who, name)
        self._alter(spark, f"SET TBLPROPERTIES ('{own}' = '{number}')")
        owners = self.owners(spark, who)
        others = {other: owners[other] for other in owners if other != name}
        try:  # of two that looked at the same time, the second one sees the first
            _ = name == who.run or self.is_owner(others, who)
        except IngestError:
            self._alter(spark, f"UNSET TBLPROPERTIES ('{own}')")
            raise

    def _holds_rows(self, spark: SparkSession, who: Identity) -> bool:
        own = column(who.column("feed")) == who.feed
        return self._exists(spark) and not spark.table(self.name).where(own).isEmpty()

    def _last_batch(self, spark: SparkSession, who: Identity, after: int) -> int:
        batch = column(who.column("batch"))
        own = (column(who.column("query")) == who.query) & (batch > after)
        found = spark.table(self.name).where(own).agg(F.max(batch)).first()
        return -1 if found is None or found[0] is None else int(found[0])

    def _property(self, who: Identity, name: str | None) -> str:
        # A digest: Spark hides values with words such as ``token``, and a feed's name may hold any.
        return f"{_OWNER}{hashlib.sha256(who.feed.encode()).hexdigest()[:16]}.{name}"

    def _properties(self, spark: SparkSession) -> dict[str, str]:
        if not self._exists(spark):
            return {}
        rows = spark.sql(f"SHOW TBLPROPERTIES {self.name}").collect()
        return {row["key"]: row["value"] for row in rows}

    def _alter(self, spark: SparkSession, change: str) -> None:
        retry_conflicts(lambda: spark.sql(f"ALTER TABLE {self.name} {change}"))

    def _compare(self, spark: SparkSession, schema: T.StructType | None, who: Identity) -> None:
        if not self._exists(spark):
            return
        types = {f.name.lower(): f.dataType.simpleString() for f in spark.table(self.name).schema}
        lacking = [n for n in ("feed", "query", "batch") if who.column(n).lower() not in types]
        if lacking:
            raise IngestError(
                f"{self.name} has no column {', '.join(map(who.column, lacking))}: another "
                "program, or another prefix, made this table. Write to another one"
            )
        problem = "column {} is {} and would become {}: keep the type, or write to another table"
        self.check_types(types, schema, str.lower, problem)


class GoldTable(DeltaTable):
    """The latest state of each entity, from one query. A repeated micro-batch changes nothing.

    Events at or before the one that an entity's row comes from are ignored.
    """

    def may_add(self, who: Identity) -> bool:
        return who.run is not None

    def refuse_new_query(
        self,
        who: Identity,  # noqa: ARG002 - of whatever feed and query
        writer: str = "",  # noqa: ARG002
    ) -> None:
        raise IngestError(
            f"{self.name} holds the latest state from another query: the order of its events "
            "and of this query's can't be compared. Give the checkpoint of that query, or "
            "another table"
        )

    def _write_none(self, none: DataFrame, who: Identity) -> None:
        super()._write_none(none, who)
        self._merge(none, who)

    def write(self, rows: DataFrame, who: Identity, number: int) -> None:
        def merge() -> None:
            with _settings(rows.sparkSession, who, number):
                self._merge(identified(rows, who, number), who)

        self._commit(rows.sparkSession, who, merge)

    def _merge(self, named: DataFrame, who: Identity) -> None:
        delete_when, columns = self.job.delete_when, named.columns
        gone = F.lit(False) if delete_when is None else _deleted(delete_when)
        newest = _newest(named, self.job.key, who.prefix).withColumn(_DELETED, gone)
        source = newest.withColumnsRenamed({name: f"{_NEW}{name}" for name in columns})
        # As in `latest`, NULL is a key, too: a transform may make it.
        same = [column(name).eqNullSafe(column(f"{_NEW}{name}")) for name in self.job.key]
        place = [who.column(name) for name in ("depth", "sequence")]
        newer = F.struct(*(column(f"{_NEW}{n}") for n in place)) > F.struct(*map(column, place))
        values = {quoted(name): column(f"{_NEW}{name}") for name in columns}
        deleted = F.col(_DELETED)
        merge = source.mergeInto(self.name, reduce(Column.__and__, same))
        merge = merge.whenMatched(newer & deleted).delete()
        merge = merge.whenMatched(newer).update(values)
        merge.whenNotMatched(~deleted).insert(values).merge()

    def _property(self, who: Identity, name: str | None) -> str:  # noqa: ARG002 - of any feed
        return f"{_OWNER}gold.{name}"


def latest(
    events: DataFrame,
    key: Sequence[str],
    delete_when: str | None = None,
    *,
    prefix: str = "",
) -> DataFrame:
    """Return the latest event of each entity, without entities whose latest event deletes them.

    It is the way to the latest state in formats that have no MERGE: over the whole table ``output``
    of one feed.

    Arguments:
        events: typed events, with the columns ``depth``, ``sequence`` and ``partition``.
        key: columns that identify an entity.
        delete_when: SQL condition on the columns.
        prefix: of the columns that the table got from this library.
    """
    newest = _newest(events, key, prefix)
    return newest if delete_when is None else newest.where(~_deleted(delete_when))


def _newest(events: DataFrame, key: Sequence[str], prefix: str) -> DataFrame:
    order = F.struct(*(column(f"{prefix}{name}") for name in ORDER))
    # "*" and not `events.columns`: a declarative pipeline knows the columns only when it runs.
    row = F.max_by(F.struct(F.col("*")), order).alias("row")
    return events.groupBy(*map(column, key)).agg(row).select("row.*")


def _deleted(delete_when: str) -> Column:
    return F.coalesce(F.expr(delete_when).cast("boolean"), F.lit(False))


def _transaction(who: Identity, number: int) -> dict[str, str]:
    """Return what Delta knows a commit by: it drops one whose number the table has already."""
    return {"txnAppId": f"feedapi:{who.query}", "txnVersion": str(number)}


@contextmanager
def _settings(spark: SparkSession, who: Identity, number: int) -> Iterator[None]:
    """Give Delta's MERGE options of a writer, which it takes from the session only.

    Left there, they would drop the next write to the table, whoever makes it. Each streaming query
    writes its micro-batches in a session of its own.
    """
    given = _transaction(who, number)
    names = {f"spark.databricks.delta.write.{name}": value for name, value in given.items()}
    before: dict[str, str | None] = {name: spark.conf.get(name, None) for name in names}
    try:
        for name, value in names.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


def retry_conflicts(write: Callable[[], object], attempts: int = _ATTEMPTS) -> None:
    # PySpark 4.2 passes Delta's exceptions on as py4j's, not as a PySparkException.
    backoff = Backoff(
        attempts=attempts,
        max_delay=5.0,
        retry_if=lambda error: bool(_CONFLICT.search(str(error))),
    )
    while True:
        try:
            write()
            return
        except Exception as error:  # noqa: BLE001 - the backoff raises what is final
            pause = backoff.pause(error)
        time.sleep(pause)


def _names_in(kind: T.DataType) -> Iterator[str]:
    """Yield the names of all fields of a type, those inside of others too."""
    if isinstance(kind, T.StructType):
        for field in kind:
            yield field.name
            yield from _names_in(field.dataType)
    elif isinstance(kind, T.ArrayType):
        yield from _names_in(kind.elementType)
    elif isinstance(kind, T.MapType):
        yield from (*_names_in(kind.keyType), *_names_in(kind.valueType))


def column(name: str) -> Column:
    return F.col(quoted(name))


def quoted(name: str) -> str:
    return "`{}`".format(name.replace("`", "``"))
