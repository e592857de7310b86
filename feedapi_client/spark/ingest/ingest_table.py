"""Whose rows a table holds: feed, streaming query and micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from feedapi_client.spark.ingest.job import Ingest, IngestError
from feedapi_client.spark.ingest.names import Fold

_DELETED = "If nothing that it wrote is left"


@dataclass(frozen=True)
class Identity:
    """What a query writes beside each row.

    Arguments:
        feed: name of the feed.
        query: id of the streaming query, kept in its checkpoint. None before its first start.
        last_batch: the last micro-batch that was committed, -1 before the first.
        last_offset: the last micro-batch that was begun, -1 before the first.
        epoch: of the run, which rises from one to the next. 0 where it is not the query that runs.
        run: that a query began with which goes on where the tables end; None for others. The tables
            know it before they are read, when there is no query yet.
        prefix: of the columns' names.
    """

    feed: str
    query: str | None
    last_batch: int = -1
    last_offset: int = -1
    epoch: int = 0
    run: str | None = None
    prefix: str = ""

    def column(self, name: str) -> str:
        """Return the name of one of the columns in the table."""
        return f"{self.prefix}{name}"


class Table:
    """A table of a pipeline, and whether a query may write to it.

    Arguments:
        role: which of the job's tables it is, one of `names.TABLES`.
        optional: whether the table may lack batches of its query, which a transform writes.
    """

    def __init__(self, job: Ingest, role: str = "output", *, optional: bool = False) -> None:
        self.job = job
        self.role = role
        self.name = str(getattr(job, role)).rstrip("/")
        """Of the table, or its folder."""
        self.partition_by = list(job.partition_by) if role == "output" else []
        self.optional = optional

    def may_add(self, who: Identity) -> bool:
        """Whether a new query may add to what the table holds of its feed."""
        return self.job.append or who.run is not None

    def refuse_new_query(self, who: Identity, writer: str = "", undo: str = "") -> None:
        """Raise: a new query would write events again that the table holds, or that come.

        It is what a lost checkpoint, or a checkpoint and staging that moved, look like.

        Arguments:
            writer: the query that began to write them, which may have written nothing yet.
            undo: what makes the table forget it.
        """
        what = f"is written by query {writer}" if writer else "holds batches"
        raise IngestError(
            f"{self.name} {what} of feed {who.feed}, and the checkpoint is not the one that it was "
            "written with: all events would be written again. Give the old checkpoint and "
            "staging, or another output; --append adds to the table what this query reads"
            + (f". {_DELETED}, {undo}" if writer else "")
        )

    def refuse_old_query(self, who: Identity, writer: str, undo: str) -> None:
        """Raise: another run went on where this query ended."""
        raise IngestError(
            f"run {writer} goes on in {self.name} where query {who.query} ended "
            "(--resume-from-table): events would be written twice. Run it with the checkpoint of "
            f"that run. {_DELETED}, {undo}"
        )

    def check_missing(self, who: Identity, hint: str = "") -> None:
        """Raise where earlier micro-batches went to another table; `hint` tells more about it."""
        if who.last_batch < 0 or self.optional:
            return
        raise IngestError(
            f"{self.name} was never written by the checkpoint's query, which committed "
            f"{who.last_batch + 1} batches: their events would be missing. Give the table that "
            f"they are in, or start over with another checkpoint and staging{hint}"
        )

    def refuse_other_feed(self, who: Identity) -> None:
        """Raise: the checkpoint belongs to another feed."""
        raise IngestError(
            f"the checkpoint's query {who.query} wrote another feed than {who.feed} to "
            f"{self.name}: give the feed's own checkpoint. If the feed moved to another URL, keep "
            "its name with --feed"
        )

    def check_old_checkpoint(self, who: Identity, last: int) -> None:
        """Raise when the table holds micro-batches that the checkpoint does not know.

        Arguments:
            last: the last micro-batch of the query in the table, -1 when it holds none.
        """
        if last <= who.last_offset:
            return
        raise IngestError(
            f"the checkpoint is older than {self.name}: it {_ends(who.last_offset)}, and the table "
            f"holds micro-batch {last} of the same query {who.query}. Was a backup restored, or "
            "offsets/ lost? Events would be written twice. Give the newest checkpoint; or give a "
            "new one, with --resume-from-table, which goes on where the table ends"
        )

    def check_types(
        self, before: Mapping[str, str], schema: StructType | None, fold: Fold, problem: str
    ) -> None:
        """Raise when a column would change its type.

        Arguments:
            before: types by the folded names of columns.
            schema: columns to be written; None when only a transform decides.
            problem: names column, type before, and type now, and says what to do.
        """
        for field in schema or ():
            old, new = before.get(fold(field.name)), field.dataType.simpleString()
            if old not in (None, new):
                raise IngestError(f"{self.name}: {problem.format(field.name, old, new)}")


def _ends(last: int) -> str:
    return f"ends with micro-batch {last}" if last >= 0 else "holds none"


def forgotten(spark: SparkSession) -> str:
    """Return what to say where the catalog forgets its tables with the session; else nothing."""
    if spark.conf.get("spark.sql.catalogImplementation", "in-memory") != "in-memory":
        return ""
    return (
        ". The catalog of this session is in memory, and forgets schemas and tables when the "
        "process ends: give one that lasts, such as --conf spark.sql.catalogImplementation=hive"
    )
