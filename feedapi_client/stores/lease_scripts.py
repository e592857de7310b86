"""Leases in a SQL database, beside the cursors, as scripts.

All times are those of the database, in microseconds since 1970 UTC.

One paused process never stops the others. Each statement commits itself, so that an instance that
is paused between two of them holds no lock; in SQLite, which has one writer at a time, a script is
one transaction. Statements change rows by their keys, in their order, and pass by rows that another
transaction holds; where a database can't, they wait for a part of a lease and no longer.
"""

# ruff: noqa: S608 - the statements are made of constants, numbers and quoted names

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey
from feedapi_client.stores.leases import Instance, Lease, first_change
from feedapi_client.stores.scripts import CountedChange, Query, Script, in_parts
from feedapi_client.stores.sql_dialects import (
    CLOCKS,
    SKIPS_LOCKED,
    feed_condition,
    is_lock_timeout,
    listed,
    milliseconds,
)

_SECOND = 1_000_000
_KEPT_SECONDS = 3600
"""Dead instances are deleted from the table after this time."""


class LeaseScripts:
    """Makes the scripts of `LeaseStore`.

    Arguments:
        dialect: the kind of database, by SQLAlchemy's name.
        named: returns the name of a table, quoted, see `PositionScripts`.
    """

    def __init__(self, dialect: str, named: Callable[[str], str]) -> None:
        self.lock_seconds = 1.0
        """The longest wait of a statement for another's row lock, where a statement can say so."""
        self._instances = named("_instances")
        self._leases = named("_leases")
        self._now = CLOCKS[dialect]
        self._dialect = dialect
        self._feed = feed_condition(dialect)
        self._mine = f"{self._feed} AND instance = ?"
        self._skip = " FOR UPDATE SKIP LOCKED" if dialect in SKIPS_LOCKED else ""

    def join(self, feed: FeedKey, instance: str, seconds: float, options: str) -> Script[None]:
        """See `LeaseStore.join`."""
        now, length = self._now, int(seconds * _SECOND)
        yield from self._prune(feed)
        alone = not (yield from self._alive(feed)) - {instance}
        again = (
            f"UPDATE {self._instances} SET expires_at = {now} + ?, changes = changes + 1, "
            f"options = ? WHERE {self._mine}{self._bounded}"
        )
        if not (yield CountedChange(again, (length, options, feed.id, instance))):
            insert = (
                f"INSERT INTO {self._instances} (feed_id, instance, joined_at, expires_at, "
                f"changes, options) VALUES (?, ?, {now}, {now} + ?, ?, ?)"
            )
            yield CountedChange(insert, (feed.id, instance, length, first_change(), options))
        if alone:
            yield from self._new_round(feed)

    def renew(self, feed: FeedKey, instance: str, seconds: float) -> Script[bool]:
        """See `LeaseStore.renew`."""
        renew = (
            f"UPDATE {self._instances} SET expires_at = {self._now} + ? "
            f"WHERE {self._mine} AND expires_at > {self._now}{self._bounded}"
        )
        return bool((yield CountedChange(renew, (int(seconds * _SECOND), feed.id, instance))))

    def leave(self, feed: FeedKey, instance: str) -> Script[None]:
        """See `LeaseStore.leave`."""
        owned = yield from self._owned(feed, instance)
        mine = ("owner = ?", instance)
        if held := (yield from self._update(feed, owned, ("owner = NULL",), mine)):
            raise _locked(held)
        gone = f"DELETE FROM {self._instances} WHERE {self._mine}{self._bounded}"
        yield CountedChange(gone, (feed.id, instance))

    def instances(self, feed: FeedKey) -> Script[list[Instance]]:
        """See `LeaseStore.instances`."""
        rows = yield Query(
            f"SELECT instance, expires_at - {self._now}, {self._now} - joined_at, changes, options "
            f"FROM {self._instances} WHERE {self._feed}",
            (feed.id,),
        )
        found = [
            Instance(name, left / _SECOND, age / _SECOND, changes, options)
            for name, left, age, changes, options in rows
        ]
        # Not in the order of the database's collation.
        return sorted(found, key=lambda each: each.name)

    def leases(self, feed: FeedKey) -> Script[dict[int, Lease]]:
        """See `LeaseStore.leases`."""
        rows = yield Query(
            f"SELECT partition_id, owner, epoch, ended, {self._now} - changed_at "
            f"FROM {self._leases} WHERE {self._feed} ORDER BY partition_id",
            (feed.id,),
        )
        return {
            partition: Lease(partition, owner, epoch, bool(ended), age / _SECOND)
            for partition, owner, epoch, ended, age in rows
        }

    def claim(
        self, feed: FeedKey, instance: str, epochs: Mapping[int, int]
    ) -> Script[dict[int, int]]:
        """See `LeaseStore.claim`."""
        alive = yield from self._alive(feed)
        if instance not in alive:
            return {}
        for some in in_parts(epochs):
            rows = yield Query(
                f"SELECT partition_id, owner, epoch FROM {self._leases} "
                f"WHERE {self._feed} AND partition_id IN ({listed(some)})",
                (feed.id,),
            )
            stored = {p: (owner, epoch) for p, owner, epoch in rows}
            first = [p for p in some if not epochs[p] and p not in stored]
            yield from _without_locked(partial(self._claim_first, feed, instance), first)
            free = [
                p
                for p, (owner, epoch) in stored.items()
                if epoch and epoch == epochs[p] and (owner == instance or owner not in alive)
            ]
            if free:
                yield from self._claim_again(feed, instance, {p: epochs[p] for p in free})
        yield self._changed(feed, instance)
        owned = yield from self._owned(feed, instance)
        return {p: epoch for p, epoch in owned.items() if epochs.get(p) == epoch - 1}

    def release(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> Script[None]:
        """See `LeaseStore.release`."""
        return self._change(feed, instance, partitions, "owner = NULL")

    def end(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> Script[None]:
        """See `LeaseStore.end`."""
        return self._change(feed, instance, partitions, "ended = 1")

    def _change(
        self, feed: FeedKey, instance: str, partitions: Collection[int], values: str
    ) -> Script[None]:
        held = yield from self._update(feed, partitions, (values,), ("owner = ?", instance))
        yield self._changed(feed, instance)
        if held:
            owned = yield from self._owned(feed, instance)
            if still := owned.keys() & set(held):
                raise _locked(still)

    def _claim_first(self, feed: FeedKey, instance: str, partitions: list[int]) -> CountedChange:
        """Insert the leases of partitions that were never claimed, as far as nobody is faster."""
        # One statement: one for each row would hold its locks over many of them.
        epochs = [self._one, *"1" * (len(partitions) - 1)]
        rows = ", ".join(
            f"(?, {int(partition)}, ?, {epoch}, 0, {self._now})"
            for partition, epoch in zip(partitions, epochs, strict=True)
        )
        keep = " ON CONFLICT DO NOTHING" if self._dialect in ("postgresql", "sqlite") else ""
        return CountedChange(
            f"INSERT INTO {self._leases} (feed_id, partition_id, owner, epoch, ended, changed_at) "
            f"VALUES {rows}{keep}",
            (feed.id, instance) * len(partitions),
        )

    def _claim_again(
        self, feed: FeedKey, instance: str, epochs: Mapping[int, int]
    ) -> Script[list[int]]:
        """Change the owner of leases that have these epochs: any other owner has raised them."""
        branches = " ".join(f"WHEN {int(p)} THEN {int(epoch)}" for p, epoch in epochs.items())
        where: tuple[Any, ...] = (f"epoch = CASE partition_id {branches} END",)
        if self._dialect == "postgresql":
            # Elsewhere the subquery would wait for the rows of others.
            free = f"owner IS NULL OR owner = ? OR owner NOT IN ({self._select_alive})"
            where = (f"{where[0]} AND ({free})", instance, feed.id)
        change = ("owner = ?, epoch = epoch + 1, ended = 0", instance)
        return self._update(feed, epochs, change, where)

    def _update(
        self,
        feed: FeedKey,
        partitions: Collection[int],
        change: tuple[Any, ...],
        where: tuple[Any, ...],
    ) -> Script[list[int]]:
        """Change leases that fulfil a condition. Return those that others have locked.

        Arguments:
            change, where: SQL and its parameters.
        """
        held: list[int] = []
        for some in in_parts(partitions):
            rows = yield Query(
                f"SELECT partition_id FROM {self._leases} WHERE {self._feed} "
                f"AND partition_id IN ({listed(some)}) ORDER BY partition_id{self._skip}",
                (feed.id,),
            )
            unlocked = [partition for (partition,) in rows]
            held += sorted(set(some) - set(unlocked))

            def update(some: list[int]) -> CountedChange:
                return CountedChange(
                    f"UPDATE {self._leases} SET {change[0]}, changed_at = {self._now} "
                    f"WHERE {self._feed} AND partition_id IN ({listed(some)}) "
                    f"AND {where[0]}{self._bounded}",
                    (*change[1:], feed.id, *where[1:]),
                )

            held += yield from _without_locked(update, unlocked)
        return held

    @property
    def _select_alive(self) -> str:
        return (
            f"SELECT instance FROM {self._instances} "
            f"WHERE {self._feed} AND expires_at > {self._now}"
        )

    def _alive(self, feed: FeedKey) -> Script[set[str]]:
        rows = yield Query(self._select_alive, (feed.id,))
        return {instance for (instance,) in rows}

    def _owned(self, feed: FeedKey, instance: str) -> Script[dict[int, int]]:
        """Return the epochs of the leases that the instance owns."""
        own = f"SELECT partition_id, epoch FROM {self._leases} WHERE {self._feed} AND owner = ?"
        rows = yield Query(own, (feed.id, instance))
        return dict(rows)

    def _changed(self, feed: FeedKey, instance: str) -> CountedChange:
        count = f"UPDATE {self._instances} SET changes = changes + 1"
        return CountedChange(f"{count} WHERE {self._mine}{self._bounded}", (feed.id, instance))

    def _prune(self, feed: FeedKey) -> Script[None]:
        """Delete instances that died long ago. One whose row is locked is left for the next."""
        old = f"expires_at < {self._now} - {_KEPT_SECONDS * _SECOND}"
        rows = yield Query(
            f"SELECT instance FROM {self._instances} WHERE {self._feed} AND {old}", (feed.id,)
        )
        for (instance,) in rows:
            dead = f"DELETE FROM {self._instances} WHERE {self._mine} AND {old}{self._bounded}"
            with _passing_locks():
                yield CountedChange(dead, (feed.id, instance))

    def _new_round(self, feed: FeedKey) -> Script[None]:
        """Delete the marks of `end`. One that stays belongs to a lease that is claimed anew."""
        ended = f"SELECT partition_id FROM {self._leases} WHERE {self._feed} AND ended = 1"
        rows = yield Query(ended, (feed.id,))
        yield from self._update(feed, [p for (p,) in rows], ("ended = 0",), ("ended = 1",))

    @property
    def _one(self) -> str:
        """The number 1; in PostgreSQL its computation bounds the waits of this statement alone.

        A setting of the session would pass to others through a pooler in transaction mode. It is
        computed before the first row is locked.
        """
        if self._dialect != "postgresql":
            return "1"
        bound = milliseconds(self.lock_seconds)
        return f"(SELECT 1 FROM set_config('lock_timeout', '{bound}', true))"

    @property
    def _bounded(self) -> str:
        """A condition that is true, and bounds the waits of the statement."""
        return f" AND 1 = {self._one}" if self._dialect == "postgresql" else ""


@contextmanager
def _passing_locks() -> Iterator[None]:
    """Pass by a row that another transaction holds."""
    try:
        yield
    except Exception as error:
        if not is_lock_timeout(error):
            raise


def _without_locked(
    change: Callable[[list[int]], CountedChange], partitions: list[int]
) -> Script[list[int]]:
    """Change these rows in few statements. Return those that another transaction holds.

    A statement that has waited for one of its rows is repeated with each half of them.
    """
    held: list[int] = []
    left = [partitions] if partitions else []
    while left:
        some = left.pop()
        try:
            yield change(some)
        except Exception as error:
            if not is_lock_timeout(error):
                raise
            if len(some) == 1:
                held += some
            else:
                middle = len(some) // 2
                left += [some[middle:], some[:middle]]
    return held


def _locked(partitions: Collection[int]) -> StoreError:
    return StoreError(
        f"another transaction holds the leases of {len(partitions)} partitions, the first is "
        f"{min(partitions)}: is a process paused within it?"
    )
