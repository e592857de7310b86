"""The partitions of a feed in memory: their lineage, and which entities they hold."""

from __future__ import annotations

import heapq
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from time import monotonic
from typing import Literal

import orjson

from feedapi_client.model import MAX_PARTITION, DialectName, Partition
from feedapi_client.testing.publisher.log_position import LogPosition, encode
from feedapi_client.testing.publisher.partition_log import PartitionLog
from feedapi_client.testing.publisher.quirks import Quirks
from feedapi_client.testing.publisher.routing import EntityKey, Payload, choose, decoded, hash_of

SplitMethod = Literal["starts-after", "cursor-from"]
StoredEvent = tuple[int, int, bytes | None]
"""Sequence number, hash of the entity, and payload of an event."""

DIALECTS: tuple[DialectName, ...] = ("v1", "v2-draft", "v2-token")
_KEPT_TOKENS = 1000


class ChangeNotifier:
    """Callbacks by partition. All of its methods take `lock`."""

    def __init__(self, lock: RLock) -> None:
        self._lock = lock
        self._callbacks: dict[int, set[Callable[[], None]]] = {}

    @property
    def subscribed(self) -> set[int]:
        """The partitions that have followers."""
        with self._lock:
            return set(self._callbacks)

    @contextmanager
    def subscribe(self, partition: int, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` at each change that may have something new for a reader.

        It is called in the thread that makes the change, with the lock held.
        """
        with self._lock:
            self._callbacks.setdefault(partition, set()).add(callback)
        try:
            yield
        finally:
            with self._lock:
                callbacks = self._callbacks[partition]
                callbacks.discard(callback)
                if not callbacks:
                    del self._callbacks[partition]

    def notify(self, partition: int) -> None:
        """Call the followers of one partition."""
        if not self._callbacks:  # also the fast way of an append without followers
            return
        with self._lock:
            for callback in tuple(self._callbacks.get(partition, ())):
                callback()

    def notify_all(self) -> None:
        """Call the followers of any partition."""
        with self._lock:
            for partition in tuple(self._callbacks):
                self.notify(partition)


class Topology:
    """Partitions and their lineage. `lock` guards the whole feed; public methods take it."""

    def __init__(
        self, partitions: int | Iterable[int], *, dialect: DialectName, quirks: Quirks
    ) -> None:
        self.lock = RLock()
        self.changes = ChangeNotifier(self.lock)
        self.quirks = quirks
        self._tokens: deque[tuple[float, str]] = deque(maxlen=_KEPT_TOKENS)
        self.token = _new_token()
        self._logs: dict[int, PartitionLog] = {}
        self._listed_count: int | None = None
        self._roots = tuple(range(partitions)) if isinstance(partitions, int) else tuple(partitions)
        if self._roots:
            self._check_new(self._roots)
        for id in self._roots:
            self._new(id)
        self.dialect = dialect
        self._began = monotonic()
        super().__init__()  # Publisher has a second base, Traffic

    @property
    def token(self) -> str:
        """The token in discovery, in dialect v2-token."""
        return self._token

    @token.setter
    def token(self, token: str) -> None:
        self._token = token
        self._tokens.append((monotonic(), token))

    @property
    def dialect(self) -> DialectName:
        """The dialect spoken. Assign another one at any time; cursors carry over."""
        return self._dialect

    @dialect.setter
    def dialect(self, dialect: DialectName) -> None:
        if dialect not in DIALECTS:
            raise ValueError(f"dialect must be one of {', '.join(DIALECTS)}, not {dialect!r}")
        with self.lock:
            listed = [log.id for log in self._logs.values() if log.listed]
            if dialect == "v1" and listed != list(range(len(listed))):
                raise ValueError(f"dialect v1 has partitions 0..n-1, this feed has {listed}")
            self._dialect: DialectName = dialect
            self.changes.notify_all()

    def upgrade(self, dialect: DialectName) -> None:
        """Continue in another dialect."""
        self.dialect = dialect

    @property
    def partitions(self) -> dict[int, Partition]:
        """The listed partitions."""
        with self.lock:
            return {
                log.id: Partition(
                    log.id, log.closed, self.end_cursor(log.id), log.starts_after, log.cursor_from
                )
                for log in self._logs.values()
                if log.listed
            }

    def open_partitions(self) -> list[int]:
        """Return the listed partitions that take events."""
        return [partition.id for partition in self.partitions.values() if not partition.closed]

    def end_cursor(self, partition: int) -> str:
        """Return the cursor after the last event of the partition."""
        with self.lock:
            return self._cursor_at(partition, self._logs[partition].end)

    def close(self, partition: int) -> None:
        """Take no more events for the partition."""
        with self.lock:
            self._listed(partition).closed = True
            self._changed()

    def reopen(self, partition: int) -> None:
        """Take events again, which no correct publisher does."""
        with self.lock:
            self._listed(partition).closed = False
            self._changed()

    def split(
        self,
        partition: int,
        into: int | Iterable[int] = 2,
        *,
        method: SplitMethod = "starts-after",
        key: EntityKey | None = None,
    ) -> tuple[int, ...]:
        """Split a partition into new ones.

        ``starts-after`` closes the partition and opens children for the events to come.
        ``cursor-from`` replaces it by successors that share its whole history by the hash of the
        entity.

        Arguments:
            partition: The partition to split.
            into: The number of new partitions, or their ids.
            method: How the new partitions follow the old one.
            key: Finds the entity of a payload for this split.

        Returns: the ids of the new partitions.
        Raises: ValueError for ids in use, for a partition that was split before, and in dialect v1.
        """
        with self.lock:
            if self._dialect == "v1":
                raise ValueError("dialect v1 has no splits: upgrade first")
            parent = self._unsplit(partition)
            ids = tuple(self._free_ids(into)) if isinstance(into, int) else tuple(into)
            self._check_new(ids)
            if method == "starts-after":
                parent.closed = True
                for id in ids:
                    self._new(id, starts_after=partition)
            elif method == "cursor-from":
                self._redistribute(parent, ids, key)
            else:
                raise ValueError(f"method must be starts-after or cursor-from, not {method!r}")
            parent.split_into, parent.split_key = ids, key
            self._changed()
            return ids

    def merge(self, partitions: Iterable[int], into: int | None = None) -> int:
        """Replace partitions by one that holds the history of all of them; return its id."""
        with self.lock:
            parents = [self._unsplit(id) for id in partitions]
            (id,) = self._free_ids(1) if into is None else (into,)
            self._check_new((id,))
            ancestors = [parent.id for parent in parents]
            ancestors += [ancestor for parent in parents for ancestor in parent.cursor_from]
            merged = self._new(
                id,
                cursor_from=dict.fromkeys(ancestors),
                closed=all(parent.closed for parent in parents),
            )
            for event in heapq.merge(*map(_events, parents), key=lambda event: event[0]):
                merged.add(*event)
            for parent in parents:
                parent.listed, parent.split_into, parent.split_key = False, (id,), None
            self._changed()
            return id

    def add(
        self,
        partition: int | None = None,
        *,
        starts_after: int | None = None,
        cursor_from: Iterable[int] = (),
        closed: bool = False,
    ) -> int:
        """List a partition with any lineage, legal or not; return its id.

        A partition that was removed comes back with its events.
        """
        with self.lock:
            (id,) = self._free_ids(1) if partition is None else (partition,)
            known = self._logs.get(id)
            if known is None:
                self._new(id, starts_after=starts_after, cursor_from=cursor_from, closed=closed)
            elif known.listed:
                raise ValueError(f"partition {id} is listed already")
            else:
                known.listed, known.closed = True, closed
                known.starts_after, known.cursor_from = starts_after, tuple(cursor_from)
            self._changed()
            return id

    def remove(self, partition: int) -> None:
        """Stop listing the partition. `add` lists it again."""
        with self.lock:
            self._listed(partition).listed = False
            self._changed()

    def roll_back(self, partition: int) -> None:
        """Undo a split by cursor transfer, as a publisher does that goes back to an old version.

        The partition is listed again under its old id, open, with all events that its successors
        got meanwhile. They are not listed any more. Cursors of theirs are valid in it.

        Raises: ValueError unless it was split that way, and its successors are listed and unsplit.
        """
        with self.lock:
            parent = self._logs.get(partition)
            if parent is None or parent.listed or not parent.split_into:
                raise ValueError(f"partition {partition} was not split by cursor transfer")
            successors = [self._unsplit(id) for id in parent.split_into]
            if sum(log.split_into == parent.split_into for log in self._logs.values()) > 1:
                raise ValueError(f"partition {partition} was merged with others")
            known = set(parent.seqs)
            for event in heapq.merge(*map(_events, successors), key=lambda event: event[0]):
                if event[0] not in known:
                    parent.add(*event)
            for successor in successors:
                successor.listed = False
            parent.split_before, parent.split_into = parent.split_into, ()
            parent.listed = True
            self._changed()

    def roll_forward(self, partition: int) -> tuple[int, ...]:
        """Make a split again that `roll_back` has undone; return the successors.

        They have the events that the partition got meanwhile.
        """
        with self.lock:
            parent = self._unsplit(partition)
            if not parent.split_before:
                raise ValueError(f"no split of partition {partition} was rolled back")
            successors = [self._logs[id] for id in parent.split_before]
            known = {seq for successor in successors for seq in successor.seqs}
            for event in _events(parent):
                if event[0] not in known:
                    self._successor_of(event, parent, successors, parent.split_key).add(*event)
            parent.split_into, parent.split_before = parent.split_before, ()
            for successor in successors:
                successor.listed, successor.closed = True, False
            parent.listed = False
            self._changed()
            return parent.split_into

    def rotate_token(self) -> str:
        """Make all tokens given out so far stale (dialect v2-token), and return the new one."""
        with self.lock:
            self.token = _new_token()
            self.changes.notify_all()
            return self.token

    def route(self, entity: object, payload: Payload | None = None) -> int:
        """Return the partition where events of the entity go now.

        `payload` is needed only after a split with a key of its own.
        """
        hash = hash_of(entity)
        with self.lock:
            if not self._roots:
                raise ValueError("route: the publisher was made without partitions")
            log = self._logs[self._roots[choose(hash, len(self._roots), salt=-1)]]
            while log.split_into:
                split_hash = hash
                if log.split_key is not None and payload is not None:
                    split_hash = hash_of(log.split_key(decoded(payload)))
                log = self._logs[
                    log.split_into[choose(split_hash, len(log.split_into), salt=log.id)]
                ]
            return log.id

    # For request handling; the caller holds the lock

    def log_of(self, partition: int) -> PartitionLog | None:
        """Return the log of a listed partition, None for any other."""
        log = self._logs.get(partition)
        return log if log is not None and log.listed else None

    @property
    def listed_count(self) -> int:
        """The number of listed partitions."""
        if self._listed_count is None:
            self._listed_count = sum(log.listed for log in self._logs.values())
        return self._listed_count

    # Internal; the caller holds the lock

    def _cursor_at(self, partition: int, seq: int) -> str:
        position = LogPosition(partition, seq, {})
        return encode(position, awkward=self.quirks.awkward_cursors)

    def _new(
        self,
        id: int,
        *,
        starts_after: int | None = None,
        cursor_from: Iterable[int] = (),
        closed: bool = False,
    ) -> PartitionLog:
        log = self._logs[id] = PartitionLog(
            id, starts_after=starts_after, cursor_from=cursor_from, closed=closed
        )
        return log

    def _free_ids(self, count: int) -> list[int]:
        start = max(self._logs, default=-1) + 1
        return list(range(start, start + count))

    def _check_new(self, ids: tuple[int, ...]) -> None:
        if not ids or len(set(ids)) < len(ids):
            raise ValueError(f"new partitions must be one or more different ids, not {ids}")
        for id in ids:
            if id in self._logs or not 0 <= id <= MAX_PARTITION:
                raise ValueError(
                    f"partition {id} can't be created: the id is in use,"
                    f" or outside 0..{MAX_PARTITION}"
                )

    def _listed(self, partition: int) -> PartitionLog:
        log = self.log_of(partition)
        if log is None:
            raise ValueError(f"partition {partition} is not listed")
        return log

    def _unsplit(self, partition: int) -> PartitionLog:
        log = self._listed(partition)
        if log.split_into:
            raise ValueError(
                f"partition {partition} was split into {log.split_into} already:"
                " no topology could say what follows what"
            )
        return log

    def _redistribute(
        self, parent: PartitionLog, ids: tuple[int, ...], key: EntityKey | None
    ) -> None:
        """Replace a partition by new ones that divide its history by entity."""
        ancestors = (parent.id, *parent.cursor_from)
        successors = [self._new(id, cursor_from=ancestors, closed=parent.closed) for id in ids]
        for event in _events(parent):
            self._successor_of(event, parent, successors, key).add(*event)
        parent.listed = False

    @staticmethod
    def _successor_of(
        event: StoredEvent,
        parent: PartitionLog,
        successors: list[PartitionLog],
        key: EntityKey | None,
    ) -> PartitionLog:
        _, hash, raw = event
        split_hash = hash if key is None or raw is None else hash_of(key(orjson.loads(raw)))
        return successors[choose(split_hash, len(successors), salt=parent.id)]

    def _token_at(self, time: float) -> str:
        since = [token for at, token in self._tokens if at <= time]
        return since[-1] if since else self._tokens[0][1]

    def _changed(self) -> None:
        self._listed_count = None
        if not self.quirks.keep_token:
            self.token = _new_token()
        self.changes.notify_all()


def _events(log: PartitionLog) -> Iterable[StoredEvent]:
    return zip(log.seqs, log.hashes, log.payloads, strict=True)


def _new_token() -> str:
    return secrets.token_urlsafe(9)
