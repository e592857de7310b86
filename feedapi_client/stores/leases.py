"""What a store of leases is: which instance of a consumer reads which partition."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from feedapi_client.model import FeedKey


@dataclass(frozen=True, slots=True)
class Instance:
    """A process that shares a feed, as its heartbeat shows it.

    Attributes:
        name: its name, unique for each process.
        expires_in: seconds until its heartbeat expires, by the store's clock. It is dead at 0.
        age: seconds since it joined.
        changes: a number that grows with every change of its leases. After `LeaseStore.leave` and
            `LeaseStore.join` it is another one than ever before.
        options: what it told the others when it joined, see `LeaseStore.join`.
    """

    name: str
    expires_in: float
    age: float
    changes: int
    options: str = ""

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
        age: seconds since the owner or `ended` changed.
    """

    partition: int
    owner: str | None
    epoch: int
    ended: bool
    age: float


def first_change() -> int:
    """Return a number for `Instance.changes` of an instance that joins.

    Not always the same one: an instance that has bootstrapped leaves, joins again and claims. Who
    looks at it before and after would see no change. Redis computes with 53 bits.
    """
    return secrets.randbits(48)


@runtime_checkable
class LeaseStore(Protocol):
    """Keeps the instances of a consumer and the leases of its partitions.

    A cursor store that implements it too can be shared by several instances
    (`FeedConsumer(share=...)`). All times are those of the store's own clock, never of the caller.
    An instance without a row is dead, a partition without a row has no owner.

    Concurrency: all methods may be called concurrently, by several tasks and processes. What each
    does to one partition is atomic, and `Instance.changes` grows after it. None takes part in a
    transaction of the caller. None waits for a row that another process has locked longer than a
    part of a lease; `claim` passes by such a row.

    Raises: every method raises `StoreError` when the store fails. Whether it took effect is then
    unknown.

    `feedapi_client.testing.LeaseStoreContract` is the test suite that every such store passes.
    """

    async def join(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> None:
        """Write the heartbeat of an instance, which may have expired; it holds for `seconds`.

        `options` is kept for the others to read: at most 200 characters of ASCII.

        Leases that still name the instance are its own again. When no other instance is alive,
        the marks of `end` are deleted: a new round begins.
        """
        ...

    async def renew(self, feed: FeedKey, instance: str, seconds: float) -> bool:
        """Let the heartbeat hold for `seconds` from now. One statement.

        Returns False, and changes nothing, if it has expired or is not there.
        """
        ...

    async def leave(self, feed: FeedKey, instance: str) -> None:
        """Release all leases of the instance and delete its heartbeat."""
        ...

    async def instances(self, feed: FeedKey) -> list[Instance]:
        """Return all instances, dead ones included, sorted by name."""
        ...

    async def leases(self, feed: FeedKey) -> dict[int, Lease]:
        """Return the leases of all partitions that were ever claimed."""
        ...

    async def claim(
        self, feed: FeedKey, instance: str, epochs: Mapping[int, int]
    ) -> dict[int, int]:
        """Claim partitions for an instance that is alive.

        Each is claimed for itself: if its epoch is still the given one (0: it was never claimed),
        and its owner is None, dead, or the instance itself. The mark of `end` of a claimed one is
        deleted: its new owner reads it to its end itself.

        Returns the new epochs of those that were claimed.
        """
        ...

    async def release(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> None:
        """Release those of the partitions that the instance owns."""
        ...

    async def end(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> None:
        """Mark those of the partitions that the instance owns as read to their end."""
        ...
