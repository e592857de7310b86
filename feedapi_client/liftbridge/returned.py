"""What a subscription has returned, to know those messages again in later calls. No I/O.

Brokers that lose two leaders within seconds may lose messages that all replicas had, and that were
read and acked (seen on Liftbridge 1.9.0: a follower that can't reach its new leader truncates its
log to its high watermark, which is behind the leader's, and may be the next leader). Their offsets
are given to the next messages. A subscription that only asked for the next offset would miss those.
So a later call begins with messages that were returned, and compares them. Two messages with one
offset differ in the time at which a leader received them, in nanoseconds.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left

from feedapi_client.liftbridge.liftbridge_errors import StreamGapError
from feedapi_client.liftbridge.messages_pb2 import Message

logger = logging.getLogger(__name__)

_REMEMBERED = 16_384
"""Messages that are remembered at least, with 16 bytes for each; at most twice as many."""


class LookBackError(Exception):
    """The call has to be made again, from the oldest message that is remembered on."""


class ReturnedMessages:
    """Offsets and times of the newest messages that a subscription returned.

    Attributes:
        compare_from: the offset of the returned message with which the next call begins; None where
            nothing is compared.
    """

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._offsets = array("q")
        self._times = array("q")
        self._forgot_some = False
        self.compare_from: int | None = None
        # The newest message of this call that was returned, in this call or an earlier one. Those
        # before it are known to be the same.
        self._newest_of_call: int | None = None

    def __bool__(self) -> bool:
        return bool(self._offsets)

    def begin_call(self) -> None:
        """Say that a call begins."""
        self._newest_of_call = None

    def compare_newest(self) -> None:
        """Let the next call begin with the newest message."""
        self.compare_from = self._offsets[-1] if self else None

    def compare_all(self) -> None:
        """Let the next call begin with the oldest message that is remembered."""
        self.compare_from = self._offsets[0]

    def compare_up_to(self, offset: int) -> int:
        """Let the next call begin with that message, if it began after it, and return where."""
        self.compare_from = max(min(self.compare_from or 0, offset), self._offsets[0])
        return self.compare_from

    def add(self, message: Message) -> None:
        """Remember a message that is returned."""
        self._offsets.append(message.offset)
        self._times.append(message.timestamp)
        self._newest_of_call = message.offset
        if len(self._offsets) > 2 * _REMEMBERED:
            del self._offsets[:_REMEMBERED], self._times[:_REMEMBERED]
            self._forgot_some = True

    def includes(self, message: Message) -> bool:
        """Whether the message was returned before.

        When the broker has another message at the offset of one that was returned, that one and
        those after it are forgotten.

        Raises:
            LookBackError: that is so, and may be so at earlier offsets.
            StreamGapError: that is so at the oldest offset that is remembered.
        """
        if message.offset > self._offsets[-1]:
            return False
        if self._holds(message):
            self._newest_of_call = message.offset
            return True
        if message.offset < self._offsets[0]:
            return True
        # A broker that was killed may have two messages with one offset, which come in one call.
        if message.offset != self._newest_of_call:
            self._take_back(message.offset)
        return False

    def _holds(self, message: Message) -> bool:
        at = bisect_left(self._offsets, message.offset)
        while at < len(self._offsets) and self._offsets[at] == message.offset:
            if self._times[at] == message.timestamp:
                return True
            at += 1
        return False

    def _take_back(self, offset: int) -> None:
        oldest = self._offsets[0]
        if self._newest_of_call is None and self.compare_from != oldest:
            raise LookBackError
        if self._newest_of_call is None and self._forgot_some:
            raise StreamGapError(
                f"the broker lost messages that were read, from offset {oldest} or less on: read "
                "again from an earlier offset",
                stream=self._stream,
                offset=oldest,
            )
        logger.warning(
            "stream %s: the broker lost messages that were read, from offset %d on, and stored "
            "others there",
            self._stream,
            offset,
            extra={"stream": self._stream, "offset": offset},
        )
        at = bisect_left(self._offsets, offset)
        del self._offsets[at:], self._times[at:]
