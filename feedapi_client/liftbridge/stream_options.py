"""The options of a new stream."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from gufo.liftbridge import api_pb2

SNAPSHOT_MESSAGES = 10_000
"""Messages after which a relay that is exactly once writes all its positions again."""
SNAPSHOT_BYTES = 64 * 1024 * 1024
"""Bytes after which it does."""
SNAPSHOT_SECONDS = 3600.0
"""Seconds after which it does, also while its feed is idle."""

_TIMES = 4
"""How often a ledger has to keep what is written from one snapshot to the next one: a broker
removes whole segments, of which the newest may just have begun, and a batch may be long."""
_USUAL_SEGMENT = 256 * 1024 * 1024
"""The broker's default for the bytes of a segment."""
_SMALLEST_MESSAGE = 128
"""Bytes that a message of a ledger takes at least, with its headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What a new stream does with its messages. None leaves an option to the broker's settings.

    Attributes:
        group: the NATS queue group of the stream; a message goes to one stream of the group.
        retention_bytes, retention_messages, retention_seconds: the oldest segments are removed
            when a partition has more. 0: no limit.
        cleaner_seconds: the interval of removing and compacting.
        segment_bytes, segment_seconds: when a new segment begins.
        compact: keep the newest message of each key only.
        compact_goroutines: how many of the broker's goroutines compact a partition at once.
        auto_pause_seconds: pause a partition that got no message for so long. 0: never.
        auto_pause_unless_subscribed: do not pause while somebody is subscribed.
        encryption: encrypt values; the broker needs a key.

    Raises:
        ValueError: a number is negative, or the group has spaces.
    """

    group: str = ""
    retention_bytes: int | None = None
    retention_messages: int | None = None
    retention_seconds: float | None = None
    cleaner_seconds: float | None = None
    segment_bytes: int | None = None
    segment_seconds: float | None = None
    compact: bool | None = None
    compact_goroutines: int | None = None
    auto_pause_seconds: float | None = None
    auto_pause_unless_subscribed: bool | None = None
    encryption: bool | None = None

    def __post_init__(self) -> None:
        # With a negative interval, or a group that NATS refuses, a broker ends with a panic when it
        # makes the stream, and each time when it is started again (Liftbridge 1.9.0).
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"{field.name} must be a number that is not negative, not {value}")
        if any(character.isspace() for character in self.group):
            raise ValueError(f"the group of a stream has no spaces, and {self.group!r} has")

    def write_to(self, request: api_pb2.CreateStreamRequest, *, ledger: bool) -> None:
        """Set the options in a request.

        By default a `ledger` is not compacted or paused, and its messages don't get too old: an
        idle relay would lose its positions.

        Raises:
            ValueError: a ledger would not keep its newest snapshot.
        """
        new = self._for_ledger() if ledger else self
        request.group = new.group
        for name, value in (
            ("retentionMaxBytes", new.retention_bytes),
            ("retentionMaxMessages", new.retention_messages),
            ("retentionMaxAge", _milliseconds(new.retention_seconds)),
            ("cleanerInterval", _milliseconds(new.cleaner_seconds)),
            ("segmentMaxBytes", new.segment_bytes),
            ("segmentMaxAge", _milliseconds(new.segment_seconds)),
            ("compactEnabled", new.compact),
            ("compactMaxGoroutines", new.compact_goroutines),
            ("autoPauseTime", _milliseconds(new.auto_pause_seconds)),
            ("autoPauseDisableIfSubscribers", new.auto_pause_unless_subscribed),
            ("encryption", new.encryption),
        ):
            if value is not None:
                # The assignment of a default value would leave the option unset.
                getattr(request, name).SetInParent()
                getattr(request, name).value = value

    def _for_ledger(self) -> StreamOptions:
        self.check_ledger()
        segment, largest = self.segment_bytes, self._largest_segment()
        if segment is None and largest < _USUAL_SEGMENT:
            segment = int(largest)
        return replace(
            self,
            compact=bool(self.compact),
            auto_pause_seconds=self.auto_pause_seconds or 0,
            retention_seconds=self.retention_seconds or 0,
            segment_bytes=segment,
        )

    def check_ledger(self) -> None:
        """Raise ValueError when a ledger with these options would lose its positions."""
        for name, kept, snapshot in (
            ("retention_messages", self.retention_messages, SNAPSHOT_MESSAGES),
            ("retention_bytes", self.retention_bytes, SNAPSHOT_BYTES),
        ):
            if kept and kept < _TIMES * snapshot:
                raise ValueError(
                    f"{name}={kept:,} is too little for a stream with concurrency control: a relay "
                    f"that is exactly once writes its positions again after {snapshot:,}, and "
                    f"would lose them. Keep {_TIMES * snapshot:,} or more, or all (0)"
                )
        if self.retention_seconds and self.retention_seconds < _TIMES * SNAPSHOT_SECONDS:
            raise ValueError(
                f"retention_seconds={self.retention_seconds:g} is too little for a stream with "
                "concurrency control: a relay that is exactly once writes its positions again "
                f"after {SNAPSHOT_SECONDS:g} seconds, and not while it is stopped. Keep "
                f"{_TIMES * SNAPSHOT_SECONDS:g} seconds or more, or all (0)"
            )
        if self.segment_bytes is not None and self._largest_segment() < self.segment_bytes:
            raise ValueError(
                f"segment_bytes={self.segment_bytes:,} is too much beside what is kept: a broker "
                "removes whole segments, and with them the positions of a relay that is exactly "
                f"once. It is at most {self._largest_segment():,}; by default it fits"
            )

    def _largest_segment(self) -> float:
        """Return the bytes of the largest segment that lets a ledger keep its positions."""
        kept = (self.retention_bytes, (self.retention_messages or 0) * _SMALLEST_MESSAGE)
        return min((limit // _TIMES for limit in kept if limit), default=math.inf)


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
