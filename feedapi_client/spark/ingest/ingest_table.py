"""Whose rows a table holds: feed, streaming query and micro-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StructType

from feedapi_client.spark.ingest.job import Ingest, IngestError, as_url


@dataclass(frozen=True)
class Identity:
    """What a query writes beside each row.

    Arguments:
        feed: name of the feed.
        query: id of the streaming query, kept in its checkpoint. None before its first start.
        last_batch: the last micro-batch that was committed, -1 before the first.
        last_offset: the last micro-batch that was begun, -1 before the first.
        run: that a query began with which goes on where the tables end; None for others. The tables
            know it before they are read, when there is no query yet.
        prefix: of the columns' names.
    """

    feed: str
    query: str | None
    last_batch: int = -1
    last_offset: int = -1
    run: str | None = None
    prefix: str = ""

    def column(self, name: str) -> str:
        return f"{self.prefix}{name}"


class Table(ABC):
    """A table of a pipeline, `role` in the job, and whether a query may write to it."""

    noted = False
    """Whether the checkpoint has a note of its tables."""
    _prepared: StructType | None = None

    def __init__(self, job: Ingest, role: str = "output") -> None:
        self.job = job
        self.role = role
        self.name = str(getattr(job, role)).rstrip("/")
        self.partition_by = list(job.partition_by) if role == "output" else []

    @abstractmethod
    def owners(self, spark: SparkSession, who: Identity) -> dict[str, int]:
        """Return the queries that owned the feed's rows, with rising numbers: the last one does.

        Or the run that goes on where the table ended, before it has a query.
        """

    @abstractmethod
    def prepare(self, rows: DataFrame, who: Identity, number: int) -> None:
        """Become the owner of the feed's rows, before any table is written.

        Raises `IngestError` where the query must not write, also where it would in vain.
        """

    def place(self, spark: SparkSession) -> str:  # noqa: ARG002
        return as_url(self.name)

    @abstractmethod
    def _exists(self, spark: SparkSession) -> bool: ...

    @abstractmethod
    def _add_owner(self, spark: SparkSession, who: Identity, name: str) -> None: ...

    @abstractmethod
    def _compare(self, spark: SparkSession, schema: StructType | None, who: Identity) -> None:
        """Raise `IngestError` when these are not columns of the table. None: not known yet."""

    @abstractmethod
    def _holds_rows(self, spark: SparkSession, who: Identity) -> bool: ...

    @abstractmethod
    def _last_batch(self, spark: SparkSession, who: Identity, after: int) -> int:
        """Return the last micro-batch after one that the query's rows are of, -1 without one."""

    def check(self, spark: SparkSession, who: Identity, schema: StructType | None) -> None:
        self._compare(spark, schema, who)
        owners = self.owners(spark, who)
        if who.query is not None and who.query not in owners:
            self.check_missing(who)
        self.is_owner(owners, who)
        if who.query in owners:
            self.check_old_checkpoint(who, self._last_batch(spark, who, after=who.last_offset))
        elif not self.may_add(who) and self._holds_rows(spark, who):
            self.refuse_new_query(who)  # a copy of a table does not know its queries

    def own(self, spark: SparkSession, who: Identity) -> None:
        while not self.is_owner(self.owners(spark, who), who):
            self._add_owner(spark, who, str(who.query))

    def take_over(self, spark: SparkSession, who: Identity) -> None:
        """Let a run go on where the table ends: the feed's queries before it write nothing more.

        May be called where there is no table yet.
        """
        while self._exists(spark) and who.run not in self.owners(spark, who):
            self._add_owner(spark, who, str(who.run))

    def is_owner(self, owners: Mapping[str, int], who: Identity) -> bool:
        """Whether the query is the owner. Raises `IngestError` where it can't become it."""
        *earlier, last = owners or [None]
        if last is None or last in (who.query, who.run):
            return last == who.query
        followed = who.query in earlier or who.run in earlier
        if followed or not self.may_add(who):
            refuse = self.refuse_old_query if followed else self.refuse_new_query
            refuse(who, last)
        return False

    def may_add(self, who: Identity) -> bool:
        return self.job.append or who.run is not None

    def refuse_new_query(self, who: Identity, writer: str = "") -> None:
        """Raise: so look a lost checkpoint, and a checkpoint and staging that moved."""
        what = f"is written by query {writer}" if writer else "holds batches"
        raise IngestError(
            f"{self.name} {what} of feed {who.feed}, and the checkpoint is not the one that it was "
            "written with: all events would be written again. Give the old checkpoint and "
            "staging, or another output; --append adds to the table what this query reads. Another "
            "feed of this address, such as one with another query in its URL, needs a name: --feed"
        )

    def refuse_old_query(self, who: Identity, writer: str) -> None:
        raise IngestError(
            f"run {writer} goes on in {self.name} where query {who.query} ended "
            "(--resume-from-table, --append): events would be written twice. Run it with the "
            "checkpoint of that run"
        )

    def check_missing(self, who: Identity) -> None:
        """Raise where earlier micro-batches went to another table, but not by a transform."""
        transformed = self.job.transform is not None and self.role in ("output", "gold")
        if who.last_batch < 0 or (transformed and self.noted):
            return
        raise IngestError(
            f"{self.name} was never written by the checkpoint's query, which committed "
            f"{who.last_batch + 1} batches: their events would be missing. Give the table that "
            "they are in, or start over with another checkpoint and staging"
        )

    def check_old_checkpoint(self, who: Identity, last: int) -> None:
        if last <= who.last_offset:
            return
        raise IngestError(
            f"the checkpoint is older than {self.name}: it {_ends(who.last_offset)}, and the table "
            f"holds micro-batch {last} of the same query {who.query}. Was a backup restored, or "
            "offsets/ lost? Events would be written twice. Give the newest checkpoint; or give a "
            "new one, with --resume-from-table, which goes on where the table ends"
        )

    def check_ahead(self, who: Identity, number: int, last: int) -> None:
        if last > number:
            raise IngestError(
                f"{self.name} holds micro-batch {last} of query {who.query}, and this run is at "
                f"{number}: another run goes on with its checkpoint, or with a copy of it. This "
                "one stops without writing"
            )

    def check_types(
        self,
        before: Mapping[str, str],
        schema: StructType | None,
        fold: Callable[[str], str],
        problem: str,
    ) -> None:
        for field in schema or ():
            old, new = before.get(fold(field.name)), field.dataType.simpleString()
            if old not in (None, new):
                raise IngestError(f"{self.name}: {problem.format(field.name, old, new)}")


def identified(rows: DataFrame, who: Identity, number: int) -> DataFrame:
    """Return the rows with the columns that a micro-batch is found by.

    They come first: Delta keeps statistics of the first 32 columns only, and without them each
    micro-batch would look into every file.
    """
    return rows.select(
        F.lit(who.feed).alias(who.column("feed")),
        F.lit(who.query).cast("string").alias(who.column("query")),
        F.lit(number).cast("long").alias(who.column("batch")),
        F.col("*"),
    )


def _ends(last: int) -> str:
    return f"ends with micro-batch {last}" if last >= 0 else "holds none"
