"""A stream: its name, its NATS subject, and which of its partitions a key belongs to."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

ANY_OFFSET = -1
"""The expected offset that disables the check of optimistic concurrency control."""
REPLICATION_LIMIT = 1_048_576
"""The largest message in bytes that a broker replicates by default."""

_NAME_BYTES = 255
"""The longest name of a folder: the broker keeps a stream in one of the stream's name."""
_SUBJECT_BYTES = 2048
"""Half of the line of 4,096 bytes in which NATS takes a subject and the subject of its reply."""
_NAME = re.compile(r"[^\s*>./\\\x00-\x1f\x7f]+(\.[^\s*>./\\\x00-\x1f\x7f]+)*")
_SUBJECT = re.compile(r"[^.\x00-\x20\x7f]+(\.[^.\x00-\x20\x7f]+)*")


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
        ValueError: no broker can have a stream of that name or subject, or there is no partition.
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
        if _NAME.fullmatch(self.name) is None:
            # A wildcard brings the broker down (Liftbridge 1.9.0), and the name is a folder's, too.
            raise ValueError(
                f"{self.name!r} can't be the name of a stream: it is made of parts without spaces, "
                "wildcards (* and >) and slashes, with dots between them"
            )
        if not self.subject:
            object.__setattr__(self, "subject", self.name)
        check_subject(self.subject, self.partitions)
        # A longer name ends the broker with a panic, and for ever where it keeps its Raft log; over
        # a longer subject NATS ends the broker's connection, again and again (Liftbridge 1.9.0).
        _check_length("the name", self.name, _NAME_BYTES)
        _check_length("the subject", self.subject, _SUBJECT_BYTES)

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


def check_subject(subject: str, partitions: int = 1) -> None:
    """Raise ValueError for a subject that NATS refuses, also with the number of a partition.

    The broker subscribes to it, and ends with a panic, for ever: it is in its Raft log (1.9.0).
    """
    if _SUBJECT.fullmatch(subject) is None:
        raise ValueError(
            f"{subject!r} can't be the subject of a stream: it is made of parts without spaces, "
            "with dots between them"
        )
    parts = subject.split(".")
    if ">" in parts[:-1] or (parts[-1] == ">" and partitions > 1):
        raise ValueError(
            f"{subject!r} can't be the subject of a stream with {partitions} partitions: > is "
            "the last part of a subject, and further partitions append their number to it"
        )


def check_publishable(subject: str) -> None:
    """Raise ValueError for a subject that nothing can be published to.

    NATS takes the message, and nobody gets it: a part that is * or > is no wildcard there.
    """
    if _SUBJECT.fullmatch(subject) is None or {"*", ">"} & set(subject.split(".")):
        raise ValueError(
            f"{subject!r} is no subject that can be published to: it is made of parts without "
            "spaces, with dots between them, and none of them is * or >"
        )
    _check_length("the subject", subject, _SUBJECT_BYTES)


def _check_length(what: str, text: str, limit: int) -> None:
    size = len(text.encode())
    if size > limit:
        raise ValueError(
            f"{what} of a stream has at most {limit:,} bytes of UTF-8, and {text[:40]!r}... has "
            f"{size:,}: a broker can't keep it, and ends"
        )
