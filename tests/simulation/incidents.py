"""What happens to the database beside the consumers: a failover, and operators who move cursors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.leases import SECOND
from feedapi_client.stores.sqlite import MemoryCursorStore
from tests.simulation.oracle import Known, Oracle
from tests.simulation.store import SimulatedDatabase
from tests.simulation.world import ModelPartition, World

Order = Literal["rewind", "skip", "drain"]
"""What an operator does with the position of a partition."""

Rows = dict[str, list[Any]]
_INSTANCES, _LEASES = "feedapi_cursors_instances", "feedapi_cursors_leases"

KEPT = 20
"""Saves that a failover can lose, at most."""


@dataclass(frozen=True, slots=True)
class Backup:
    """What a replica of the database has: all that was durable at some moment."""

    positions: dict[FeedKey, dict[int, Position]]
    leases: Rows
    known: Known


class Replica:
    """The replica to which a database fails over: it lacks the last saves.

    Arguments:
        transactional: whether the effects of the application are in the database, and lost, too.
        from_the_end: whether the consumer starts at the end. The first positions are not lost
            then: without them all that was published before may come.
    """

    def __init__(
        self,
        database: SimulatedDatabase,
        oracle: Oracle,
        *,
        transactional: bool,
        from_the_end: bool,
    ) -> None:
        self._from_the_end = from_the_end
        self._database = database
        self._oracle = oracle
        self._transactional = transactional
        self._backups: list[Backup] = []
        database.on_apply = self._keep

    def _keep(self) -> None:
        """Something is about to be saved: keep what was durable before."""
        if self._from_the_end and not self._database.positions:
            return
        positions = {feed: dict(known) for feed, known in self._database.positions.items()}
        leases = _copied(self._database.leases)
        self._backups.append(Backup(positions, leases, self._oracle.known()))
        del self._backups[:-KEPT]

    def promote(self, lost: int, *, leases: bool) -> None:
        """Go on with what was durable some saves ago. Whatever is under way fails.

        `leases`: whether they are in this database, and go back, too.
        """
        database = self._database
        if not self._backups:
            return
        backup = self._backups[-min(lost, len(self._backups))]
        self._backups.clear()
        database.positions = backup.positions
        if leases:
            _replace(database.leases, backup.leases)
        database.generation += 1
        database.failures += 1
        database.locks.clear()
        self._oracle.went_back(backup.known if self._transactional else None)


def _copied(leases: MemoryCursorStore) -> Rows:
    """Return what a lease store holds."""
    execute = leases.database._connection.execute
    return {table: execute(f"SELECT * FROM {table}").fetchall() for table in (_INSTANCES, _LEASES)}


def _replace(leases: MemoryCursorStore, rows: Rows) -> None:
    """Let a lease store hold what was copied."""
    for table, found in rows.items():
        leases.database._connection.execute(f"DELETE FROM {table}")
        insert = f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?, ?)"
        leases.database._connection.executemany(insert, found)


class LeaseReplica:
    """The replica of a lease store: it lacks what happened in the last seconds.

    Leases may be in a store of their own (`Share.leases`), that goes back alone.
    """

    def __init__(self, database: SimulatedDatabase) -> None:
        self._database = database
        self._backups: list[tuple[float, Rows]] = []

    def keep(self) -> None:
        """Copy the leases as they are now. To be called again and again."""
        self._backups.append((self._database.now(), _copied(self._database.leases)))
        del self._backups[:-KEPT]

    def promote(self, seconds: float) -> None:
        """Go on with the leases as they were so many seconds ago."""
        until = self._database.now() - seconds
        older = [leases for at, leases in self._backups if at <= until]
        if older:
            _replace(self._database.leases, older[-1])
            self._database.failures += 1
            self._backups.clear()


def set_clock(leases: MemoryCursorStore, seconds: float) -> None:
    """Let the clock that leases expire by jump ahead, or back."""
    times = {_INSTANCES: ("joined_at", "expires_at"), _LEASES: ("changed_at",)}
    for table, columns in times.items():
        moved = ", ".join(f"{column} = {column} - {int(seconds * SECOND)}" for column in columns)
        leases.database._connection.execute(f"UPDATE {table} SET {moved}")


class Operators:
    """People who change stored positions while consumers run, as `feedapi cursors` does."""

    def __init__(
        self, world: World, database: SimulatedDatabase, oracle: Oracle, now: Callable[[], float]
    ) -> None:
        self._world = world
        self._database = database
        self._oracle = oracle
        self._now = now

    def change(self, order: Order, key: FeedKey, which: int) -> None:
        """Rewind, skip or drain a partition, where that makes sense."""
        positions = self._database.positions.get(key, {})
        fit = [
            partition
            for partition in self._world.listed(self._now())
            # On a row that is locked the statement would wait: its operator gives it up.
            if (key, partition.id) not in self._database.locks
            and self._fits(order, partition, positions.get(partition.id))
        ]
        if not fit:
            return
        partition = fit[which % len(fit)]
        before = positions[partition.id]
        sequence = self._target(order, partition, before, which)
        changed = before.advance(
            partition.cursor(sequence), "drained" if order == "drain" else "open"
        )
        self._database.failures += 1  # a consumer that is alone is fenced by this save
        self._database.apply({(key, partition.id): changed}, [])
        if order == "rewind":
            self._oracle.rewound([e for e in partition.events if e.sequence > sequence])
        else:
            self._oracle.skipped(partition.events)

    def reopen(self, key: FeedKey, partitions: Collection[int]) -> None:
        """Let partitions be read on from where they were drained, while no consumer runs."""
        stored = self._database.positions[key]
        reopened = {(key, id): stored[id].advance(status="open") for id in partitions}
        self._database.apply(reopened, [])

    def _fits(self, order: Order, partition: ModelPartition, stored: Position | None) -> bool:
        """Return whether the change leaves the order of the entities as it is."""
        if stored is None or stored.status != "open" or not stored.cursor.startswith("f"):
            return False
        if order == "drain":
            return partition.closed <= self._now()
        return partition.closed > self._now()

    def _target(self, order: Order, partition: ModelPartition, stored: Position, which: int) -> int:
        """Return behind which event the position is to stand."""
        if order != "rewind":
            return self._world.end(partition, self._now())
        reached = partition.sequence_of(stored.cursor) or 0
        read = [event.sequence for event in partition.events if event.sequence <= reached]
        return read[which % len(read)] - 1 if read else reached
