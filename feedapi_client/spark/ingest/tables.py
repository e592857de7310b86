"""`CatalogTable`: a Delta table of a catalog.

Every row has the columns ``feed``, ``query`` and ``batch``. One commit of the table replaces the
rows of a micro-batch. Table properties for each query say which feed it writes, also when none of
its rows is in the table, and which of the queries began first.
"""

from __future__ import annotations

import math
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import unquote

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types as T  # noqa: N812 - its usual name

from feedapi_client.retry import Backoff
from feedapi_client.spark.ingest.checkpoint import WRITING
from feedapi_client.spark.ingest.identity import Identity, Table, forgotten
from feedapi_client.spark.ingest.job import IngestError
from feedapi_client.spark.ingest.names import fields_in
from feedapi_client.spark.ingest.publishing import WrittenFiles

_CONFLICT = re.compile(
    r"\bConcurrent\w*Exception|DELTA_CONCURRENT|DELTA_METADATA_CHANGED|MetadataChangedException|"
    r"TABLE_OR_VIEW_ALREADY_EXISTS|DELTA_PROTOCOL_CHANGED|"
    r"ProtocolChangedException|CommitFailedException|ValidationException: Found conflicting"
)
_ATTEMPTS = 20
_BEING_CREATED = re.compile(
    r"DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION|is not empty and also not a"
)
_ATTEMPTS_TO_CREATE = 8
PROPERTY = "feedapi.query."
_ORDER = "feedapi.order."
_RESUMED = "feedapi.resumed."
_APPEND_ONLY = "delta.appendOnly"
_MAPPING = "delta.columnMapping.mode"
_CHANGES = "delta.enableChangeDataFeed"
_NOT_IN_FILES = frozenset(" ,;{}()\n\t=.")
_BATCHES = 2**30
"""Micro-batches in an epoch of a run, in the number of a transaction."""
_HISTORY = (10, 1000)
"""So many of a table's newest commits are searched for those of a query."""
_COMMIT = (
    *("version", "timestamp", "operation", "userMetadata"),
    "try_cast(operationParameters['version'] AS BIGINT) AS to_version",
    "trim('\"' FROM operationParameters['source']) AS source",
    "try_cast(operationParameters['sourceVersion'] AS BIGINT) AS source_version",
)
USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"


class CatalogTable(Table):
    """One table. Other queries and commands may write to it at the same time."""

    _prepared: T.StructType | None = None

    def check(self, spark: SparkSession, who: Identity, schema: T.StructType | None) -> None:
        """Raise `IngestError` when the query must not write here. No schema: a transform's."""
        if not spark.catalog.tableExists(self.name):
            self.check_missing(who, forgotten(spark) if who.last_batch >= 0 else "")
            self._try_columns(spark, schema, schema, {})
            return
        self._compare(spark, schema, who)
        self._check_partitions(spark)
        properties = self._properties(spark)
        self._try_columns(spark, schema, self._new_columns(spark, schema), properties)
        if properties.get(_APPEND_ONLY) == "true":
            raise IngestError(
                f"{self.name} has the property {_APPEND_ONLY}, and a repeated micro-batch replaces "
                f"rows: ALTER TABLE {self.name} SET TBLPROPERTIES ('{_APPEND_ONLY}' = 'false')"
            )
        feed = properties.get(f"{PROPERTY}{who.query}")
        if who.query is None:
            own = column(who.column("feed")) == who.feed
            if not self.may_add(who) and not spark.table(self.name).where(own).isEmpty():
                self.refuse_new_query(who)
        if feed is None:
            self.check_missing(who)
        self._check_place(properties, who)
        if who.query is None:
            return
        if feed is not None and unquote(feed) != who.feed:
            self.refuse_other_feed(who)
        last, ever = self._history(spark, who, self.name)
        held = self._last_batch(spark, who, after=who.last_offset) if last is None else last
        self.check_old_checkpoint(who, held)
        self.check_old_table(who, last, ever)

    def _try_columns(
        self,
        spark: SparkSession,
        schema: T.StructType | None,
        new: T.StructType | None,
        properties: Mapping[str, str],
    ) -> None:
        if self.job.writer_options or new:
            own = {_MAPPING: "name", _APPEND_ONLY: "false"}
            own |= {name: properties[name] for name in (_CHANGES,) if name in properties}
            self.try_out(spark, schema, own)

    def _last_batch(self, spark: SparkSession, who: Identity, after: int) -> int:
        """Return the last micro-batch after one that the query's rows are of, -1 without one."""
        batch = column(who.column("batch"))
        own = (column(who.column("query")) == who.query) & (batch > after)
        found = spark.table(self.name).where(own).agg(F.max(batch)).first()
        return -1 if found is None or found[0] is None else int(found[0])

    def _history(
        self, spark: SparkSession, who: Identity, table: str, clone: Row | None = None
    ) -> tuple[int | None, int]:
        """Return what `last_written` does of a table's commits, or of those that a clone is of."""

        def origin(commit: Row) -> tuple[int | None, int]:
            source = commit["source"]
            if source is None:
                return self._last_batch(spark, who, after=-1), -1
            name = f"delta.`{source}`" if "/" in source and "`" not in source else source
            try:
                return self._history(spark, who, name, commit)
            except Exception:  # noqa: BLE001 - it was deleted, or is another user's: nothing tells
                return None, -1

        ever = -1
        for limit in _HISTORY:
            history = spark.sql(f"DESCRIBE HISTORY {table} LIMIT {limit}").selectExpr(*_COMMIT)
            rows = history.collect()
            if clone is not None:  # a table of that name may be a later one
                rows = [
                    row
                    for row in rows
                    if row["version"] <= clone["source_version"]
                    and row["timestamp"] < clone["timestamp"]
                ]
            last, ever = last_written(rows, str(who.query), origin)
            if last is not None:
                return last, ever
        return None if ever < 0 else -1, ever

    def write(self, rows: DataFrame, who: Identity, number: int) -> list[WrittenFiles]:
        """Write a micro-batch in place of an earlier attempt. Nothing is left to be published."""
        named = identified(rows, who, number)
        self.prepare(named.sparkSession, named.schema, who)
        own = (column(who.column("query")) == who.query) & (column(who.column("batch")) == number)
        options = transaction(named.sparkSession, who, number)
        options = {**self.job.writer_options, **WRITING, **options}

        def overwrite() -> None:
            named.writeTo(self.name).options(**options).overwrite(own)

        self.commit(named.sparkSession, who, overwrite)
        return []

    def commit(self, spark: SparkSession, who: Identity, write: Callable[[], object]) -> None:
        """Write, and write again after a conflict with another writer of the table.

        That one may be a query that goes on where this one ended.
        """

        def checked() -> None:
            self._check_place(self._properties(spark), who)
            write()

        retry_conflicts(checked)

    def batches(
        self, spark: SparkSession, who: Identity, numbers: Sequence[int]
    ) -> DataFrame | None:
        """Return the rows of these micro-batches of the query, None when there are none."""
        if not numbers or not spark.catalog.tableExists(self.name):
            return None
        batch = column(who.column("batch")).between(min(numbers), max(numbers))
        return spark.table(self.name).where((column(who.column("query")) == who.query) & batch)

    def prepare(self, spark: SparkSession, schema: T.StructType, who: Identity) -> None:
        """Create the table, or add the columns that are new."""
        if self._prepared == schema:
            return
        if spark.catalog.tableExists(self.name):
            self._compare(spark, schema, who)
            if self._prepared is None:
                self._check_partitions(spark)
            self._add_columns(spark, schema)
        else:
            self._create(spark, schema, who)
        self._note(spark, who)
        self._prepared = schema

    def _properties(self, spark: SparkSession) -> dict[str, str]:
        if not spark.catalog.tableExists(self.name):
            return {}
        rows = spark.sql(f"SHOW TBLPROPERTIES {self.name}").collect()
        return {row["key"]: row["value"] for row in rows}

    def holds_last(self, spark: SparkSession, who: Identity) -> bool:
        """Whether it shows the last micro-batch that the query committed."""
        if not spark.catalog.tableExists(self.name):
            return False
        last, _ = self._history(spark, who, self.name)
        return last is not None and last >= who.last_batch

    def holds(self, spark: SparkSession, who: Identity) -> bool:
        """Whether the query wrote here."""
        if who.query in self.order(spark):
            return True
        return spark.catalog.tableExists(self.name) and self._last_batch(spark, who, after=-1) >= 0

    def order(self, spark: SparkSession) -> dict[str, int]:
        """Return the queries that wrote here, with numbers that rise in the order they began in."""
        return _order(self._properties(spark))

    def _check_place(self, properties: Mapping[str, str], who: Identity) -> None:
        """Raise where another query wrote the feed here, or goes on from where this one ended."""
        order, own = _order(properties), {str(who.query), str(who.run)}
        others = _queries(properties, who.feed) - own
        undo = f"ALTER TABLE {self.name} UNSET TBLPROPERTIES"
        if others and who.query not in order and not self.may_add(who):
            newest = max(others, key=lambda query: order.get(query, 0))
            self.refuse_new_query(who, newest, f"{undo} ('{PROPERTY}{newest}')")
        place = order.get(str(who.run), order.get(str(who.query), math.inf))
        resumed = [run for run in others if f"{_RESUMED}{run}" in properties]
        newest = max(resumed, key=order.__getitem__, default="")
        if newest and order[newest] >= place:
            self.refuse_old_query(who, newest, f"{undo} ('{_RESUMED}{newest}')")

    def take_over(self, spark: SparkSession, who: Identity) -> None:
        """As `FileTable.take_over`."""
        if spark.catalog.tableExists(self.name):
            self._note(spark, who)

    def _note(self, spark: SparkSession, who: Identity) -> None:
        """Note the query, unless `_create` did; or its run, before there is one.

        It changes metadata, once in a query's life.
        """
        properties = self._properties(spark)
        self._check_place(properties, who)
        if f"{PROPERTY}{who.query or who.run}" in properties:
            return
        noted = _noted(who, 1 + max(_order(properties).values(), default=0))
        self._set_properties(spark, noted)
        try:  # of two that looked at the same time, the second one sees both
            found = self._properties(spark)
            self._check_place(found, who)
            self._check_place({name: found[name] for name in found.keys() - noted.keys()}, who)
        except IngestError:
            names = ", ".join(f"'{name}'" for name in noted)
            retry_conflicts(
                lambda: spark.sql(f"ALTER TABLE {self.name} UNSET TBLPROPERTIES ({names})")
            )
            raise

    def _create(self, spark: SparkSession, schema: T.StructType, who: Identity) -> None:
        # SQL, because `DataFrameWriterV2.partitionedBy` parses names, quoted or not.
        properties = {**_noted(who, 1), _APPEND_ONLY: "false"}
        if self._needs_mapping(schema):
            properties[_MAPPING] = "name"
        sql = f"CREATE TABLE IF NOT EXISTS {self.name} ({_columns(schema)}) USING delta"
        if self.job.writer_options:
            sql += f" OPTIONS ({_assignments(self.job.writer_options)})"
        if self.partition_by:
            sql += f" PARTITIONED BY ({', '.join(map(quoted, self.partition_by))})"
        sql += f" TBLPROPERTIES ({_assignments(properties)})"
        # Another query may create it at the same time. Its folder is there before its first commit.
        creating = Backoff(attempts=_ATTEMPTS_TO_CREATE, max_delay=2.0, retry_if=_is_being_created)
        retry_conflicts(lambda: _repeat(lambda: spark.sql(sql), creating))

    def _add_columns(self, spark: SparkSession, schema: T.StructType) -> None:
        new = self._new_columns(spark, schema)
        if not new.fields:
            return
        if self._needs_mapping(new):
            self._set_properties(spark, {_MAPPING: "name"})
        sql = f"ALTER TABLE {self.name} ADD COLUMNS ({_columns(new)})"
        retry_conflicts(lambda: spark.sql(sql))

    def _new_columns(self, spark: SparkSession, schema: T.StructType | None) -> T.StructType:
        known = {name.lower() for name in spark.table(self.name).columns}
        return T.StructType([field for field in schema or () if field.name.lower() not in known])

    def _set_properties(self, spark: SparkSession, properties: Mapping[str, str]) -> None:
        # Quoted, because parameters of SQL are not allowed here.
        sql = f"ALTER TABLE {self.name} SET TBLPROPERTIES ({_assignments(properties)})"
        retry_conflicts(lambda: spark.sql(sql))

    def _needs_mapping(self, schema: T.StructType) -> bool:
        """Whether Delta takes the names only under names of its own in the files."""
        return any(not _NOT_IN_FILES.isdisjoint(f.name) for f in fields_in(schema))

    def _compare(self, spark: SparkSession, schema: T.StructType | None, who: Identity) -> None:
        """Raise `IngestError` when the table's columns are not those of this pipeline."""
        table = spark.table(self.name).schema
        types = {field.name.lower(): field.dataType.simpleString() for field in table}
        for name, kind in (("feed", "string"), ("query", "string"), ("batch", "bigint")):
            if types.get(who.column(name).lower()) != kind:
                raise IngestError(
                    f"{self.name} has no column {who.column(name)} {kind}: another "
                    "program, or another prefix, made this table. Write to another one"
                )
        self.check_types(
            types,
            schema,
            str.lower,
            "column {} is {} and would become {}: keep the type, or write to another table",
        )

    def _check_partitions(self, spark: SparkSession) -> None:
        found = [c.name for c in spark.catalog.listColumns(self.name) if c.isPartition]
        if [name.lower() for name in found] != [name.lower() for name in self.partition_by]:
            raise IngestError(
                f"{self.name} is partitioned by {found}, not by {self.partition_by}: keep that, "
                "or write to another table"
            )


def _noted(who: Identity, number: int) -> dict[str, str]:
    """Return the properties that a query or run is known by: which feed it writes, and its number.

    Every byte is percent-encoded: Spark does not show values that hold words such as ``token`` or
    ``url`` (spark.redaction.regex, spark.sql.redaction.options.regex).
    """
    feed = "".join(f"%{byte:02X}" for byte in who.feed.encode())
    name = who.query or who.run
    noted = {f"{PROPERTY}{name}": feed, f"{_ORDER}{name}": str(number)}
    return noted if who.query else noted | {f"{_RESUMED}{name}": "true"}


def _order(properties: Mapping[str, str]) -> dict[str, int]:
    """Return the queries that the properties note, with numbers that rise in their order."""
    return {
        name.removeprefix(_ORDER): int(value)
        for name, value in properties.items()
        if name.startswith(_ORDER)
    }


def _queries(properties: Mapping[str, str], feed: str) -> set[str]:
    """Return the queries of a feed."""
    return {
        name.removeprefix(PROPERTY)
        for name, value in properties.items()
        if name.startswith(PROPERTY) and unquote(value) == feed
    }


def quoted(name: str) -> str:
    """Return the name of a column as SQL takes it, whatever is in it."""
    return "`{}`".format(name.replace("`", "``"))


def _columns(schema: T.StructType) -> str:
    """Return names and types. `StructType.toDDL` would carry defaults, which Delta refuses."""
    return ", ".join(f"{quoted(field.name)} {_sql_type(field.dataType)}" for field in schema)


def _sql_type(kind: T.DataType) -> str:
    """Return the type as SQL takes it, whatever the names in it are. Everything may be null."""
    if isinstance(kind, T.ArrayType):
        return f"ARRAY<{_sql_type(kind.elementType)}>"
    if isinstance(kind, T.MapType):
        return f"MAP<{_sql_type(kind.keyType)}, {_sql_type(kind.valueType)}>"
    if isinstance(kind, T.StructType):
        fields = (f"{quoted(field.name)}: {_sql_type(field.dataType)}" for field in kind)
        return f"STRUCT<{', '.join(fields)}>"
    # TIMESTAMP is what the session says.
    return "timestamp_ltz" if isinstance(kind, T.TimestampType) else kind.simpleString()


def _assignments(given: Mapping[str, str]) -> str:
    def text(value: str) -> str:
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"

    return ", ".join(f"{text(name)} = {text(value)}" for name, value in given.items())


def column(name: str) -> Column:
    """Return the column of that name, which may hold dots and spaces."""
    return F.col(quoted(name))


def identified(rows: DataFrame, who: Identity, number: int) -> DataFrame:
    """Return the rows with the columns that a replay is found by.

    They come first: Delta keeps statistics of the first 32 columns only, and without them each
    micro-batch would look into every file.
    """
    return rows.select(
        F.lit(who.feed).alias(who.column("feed")),
        F.lit(who.query).alias(who.column("query")),
        F.lit(number).cast("long").alias(who.column("batch")),
        F.col("*"),
    )


def transaction(spark: SparkSession, who: Identity, number: int) -> dict[str, str]:
    """Return what lets Delta drop a write to a table that a later run has written to.

    Delta keeps the number of the last transaction of each application in the table, and compares
    it in the commit itself: a run that wakes up late changes nothing, however late it is. The
    table's history shows the metadata, after that which the session sets.
    """
    version, application = who.epoch * _BATCHES + number, f"feedapi-{who.query}"
    metadata = f"{spark.conf.get(USER_METADATA, None) or ''} {application} {number}".strip()
    if not who.epoch:  # who completes what another query wrote does not know that one's epochs
        application += f"-{uuid.uuid4().hex}"
    return {"txnAppId": application, "txnVersion": str(version), "userMetadata": metadata}


def last_written(
    history: Sequence[Row], query: str, origin: Callable[[Row], tuple[int | None, int]]
) -> tuple[int | None, int]:
    """Return the query's last micro-batch that a table holds, and the last ever written to it.

    RESTORE goes back to an earlier version of the table, which holds nothing of those between, and
    CLONE to a version of another one. None, and -1, where no commit tells.

    Arguments:
        history: commits, the newest first: `_COMMIT` of DESCRIBE HISTORY.
        origin: returns the same of what a CLONE, or a RESTORE to a time, went back to. The time is
            noted without its zone.
    """
    own, ever = re.compile(rf"\bfeedapi-{re.escape(query)} (\d+)$"), -1
    version = math.inf
    for commit in history:
        found = own.search(commit["userMetadata"] or "")
        if found:
            ever = max(ever, int(found[1]))
        if commit["version"] > version:
            continue
        if found:
            return int(found[1]), ever
        if commit["operation"] == "RESTORE" and commit["to_version"] is not None:
            version = commit["to_version"]
        elif commit["operation"] in ("RESTORE", "CLONE"):
            last, earlier = origin(commit)
            return last, max(ever, earlier)
    return None, ever


def retry_conflicts(write: Callable[[], object]) -> None:
    """Write, and write again after a conflict with another writer of the table."""
    _repeat(write, Backoff(attempts=_ATTEMPTS, max_delay=5.0, retry_if=_is_conflict))


def _repeat(write: Callable[[], object], backoff: Backoff) -> None:
    while True:
        try:
            write()
            return
        except Exception as error:  # noqa: BLE001 - the backoff raises what is final
            pause = backoff.pause(error)
        time.sleep(pause)


def _is_being_created(error: Exception) -> bool:
    return bool(_BEING_CREATED.search(str(error)))


def _is_conflict(error: Exception) -> bool:
    # PySpark 4.2 passes Delta's exceptions on as py4j's, not as a PySparkException.
    return bool(_CONFLICT.search(str(error)))
