"""Streams, their partitions, and what both ways to a broker share."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass

from feedapi_client.liftbridge.errors import LiftbridgeError

ANY_OFFSET = -1
"""The expected offset that switches the check of optimistic concurrency control off."""
REPLICATION_LIMIT = 1_048_576
"""The largest message that a broker replicates unless it is configured otherwise, in bytes."""


def key_partition(key: bytes, partitions: int) -> int:
    """The partition of a key as Liftbridge clients usually choose it: CRC-32 (IEEE) modulo the number of partitions."""
    return zlib.crc32(key) % partitions


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream by name, the NATS subject that it is attached to (its name unless told otherwise), and its number of partitions."""

    name: str
    subject: str = ""
    partitions: int = 1

    def __post_init__(self) -> None:
        if not self.name or self.partitions < 1:
            raise ValueError(
                f"a stream needs a name and at least one partition, not {self.name!r} and {self.partitions}"
            )
        if not self.subject:
            object.__setattr__(self, "subject", self.name)

    def subject_of(self, partition: int) -> str:
        """The NATS subject of a partition. Raises ValueError when there is no such partition."""
        if not 0 <= partition < self.partitions:
            raise ValueError(
                f"stream {self.name} has the partitions 0 to {self.partitions - 1}, not {partition}"
            )
        return f"{self.subject}.{partition}" if partition else self.subject

    def partition_of(self, key: bytes | None) -> int:
        """The partition that `key` belongs to; 0 without a key."""
        return key_partition(key, self.partitions) if key is not None else 0


def require_asyncio() -> None:
    """Raise `LiftbridgeError` on any other event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError as error:
        raise LiftbridgeError(
            "Liftbridge needs asyncio, because nats-py and grpc.aio run on nothing else: not on trio"
        ) from error
