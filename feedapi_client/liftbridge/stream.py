"""A stream: its name, its NATS subject, and which of its partitions a key belongs to."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

ANY_OFFSET = -1
"""The expected offset that disables the check of optimistic concurrency control."""
REPLICATION_LIMIT = 1_048_576
"""The largest message in bytes that a broker replicates by default."""


def key_partition(key: bytes, partitions: int) -> int:
    """Return the partition that Liftbridge clients usually choose for a key.

    It is the CRC-32 (IEEE) of the key modulo the number of partitions.
    """
    return zlib.crc32(key) % partitions


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream by name.

    Attributes:
        name: the stream's name.
        subject: the NATS subject that the stream is attached to; by default its name.
        partitions: the number of its partitions.

    Raises:
        ValueError: the name is empty, or there are fewer than one partition.
    """

    name: str
    subject: str = ""
    partitions: int = 1

    def __post_init__(self) -> None:
        if not self.name or self.partitions < 1:
            raise ValueError(
                "a stream needs a name and at least one partition, "
                f"not {self.name!r} and {self.partitions}"
            )
        if not self.subject:
            object.__setattr__(self, "subject", self.name)

    def subject_of(self, partition: int) -> str:
        """Return the NATS subject of a partition. Raises ValueError for an unknown partition."""
        if not 0 <= partition < self.partitions:
            raise ValueError(
                f"stream {self.name} has the partitions 0 to {self.partitions - 1}, not {partition}"
            )
        return f"{self.subject}.{partition}" if partition else self.subject

    def partition_of(self, key: bytes | None) -> int:
        """Return the partition that `key` belongs to; 0 without a key."""
        return key_partition(key, self.partitions) if key is not None else 0
