"""Whose rows a table holds: feed, streaming query and micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from feedapi_client.spark.ingest.job import IngestError


@dataclass(frozen=True)
class Identity:
    """What a query writes beside each row.

    Arguments:
        feed: name of the feed.
        query: id of the streaming query, kept in its checkpoint. None before its first start.
        last_batch: the last micro-batch that was committed, -1 before the first.
        prefix: of the columns' names.
    """

    feed: str
    query: str | None
    last_batch: int = -1
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


def check_missing(table: str, last_batch: int) -> None:
    """Raise: earlier micro-batches went to another table."""
    raise IngestError(
        f"{table} was never written by the checkpoint's query, which committed {last_batch + 1} "
        "batches: their events would be missing. Give the table that they are in, or start over "
        "with another checkpoint and staging"
    )


def check_other_feed(table: str, feed: str, query: str) -> None:
    """Raise: the checkpoint belongs to another feed."""
    raise IngestError(
        f"the checkpoint's query {query} wrote another feed than {feed} to {table}: give the "
        "feed's own checkpoint. If the feed moved to another URL, keep its name with --feed"
    )
