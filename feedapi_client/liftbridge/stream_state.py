"""What a relay that is exactly once knows of its stream. No I/O."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from feedapi_client.liftbridge.errors import StreamGapError
from feedapi_client.model import Position

# A broker that starts may think that it still leads the partition, and have fewer messages. It
# learns better within seconds.
_LOST_AFTER = 10.0


@dataclass(slots=True)
class StreamState:
    """What is known of a partition of a stream.

    Attributes:
        next_offset: the offset that the next message will get.
        snapshot: the offset from which all positions can be read.
        positions: the positions by partition of the feed.
        lost_from: the end of the stream, while that is before `next_offset`.
    """

    next_offset: int = 0
    snapshot: int = 0
    positions: dict[int, Position] = field(default_factory=dict)
    lost_from: int | None = None
    _short_since: float = 0.0

    def wrote(self, count: int) -> None:
        """Count messages that were acked."""
        self.next_offset += count
        self.lost_from = None

    def check_end(self, end: int, stream: str) -> None:
        """Compare with the offset of the next message, according to a broker.

        Raises:
            StreamGapError: it has been too low for some seconds.
        """
        if end >= self.next_offset:
            self.lost_from = None
            return
        now = time.monotonic()
        if self.lost_from is None:
            self._short_since = now
        self.lost_from = end
        if now - self._short_since >= _LOST_AFTER:
            self.raise_if_lost(stream)

    def raise_if_lost(self, stream: str) -> None:
        """Raise `StreamGapError` when the stream ended before `next_offset`."""
        if self.lost_from is not None:
            raise StreamGapError(
                f"the broker lost the messages from offset {self.lost_from} on, which it had "
                "acked: start the relay again, which then writes their events again",
                stream=stream,
                offset=self.lost_from,
            )
