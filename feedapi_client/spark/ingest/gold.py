"""`GoldTable`: the latest state of each entity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from feedapi_client.spark.ingest.identity import Identity
from feedapi_client.spark.ingest.job import IngestError
from feedapi_client.spark.ingest.tables import (
    PROPERTY,
    USER_METADATA,
    CatalogTable,
    column,
    identified,
    quoted,
    transaction,
)

ORDER = ("depth", "sequence", "partition")
"""The columns that the order of an entity's events comes from. The partition makes the latest one
the same in every attempt, even where a key is not what the feed is partitioned by."""
_NEW = "_feedapi_new_"
_DELETED = "_feedapi_deleted"


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


class GoldTable(CatalogTable):
    """One table, of one query. A repeated micro-batch changes nothing.

    Events at or before the one that an entity's row comes from are ignored.
    """

    def _check_place(self, properties: Mapping[str, str], who: Identity) -> None:
        """Raise where another query wrote here, of whatever feed, that this one does not follow."""
        super()._check_place(properties, who)
        others = [name for name in properties if name.startswith(PROPERTY)]
        if others and not who.run and f"{PROPERTY}{who.query}" not in others:
            raise IngestError(
                f"{self.name} holds the latest state from another query: the order of its events "
                "and of this query's can't be compared. Give the checkpoint of that query, or "
                f"another table. If the table was emptied, ALTER TABLE {self.name} UNSET "
                f"TBLPROPERTIES ('{others[0]}')"
            )

    def merge(self, rows: DataFrame, who: Identity, number: int) -> None:
        """Bring the table up to date with a micro-batch of `output`."""
        named = identified(rows, who, number)
        spark = named.sparkSession
        self.prepare(spark, named.schema, who)
        newest = _newest(named, self.job.key, who.prefix)
        delete_when = self.job.delete_when
        deleted = F.lit(False) if delete_when is None else _deleted(delete_when)
        source = newest.withColumn(_DELETED, deleted).withColumnsRenamed(
            {name: f"{_NEW}{name}" for name in newest.columns}
        )
        with _settings(spark, who, number):
            self.commit(spark, who, lambda: self._merge(source, newest.columns, who))

    def _merge(self, source: DataFrame, columns: Sequence[str], who: Identity) -> None:
        # As in `latest`, NULL is a key, too: a transform may make it.
        same = [column(name).eqNullSafe(column(f"{_NEW}{name}")) for name in self.job.key]
        newer = _later(who.column("depth"), who.column("sequence"))
        values = {quoted(name): column(f"{_NEW}{name}") for name in columns}
        deleted = F.col(_DELETED)
        merge = source.mergeInto(self.name, reduce(Column.__and__, same))
        merge = merge.whenMatched(newer & deleted).delete()
        merge = merge.whenMatched(newer).update(values)
        merge.whenNotMatched(~deleted).insert(values).merge()


@contextmanager
def _settings(spark: SparkSession, who: Identity, number: int) -> Iterator[None]:
    """Give Delta's MERGE options of a writer, which it takes from the session only.

    Each streaming query writes its micro-batches in a session of its own.
    """
    options = transaction(spark, who, number)
    names = {USER_METADATA: options.pop("userMetadata")}
    names |= {f"spark.databricks.delta.write.{name}": value for name, value in options.items()}
    before: dict[str, str | None] = {name: spark.conf.get(name, None) for name in names}
    for name, value in names.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


def _later(depth: str, sequence: str) -> Column:
    new_depth, new_sequence = column(f"{_NEW}{depth}"), column(f"{_NEW}{sequence}")
    return (new_depth > column(depth)) | (
        (new_depth == column(depth)) & (new_sequence > column(sequence))
    )
