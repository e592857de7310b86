"""Leases: which instance of a consumer reads which partition. What keeps them, and their scripts.

Each statement commits itself (in SQLite a script): an instance that is paused between two of them
holds no lock. Statements pass by rows that another transaction holds; where a database can't, they
wait for a part of a lease and no longer.
"""

# ruff: noqa: S608 - the statements are made of constants, numbers and quoted names

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from feedapi_client.model import FeedKey
from feedapi_client.stores.scripts import (
    DIALECTS,
    CountedChange,
    Query,
    Script,
    feed_condition,
    in_parts,
    is_lock_timeout,
    listed,
    milliseconds,
)

SECOND = 1_000_000
"""Times are stored in microseconds since 1970 UTC, by the clock of the database."""
KEPT_SECONDS = 3600
"""Dead instances are deleted from the store after this time."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A process that shares a feed, as its heartbeat shows it.

    Attributes:
        name: its name, unique for each process.
        expires_in: seconds until its heartbeat expires, by the store's clock. It is dead at 0.
        age: seconds since it joined.
        options: what it told the others when it joined, see `LeaseStore.beat`.
        changes: a random number, another one whenever it has joined or put leases.
    """

    name: str
    expires_in: float
    age: float
    options: str = ""
    changes: int = 0

    @property
    def alive(self) -> bool:
        """Whether its heartbeat has not expired."""
        return self.expires_in > 0


@dataclass(frozen=True, slots=True)
class Lease:
    """Who reads a partition.

    Attributes:
        partition: the partition.
        owner: the name of an instance, alive or not; None when it was released.
        epoch: a number that grows with every claim.
        ended: whether it was read to its end by a consumer without `follow`.
        age: seconds since it was put.
    """

    partition: int
    owner: str | None
    epoch: int
    ended: bool = False
    age: float = field(default=0.0, compare=False)

    def follows(self, owner: str | None, epoch: int, instance: str, alive: Collection[str]) -> bool:
        """Return whether an instance may put this one in place of what is stored.

        It changes what is its own, or claims what is nobody's.
        """
        mine = owner == instance
        free = mine or owner not in alive
        return (mine and self.epoch == epoch) or (free and self.epoch == epoch + 1)


class View(NamedTuple):
    """What is stored of a feed: all instances, by name, dead ones included, and all leases."""

    instances: Sequence[Instance]
    leases: Mapping[int, Lease]

    def repeats(self, instances: Iterable[Instance]) -> bool:
        """Return whether the same instances are alive now, and none has put leases since."""
        now = {each.name: each.changes for each in instances if each.alive}
        return now == {each.name: each.changes for each in self.instances if each.alive}


def change_number() -> int:
    """Drawn, so that none comes again after a failover. Redis computes with 53 bits."""
    return secrets.randbits(53)


@runtime_checkable
class LeaseStore(Protocol):
    """Keeps the instances of a consumer and the leases of its partitions.

    A cursor store that implements it too can be shared by several instances
    (`FeedConsumer(share=...)`). All times are those of the store's own clock, never of the caller.
    An instance without a row is dead, a partition without a row has no owner and the epoch 0.

    Concurrency: all methods may be called concurrently, by several tasks and processes. What each
    does to one partition is atomic. None takes part in a transaction of the caller, or waits longer
    than a part of a lease for a row that another process has locked; `put` passes by such a row.

    Raises: `StoreError` when the store fails. Whether it took effect is then unknown.

    `feedapi_client.testing.LeaseStoreContract` is the test suite that every such store passes.
    """

    async def look(self, feed: FeedKey, last: View | None = None) -> View:
        """Return the instances and the leases as they are now.

        `last` is what this method has returned before. While it `repeats` the instances of now, its
        leases may be returned again: a feed may have 32,768.
        """
        ...

    async def beat(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> bool:
        """Let the heartbeat of an instance hold for `seconds` from now.

        Returns True if it had not expired; that is one statement. Otherwise the instance joins, and
        False is returned: leases that still name it are its own again, and others may have been
        claimed meanwhile. `options` is kept from then on for the others to read: at most 200
        characters of ASCII. When no other instance is alive, all marks `Lease.ended` are deleted: a
        new round begins.
        """
        ...

    async def put(self, feed: FeedKey, instance: str, leases: Collection[Lease]) -> set[int]:
        """Store leases, each for itself, if the instance is alive and `Lease.follows` says so.

        Returns the partitions whose leases are stored as given.
        """
        ...

    async def leave(self, feed: FeedKey, instance: str) -> None:
        """Release all leases of the instance and delete its heartbeat."""
        ...


class LeaseScripts:
    """`clock` returns the time, in microseconds, where it is not that of the database."""

    def __init__(
        self, dialect: str, named: Callable[[str], str], clock: Callable[[], int] | None = None
    ) -> None:
        self.lock_seconds = 1.0
        """The longest wait of a statement for another's row lock, where a statement can say so."""
        self._instances = named("_instances")
        self._leases = named("_leases")
        self._clock = clock
        self._bounds = dialect == "postgresql"
        self._dialect = DIALECTS[dialect]
        self._feed = feed_condition(dialect)
        self._mine = f"{self._feed} AND instance = ?"
        self._skip = f"{self._dialect.lock} SKIP LOCKED" if self._dialect.lock else ""

    def look(self, feed: FeedKey, last: View | None) -> Script[View]:
        rows = yield Query(
            f"SELECT instance, expires_at - {self._now}, {self._now} - joined_at, options, changes "
            f"FROM {self._instances} WHERE {self._feed}",
            (feed.id,),
        )
        instances = [
            Instance(name, left / SECOND, age / SECOND, options, changes)
            for name, left, age, options, changes in rows
        ]
        instances.sort(key=lambda each: each.name)  # not in the order of the database's collation
        if last is not None and last.repeats(instances):
            return View(instances, last.leases)
        rows = yield Query(
            f"SELECT partition_id, owner, epoch, ended, {self._now} - changed_at "
            f"FROM {self._leases} WHERE {self._feed} ORDER BY partition_id",
            (feed.id,),
        )
        return View(
            instances,
            {
                partition: Lease(partition, owner, epoch, bool(ended), age / SECOND)
                for partition, owner, epoch, ended, age in rows
            },
        )

    def beat(self, feed: FeedKey, instance: str, seconds: float, options: str) -> Script[bool]:
        length = int(seconds * SECOND)
        renew = (
            f"UPDATE {self._instances} SET expires_at = {self._now} + ? "
            f"WHERE {self._mine} AND expires_at > {self._now}{self._bounded}"
        )
        if (yield CountedChange(renew, (length, feed.id, instance))):
            return True
        left = yield from self._left(feed)
        yield from self._prune(feed, [name for name in left if left[name] < -KEPT_SECONDS * SECOND])
        replaced = ("expires_at", "changes", "options")
        replace = self._dialect.replacing(("feed_id", "instance"), replaced)
        join = (
            f"INSERT INTO {self._instances} "
            "(feed_id, instance, joined_at, expires_at, changes, options) "
            f"VALUES (?, ?, {self._now} * {self._one}, {self._now} + ?, ?, ?) {replace}"
        )
        yield CountedChange(join, (feed.id, instance, length, change_number(), options))
        if not any(left[name] > 0 for name in left if name != instance):
            yield from self._new_round(feed)
        return False

    def put(self, feed: FeedKey, instance: str, leases: Collection[Lease]) -> Script[set[int]]:
        alive = {name for name, left in (yield from self._left(feed)).items() if left > 0}
        wanted = {lease.partition: lease for lease in leases} if instance in alive else {}
        found: set[int] = set()
        for some in in_parts(wanted):
            stored = yield from self._rows(feed, some, self._skip)
            steps: dict[int, list[Lease]] = {0: [], 1: []}
            for new in map(wanted.__getitem__, some):
                # A row that is there, and locked, is found when this one is stored.
                owner, epoch = stored.get(new.partition, (None, 0))
                if new.follows(owner, epoch, instance, alive):
                    steps[new.epoch - epoch].append(new)
            for step, follow in steps.items():
                yield from self._store(feed, follow, step)
            rows = yield from self._rows(feed, some)
            found |= {p for p, row in rows.items() if row == (wanted[p].owner, wanted[p].epoch)}
        changed = f"UPDATE {self._instances} SET changes = ? WHERE {self._mine}{self._bounded}"
        yield CountedChange(changed, (change_number(), feed.id, instance))
        return found

    def leave(self, feed: FeedKey, instance: str) -> Script[None]:
        rows = yield Query(
            f"SELECT partition_id, epoch, ended FROM {self._leases} "
            f"WHERE {self._feed} AND owner = ?",
            (feed.id, instance),
        )
        free = [Lease(partition, None, epoch, bool(ended)) for partition, epoch, ended in rows]
        yield from self.put(feed, instance, free)
        gone = f"DELETE FROM {self._instances} WHERE {self._mine}{self._bounded}"
        yield CountedChange(gone, (feed.id, instance))

    def _left(self, feed: FeedKey) -> Script[dict[str, int]]:
        select = f"SELECT instance, expires_at - {self._now} FROM {self._instances}"
        rows = yield Query(f"{select} WHERE {self._feed}", (feed.id,))
        return dict(rows)

    def _rows(
        self, feed: FeedKey, partitions: Collection[int], lock: str = ""
    ) -> Script[dict[int, tuple[str | None, int]]]:
        rows = yield Query(
            f"SELECT partition_id, owner, epoch FROM {self._leases} WHERE {self._feed} "
            f"AND partition_id IN ({listed(partitions)}) ORDER BY partition_id{lock}",
            (feed.id,),
        )
        return {partition: (owner, epoch) for partition, owner, epoch in rows}

    def _store(self, feed: FeedKey, leases: list[Lease], step: int) -> Script[None]:
        """`step`: how much their epochs are above the stored ones. Rows of others are passed by."""
        key = ("feed_id", "partition_id")
        replace = self._dialect.replacing(
            key, ("ended", "changed_at", "owner", "epoch"), above=("epoch", step)
        )
        left = [leases] if leases else []
        while left:
            some = left.pop()
            ones = [self._one, *"1" * (len(some) - 1)]
            rows = ", ".join(
                f"(?, {int(each.partition)}, ?, {int(each.epoch)} * {one}, {int(each.ended)}, "
                f"{self._now})"
                for each, one in zip(some, ones, strict=True)
            )
            columns = "feed_id, partition_id, owner, epoch, ended, changed_at"
            insert = f"INSERT INTO {self._leases} {self._dialect.stored} ({columns}) VALUES {rows}"
            stored = False
            with _passing_locks():
                owners = [value for each in some for value in (feed.id, each.owner)]
                yield CountedChange(f"{insert} {replace}", owners)
                stored = True
            if not stored and len(some) > 1:
                middle = len(some) // 2
                left += [some[middle:], some[:middle]]

    def _prune(self, feed: FeedKey, dead: Collection[str]) -> Script[None]:
        """Delete instances that died long ago. One whose row is locked is left for the next."""
        for some in in_parts(dead):
            old = f"expires_at < {self._now} - {KEPT_SECONDS * SECOND}"
            named = ", ".join("?" * len(some))
            delete = f"DELETE FROM {self._instances} WHERE {self._feed} AND instance IN ({named})"
            with _passing_locks():
                yield CountedChange(f"{delete} AND {old}{self._bounded}", (feed.id, *some))

    def _new_round(self, feed: FeedKey) -> Script[None]:
        """Delete the marks of an end. One that stays belongs to a lease that is claimed anew."""
        ended = f"SELECT partition_id FROM {self._leases} WHERE {self._feed} AND ended = 1"
        rows = yield Query(ended, (feed.id,))
        for some in in_parts(partition for (partition,) in rows):
            stored = yield from self._rows(feed, some, self._skip)
            yield from self._store(feed, [Lease(p, *found) for p, found in stored.items()], 0)

    @property
    def _now(self) -> str:
        return self._dialect.clock if self._clock is None else str(self._clock())

    @property
    def _one(self) -> str:
        """The number 1; in PostgreSQL its computation bounds the waits of this statement alone.

        A setting of the session would pass to others through a pooler in transaction mode. It is
        computed before the first row is locked.
        """
        if not self._bounds:
            return "1"
        bound = milliseconds(self.lock_seconds)
        return f"(SELECT 1 FROM set_config('lock_timeout', '{bound}', true))"

    @property
    def _bounded(self) -> str:
        return f" AND 1 = {self._one}" if self._bounds else ""


@contextmanager
def _passing_locks() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_lock_timeout(error):
            raise
