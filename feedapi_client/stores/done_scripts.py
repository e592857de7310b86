"""The statements on the table of what is done ahead of the cursor, as scripts of a transaction.

One row for each event, and one for the claim of each partition, whose `event_id` is empty. See
`feedapi_client.stores.done`.
"""

# ruff: noqa: S608 - the statements are made of constants and of quoted names

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence

from feedapi_client.model import FeedKey
from feedapi_client.stores.base import check_replaces
from feedapi_client.stores.done import (
    DoneEvent,
    already_done,
    check_done_format,
    claimed_anew,
)
from feedapi_client.stores.scripts import Query, Script, in_parts
from feedapi_client.stores.sql_dialects import DIALECTS, feed_condition, listed, typed

_CLAIM_BITS = 62


def new_claim() -> int:
    """Return a number that no claim had before, whatever was deleted meanwhile."""
    return secrets.randbits(_CLAIM_BITS) + 1


class DoneScripts:
    """Makes the scripts of a store. Each has to run within one transaction.

    Arguments:
        dialect: the kind of database, by SQLAlchemy's name.
        table, cursors: the tables of done events and of positions, quoted.
    """

    def __init__(self, dialect: str, table: str, cursors: str) -> None:
        kind = DIALECTS[dialect]
        self._adds = kind.ends
        self._feed = feed_condition(dialect)
        self._id = id = typed(dialect, "VARCHAR(64)")
        its = f"{self._feed} AND partition_id = ?"
        claim = f"WHERE {its} AND event_id = ''"
        select = f"SELECT claim FROM {table}"
        self._claim = f"{select} {claim}{kind.lock}"
        self._hold = f"{select} {claim}{kind.share}"
        self._update = f"UPDATE {table} SET claim = ? {claim}"
        insert = f"INSERT INTO {table} (feed_id, partition_id, event_id, claim)"
        self._insert = f"{insert} VALUES (?, ?, ?, ?)"
        self._load = f"SELECT event_id FROM {table} WHERE {its} AND event_id <> ''"
        self._revision = f"SELECT revision FROM {cursors} WHERE {its}"
        self._find = f"SELECT 1 FROM {table} WHERE {its} AND event_id = {id}"
        feed, partition = typed(dialect, "CHAR(64)"), typed(dialect, "INTEGER")
        self._add = f"""WITH held AS ({select} {claim} AND claim = ?{kind.share})
            {insert} SELECT {feed}, {partition}, {id}, claim FROM held
            ON CONFLICT DO NOTHING RETURNING event_id"""
        self._forget = f"DELETE FROM {table} WHERE {its} AND event_id"
        self._move = f"UPDATE {table} SET feed_id = ? WHERE {self._feed}"
        self._delete = f"DELETE FROM {table} WHERE {self._feed}"

    def claim(self, feed: FeedKey, partitions: Sequence[int], revision: int) -> Script[int]:
        """Claim the partitions, and return the number. A transaction of its own.

        What was done under the claims before is complete when it was committed.

        Raises:
            FencedError: the first partition has another revision.
        """
        yield from self._check_revision(feed, partitions[0], revision)
        number = new_claim()
        for partition in sorted(set(partitions)):
            if (yield Query(self._claim, (feed.id, partition))):
                yield Query(self._update, (number, feed.id, partition))
            else:
                yield Query(self._insert, (feed.id, partition, "", number))
        return number

    def load(
        self, feed: FeedKey, partitions: Sequence[int], revision: int
    ) -> Script[dict[str, int]]:
        """Return what is done. A transaction of its own, after the one of `claim`.

        Raises:
            FencedError: the first partition has another revision.
        """
        done: dict[str, int] = {}
        for partition in dict.fromkeys(partitions):
            for row in (yield Query(self._load, (feed.id, partition))):
                done.setdefault(row[0], partition)
        check_done_format(feed, done)
        # After the rows: as long as this revision was stored, none of them was forgotten.
        yield from self._check_revision(feed, partitions[0], revision)
        return done

    def _check_revision(self, feed: FeedKey, partition: int, revision: int) -> Script[None]:
        rows = yield Query(self._revision, (feed.id, partition))
        check_replaces(feed, partition, revision or None, rows[0][0] if rows else None)

    def done(self, feed: FeedKey, event: DoneEvent) -> Script[None]:
        """Remember that the event is done, in the transaction that has its effects.

        Raises:
            FencedError, AlreadyDoneError: it is not accepted. Nothing was changed.
        """
        partition, claim, id = event
        if self._adds:  # for an error of a statement PostgreSQL would end the transaction
            row = (feed.id, partition, claim, feed.id, partition, id)
            if (yield Query(self._add, row)):
                return
        held = yield Query(self._hold, (feed.id, partition))
        if not held or held[0][0] != claim:
            raise claimed_anew(feed, partition)
        if self._adds or (yield Query(self._find, (feed.id, partition, id))):
            raise already_done(feed, partition)
        yield Query(self._insert, (feed.id, partition, id, claim))

    def is_done(self, feed: FeedKey, event: DoneEvent) -> Script[bool]:
        """Return whether the event is remembered."""
        return bool((yield Query(self._find, (feed.id, event.partition, event.id))))

    def forget(self, feed: FeedKey, passed: Mapping[int, Collection[str]]) -> Script[None]:
        """Forget what the saved cursors have passed."""
        for partition, ids in sorted(passed.items()):
            for some in in_parts(ids):
                marks = ", ".join([self._id] * len(some))
                yield Query(f"{self._forget} IN ({marks})", (feed.id, partition, *some))

    def delete(self, feed: FeedKey, partitions: Collection[int] | None) -> Script[None]:
        """Forget all that is done and claimed in these partitions, or in all."""
        if partitions is None:
            yield Query(self._delete, (feed.id,))
        else:
            for some in in_parts(partitions):
                named = f"{self._delete} AND partition_id IN ({listed(some)})"
                yield Query(named, (feed.id,))

    def move(self, old: FeedKey, new: FeedKey) -> Script[None]:
        """Let what is done under one key be done under another."""
        yield Query(self._delete, (new.id,))
        yield Query(self._move, (new.id, old.id))
