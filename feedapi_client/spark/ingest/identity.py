"""Whose rows a table holds: feed, streaming query and micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import SparkSession

from feedapi_client.spark.ingest.job import IngestError


@dataclass(frozen=True)
class Identity:
    """What a query writes beside each row.

    Arguments:
        feed: name of the feed.
        query: id of the streaming query, kept in its checkpoint. None before its first start.
        last_batch: the last micro-batch that was committed, -1 before the first.
        last_offset: the last micro-batch that was begun, -1 before the first.
        epoch: of the run, which rises from one to the next.
        resumed: whether the query goes on where the tables end.
        prefix: of the columns' names.
    """

    feed: str
    query: str | None
    last_batch: int = -1
    last_offset: int = -1
    epoch: int = 0
    resumed: bool = False
    prefix: str = ""

    def column(self, name: str) -> str:
        """Return the name of one of the columns in the table."""
        return f"{self.prefix}{name}"


def check_new_query(table: str, feed: str) -> None:
    """Raise: a new query would write events again that the table holds.

    It is what a lost checkpoint, or a checkpoint and staging that moved, look like.
    """
    raise IngestError(
        f"{table} holds batches of feed {feed}, but the checkpoint is not the one that they were "
        "written with: all events would be written again. Give the old checkpoint and staging, or "
        "another output; --append adds to the table what this query reads"
    )


def check_missing(table: str, last_batch: int, hint: str = "") -> None:
    """Raise: earlier micro-batches went to another table. `hint` says more about the cause."""
    raise IngestError(
        f"{table} was never written by the checkpoint's query, which committed {last_batch + 1} "
        "batches: their events would be missing. Give the table that they are in, or start over "
        f"with another checkpoint and staging{hint}"
    )


def check_other_feed(table: str, feed: str, query: str) -> None:
    """Raise: the checkpoint belongs to another feed."""
    raise IngestError(
        f"the checkpoint's query {query} wrote another feed than {feed} to {table}: give the "
        "feed's own checkpoint. If the feed moved to another URL, keep its name with --feed"
    )


def check_old_checkpoint(table: str, who: Identity, last: int) -> None:
    """Raise when the table holds micro-batches that the checkpoint does not know.

    Arguments:
        last: the last micro-batch of the query in the table, -1 when it holds none.
    """
    if last <= who.last_offset:
        return
    known = f"ends with micro-batch {who.last_offset}" if who.last_offset >= 0 else "holds none"
    raise IngestError(
        f"the checkpoint is older than {table}: it {known}, and the table holds micro-batch {last} "
        f"of the same query {who.query}. Was a backup restored, or offsets/ lost? Events would be "
        "written twice. Give the newest checkpoint; or give a new one, with --resume-from-table, "
        "which goes on where the table ends"
    )


def forgotten(spark: SparkSession) -> str:
    """Return what to say where the catalog forgets its tables with the session; else nothing."""
    if spark.conf.get("spark.sql.catalogImplementation", "in-memory") != "in-memory":
        return ""
    return (
        ". The catalog of this session is in memory, and forgets schemas and tables when the "
        "process ends: give one that lasts, such as --conf spark.sql.catalogImplementation=hive"
    )
