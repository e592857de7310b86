"""The statements on the table of what is done ahead of the cursor, as scripts of a transaction.

One row for each event, and one for the claim of each partition, whose `event_id` is empty. See
`feedapi_client.stores.done`.
"""

# ruff: noqa: S608 - the statements are made of constants and of quoted names

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import TypeVar

from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import check_predecessor
from feedapi_client.stores.done import (
    DoneEvent,
    already_done,
    check_done_format,
    claimed_anew,
)
from feedapi_client.stores.scripts import Query, Script

Named = TypeVar("Named", int, str)

TABLE = "feedapi_cursors_done"
_NAMED_PER_STATEMENT = 500
_CLAIM_BITS = 62
_CASTS = {
    "feed": "char(64)",
    "partition": "integer",
    "claim": "bigint",
    "id": "text",
    "ids": "text[]",
}


def in_parts(named: Iterable[Named]) -> Iterator[list[Named]]:
    """Yield as many identities, or partitions, at a time as one statement names."""
    ordered = sorted(named)
    for start in range(0, len(ordered), _NAMED_PER_STATEMENT):
        yield ordered[start : start + _NAMED_PER_STATEMENT]


def new_claim() -> int:
    """Return a number that no claim had before, whatever was deleted meanwhile."""
    return secrets.randbits(_CLAIM_BITS) + 1


class DoneScripts:
    """Makes the scripts of a store. Each has to run within one transaction.

    Arguments:
        table, cursors: the tables of done events and of positions, quoted.
        postgres: write parameters as `$1`, insert by ON CONFLICT, and hold claims by FOR SHARE.
        lock, share: end a SELECT of rows to be changed, and of rows that nobody else may change.
    """

    def __init__(
        self, table: str, cursors: str, *, postgres: bool = False, lock: str = "", share: str = ""
    ) -> None:
        self._postgres = postgres
        self.create = f"""
            CREATE TABLE IF NOT EXISTS {table} (
                feed_id CHAR(64) NOT NULL,
                partition_id INTEGER NOT NULL,
                event_id VARCHAR(64) NOT NULL,
                claim BIGINT NOT NULL,
                PRIMARY KEY (feed_id, partition_id, event_id)
            )"""
        its = "feed_id = {feed} AND partition_id = {partition}"
        claim = f"SELECT claim FROM {table} WHERE {its} AND event_id = ''"
        self._claim = self._sql(claim + lock)
        self._hold = self._sql(claim + share)
        self._update = self._sql(
            f"UPDATE {table} SET claim = {{claim}} WHERE {its} AND event_id = ''"
        )
        insert = f"INSERT INTO {table} (feed_id, partition_id, event_id, claim)"
        self._insert = self._sql(f"{insert} VALUES ({{feed}}, {{partition}}, {{id}}, {{claim}})")
        self._load = self._sql(f"SELECT event_id FROM {table} WHERE {its} AND event_id <> ''")
        self._revision = self._sql(f"SELECT revision FROM {cursors} WHERE {its}")
        self._find = self._sql(f"SELECT 1 FROM {table} WHERE {its} AND event_id = {{id}}")
        self._add = self._sql(
            f"""WITH held AS ({claim} AND claim = {{claim}}{share})
            {insert} SELECT {{feed}}, {{partition}}, {{id}}, claim FROM held
            ON CONFLICT DO NOTHING RETURNING event_id"""
        )
        self._forget = self._sql(f"DELETE FROM {table} WHERE {its} AND event_id")
        self._forget_all = self._sql(f"DELETE FROM {table} WHERE {its} AND event_id = ANY({{ids}})")
        self._move = self._sql(f"UPDATE {table} SET feed_id = {{feed}} WHERE feed_id = {{feed}}")
        self._delete = self._sql(f"DELETE FROM {table} WHERE feed_id = {{feed}}")

    def _sql(self, template: str) -> str:
        """Return the statement with the database's placeholders."""
        numbers = count(1)

        def placeholder(found: re.Match[str]) -> str:
            return f"${next(numbers)}::{_CASTS[found[1]]}" if self._postgres else "?"

        return re.sub(r"\{(\w+)\}", placeholder, template)

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
        expected = Position("", revision=revision + 1)
        check_predecessor(feed, partition, expected, rows[0][0] if rows else None)

    def done(self, feed: FeedKey, event: DoneEvent) -> Script[None]:
        """Remember that the event is done, in the transaction that has its effects.

        Raises:
            FencedError, AlreadyDoneError: it is not accepted. Nothing was changed.
        """
        partition, claim, id = event
        if self._postgres:
            row = (feed.id, partition, claim, feed.id, partition, id)
            if (yield Query(self._add, row)):
                return
        held = yield Query(self._hold, (feed.id, partition))
        if not held or held[0][0] != claim:
            raise claimed_anew(feed, partition)
        if self._postgres or (yield Query(self._find, (feed.id, partition, id))):
            raise already_done(feed, partition)
        yield Query(self._insert, (feed.id, partition, id, claim))

    def is_done(self, feed: FeedKey, event: DoneEvent) -> Script[bool]:
        """Return whether the event is remembered."""
        return bool((yield Query(self._find, (feed.id, event.partition, event.id))))

    def forget(self, feed: FeedKey, passed: Mapping[int, Collection[str]]) -> Script[None]:
        """Forget what the saved cursors have passed."""
        for partition, ids in sorted(passed.items()):
            if self._postgres:
                yield Query(self._forget_all, (feed.id, partition, sorted(ids)))
                continue
            for some in in_parts(ids):
                marks = ", ".join("?" * len(some))
                yield Query(f"{self._forget} IN ({marks})", (feed.id, partition, *some))

    def delete(self, feed: FeedKey, partitions: Collection[int] | None) -> Script[None]:
        """Forget all that is done and claimed in these partitions, or in all."""
        if partitions is None:
            yield Query(self._delete, (feed.id,))
        else:
            for some in in_parts(partitions):
                listed = ", ".join(map(str, map(int, some)))
                yield Query(f"{self._delete} AND partition_id IN ({listed})", (feed.id,))

    def move(self, old: FeedKey, new: FeedKey) -> Script[None]:
        """Let what is done under one key be done under another."""
        yield Query(self._delete, (new.id,))
        yield Query(self._move, (new.id, old.id))
