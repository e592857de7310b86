"""The options of a new stream."""

from __future__ import annotations

from dataclasses import dataclass

from gufo.liftbridge import api_pb2


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

    def write_to(self, request: api_pb2.CreateStreamRequest, *, ledger: bool) -> None:
        """Set the options in a request. A `ledger` is not compacted or paused by default."""
        compact, pause = self.compact, self.auto_pause_seconds
        if ledger:
            compact = False if compact is None else compact
            pause = 0 if pause is None else pause
        request.group = self.group
        for name, value in (
            ("retentionMaxBytes", self.retention_bytes),
            ("retentionMaxMessages", self.retention_messages),
            ("retentionMaxAge", _milliseconds(self.retention_seconds)),
            ("cleanerInterval", _milliseconds(self.cleaner_seconds)),
            ("segmentMaxBytes", self.segment_bytes),
            ("segmentMaxAge", _milliseconds(self.segment_seconds)),
            ("compactEnabled", compact),
            ("compactMaxGoroutines", self.compact_goroutines),
            ("autoPauseTime", _milliseconds(pause)),
            ("autoPauseDisableIfSubscribers", self.auto_pause_unless_subscribed),
            ("encryption", self.encryption),
        ):
            if value is not None:
                # The assignment of a default value would leave the option unset.
                getattr(request, name).SetInParent()
                getattr(request, name).value = value


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
