"""What is done ahead of the cursor, remembered in the cursor's store: `run_by_key(event_id=...)`.

Three facts make that exact:

- **A claim.** Whoever reads a partition first replaces the number of its claim, which a transaction
  that has done an event holds until it ends. So after a new claim nothing more is done under the
  old one, and what was done under it can be read completely.
- **The revision.** A claim is refused where the stored position is not the one that is read from:
  what was done behind that may be forgotten already.
- **The ancestors.** Where cursors are transferred, the successor's claim claims the ancestors, too.

Stored are digests, never an identity itself.
"""

# ruff: noqa: S608 - the statements are made of constants and of quoted names

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable
from uuid import UUID

from feedapi_client.errors import AlreadyDoneError, FencedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import CursorStore, check_replaces
from feedapi_client.stores.scripts import (
    DIALECTS,
    Query,
    Script,
    feed_condition,
    in_parts,
    listed,
    typed,
)

DONE_FORMAT = "1:"
"""What every remembered identity begins with: the version of how they are made."""
_DIGEST_BYTES = 20
_CLAIM_BITS = 62

EventId = str | bytes | int | UUID


class Claim(NamedTuple):
    """The right to do events of a partition.

    Attributes:
        number: identifies the claim.
        done: what is done ahead of the stored cursor, each with the partition it was done in.
    """

    number: int
    done: dict[str, int]


class DoneEvent(NamedTuple):
    """An event that is done.

    Attributes:
        partition: that it was read from.
        claim: the number under which it was read.
        id: what `stored_id` returns.
    """

    partition: int
    claim: int
    id: str


@runtime_checkable
class DoneStore(CursorStore, Protocol):
    """A store that remembers what is done ahead of the cursor."""

    async def take_over(self, feed: FeedKey, partitions: Sequence[int], revision: int) -> Claim:
        """Claim the first of the partitions, and with it the ancestors that follow.

        Waits until no transaction that has done an event of them is open any more.

        Arguments:
            partitions: the one that is to be read, and the ancestors of its cursor.
            revision: of the position that is read from; 0 where none is stored.

        Raises:
            FencedError: another revision is stored.
        """
        ...

    async def done(self, feed: FeedKey, event: DoneEvent, *, transaction: Any = None) -> None:
        """Remember that the event is done.

        With `transaction` as a part of the caller's transaction, as `CursorStore.save`.

        Raises:
            FencedError: the partition was claimed anew.
            AlreadyDoneError: the event is remembered already.
        """
        ...

    async def is_done(self, feed: FeedKey, event: DoneEvent) -> bool:
        """Return whether the event is remembered, by a transaction that was committed."""
        ...

    async def save_passing(
        self,
        feed: FeedKey,
        positions: Mapping[int, Position],
        passed: Mapping[int, Collection[str]],
        *,
        transaction: Any = None,
    ) -> None:
        """Do as `CursorStore.save`, and forget what the cursors have passed: both or none."""
        ...


def stored_id(value: object) -> str:
    """Raise TypeError or ValueError for what is no identity."""
    match value:
        case bool():
            raise _no_id(value)
        case str():
            kind, content = b"s", value.encode("utf-8", "surrogatepass")
        case bytes():
            kind, content = b"b", value
        case int():
            kind, content = b"i", str(value).encode()
        case UUID():
            kind, content = b"u", value.bytes
        case _:
            raise _no_id(value)
    if not content:
        raise ValueError("event_id returned an empty identity")
    return DONE_FORMAT + hashlib.blake2b(kind + content, digest_size=_DIGEST_BYTES).hexdigest()


def _no_id(value: object) -> TypeError:
    return TypeError(
        f"event_id returns a str, bytes, int or UUID that no other event of the feed has, "
        f"not {type(value).__name__}"
    )


def claimed_anew(feed: FeedKey, partition: int) -> FencedError:
    return FencedError(
        f"another consumer named {feed.name!r} reads this partition now: what is done here does "
        "not count any more, and its transaction has to be rolled back",
        feed=feed.url,
        partition=partition,
    )


def already_done(feed: FeedKey, partition: int) -> AlreadyDoneError:
    return AlreadyDoneError(
        "the event is done already: roll the transaction back, and let this error through",
        feed=feed.url,
        partition=partition,
    )


class DoneScripts:
    """A row for each event, and one for the claim of each partition, whose `event_id` is empty."""

    def __init__(self, dialect: str, table: str, cursors: str) -> None:
        kind = DIALECTS[dialect]
        self._adds = kind.ends
        self._write_nothing = "" if kind.lock else f"DELETE FROM {table} WHERE 1 = 0"
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
        """When it was committed, what was done under the claims before is complete."""
        yield from self._lock_file()
        yield from self._check_revision(feed, partitions[0], revision)
        number = secrets.randbits(_CLAIM_BITS) + 1  # that no claim had, whatever was deleted
        for partition in sorted(set(partitions)):
            if (yield Query(self._claim, (feed.id, partition))):
                yield Query(self._update, (number, feed.id, partition))
            else:
                yield Query(self._insert, (feed.id, partition, "", number))
        return number

    def load(
        self, feed: FeedKey, partitions: Sequence[int], revision: int
    ) -> Script[dict[str, int]]:
        """A transaction of its own, after the one of `claim`."""
        done: dict[str, int] = {}
        for partition in dict.fromkeys(partitions):
            for row in (yield Query(self._load, (feed.id, partition))):
                done.setdefault(row[0], partition)
        if not all(id.startswith(DONE_FORMAT) for id in done):
            raise StoreError(
                "what is done ahead of the cursor was stored in another format: "
                "was it saved by a newer version?",
                feed=feed.url,
            )
        # After the rows: as long as this revision was stored, none of them was forgotten.
        yield from self._check_revision(feed, partitions[0], revision)
        return done

    def _check_revision(self, feed: FeedKey, partition: int, revision: int) -> Script[None]:
        rows = yield Query(self._revision, (feed.id, partition))
        check_replaces(feed, partition, revision or None, rows[0][0] if rows else None)

    def done(self, feed: FeedKey, event: DoneEvent) -> Script[None]:
        partition, claim, id = event
        yield from self._lock_file()
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

    def _lock_file(self) -> Script[None]:
        """See `PositionScripts._lock_file`."""
        if self._write_nothing:
            yield Query(self._write_nothing)

    def is_done(self, feed: FeedKey, event: DoneEvent) -> Script[bool]:
        return bool((yield Query(self._find, (feed.id, event.partition, event.id))))

    def forget(self, feed: FeedKey, passed: Mapping[int, Collection[str]]) -> Script[None]:
        for partition, ids in sorted(passed.items()):
            for some in in_parts(ids):
                marks = ", ".join([self._id] * len(some))
                yield Query(f"{self._forget} IN ({marks})", (feed.id, partition, *some))

    def delete(self, feed: FeedKey, partitions: Collection[int] | None) -> Script[None]:
        if partitions is None:
            yield Query(self._delete, (feed.id,))
        else:
            for some in in_parts(partitions):
                named = f"{self._delete} AND partition_id IN ({listed(some)})"
                yield Query(named, (feed.id,))

    def move(self, old: FeedKey, new: FeedKey) -> Script[None]:
        yield Query(self._delete, (new.id,))
        yield Query(self._move, (new.id, old.id))
