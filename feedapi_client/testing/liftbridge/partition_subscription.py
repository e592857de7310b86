"""A subscription of the stand-in broker: where it starts, and what it says where it ends."""

from __future__ import annotations

from typing import Any

import grpc
from gufo.liftbridge import api_pb2

from feedapi_client.testing.liftbridge.streams import BrokerStream, GroupReader, StoredMessage


class SubscriptionEnded(Exception):  # noqa: N818 - a read-only stream may have an end
    """The broker ends the subscription with this status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class PartitionSubscription:
    """Reads a partition as a real broker does.

    Above the high watermark it starts at the next message to become visible, whatever was asked.

    Raises:
        SubscriptionEnded: the partition is paused or at its end.
    """

    def __init__(self, stream: BrokerStream, request: Any) -> None:
        self._stream = stream
        self._partition = int(request.partition)
        self._group = (self._partition, str(request.consumer.groupId))
        self._member = GroupReader(request.consumer.consumerId, request.consumer.groupEpoch)
        self._check_assigned()
        self._check_paused("Failed to create stream reader: segment has been closed")
        if self._high_watermark >= self._following:
            raise SubscriptionEnded(
                grpc.StatusCode.INTERNAL, "Failed to create stream reader: segment not found"
            )
        start, self._stop = self._start(request), self._stop_offset(request)
        if self._stop is not None and self._stop < start:
            raise SubscriptionEnded(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"Stop offset is before start offset: {self._stop} < {start}",
            )
        self._next = min(start, self._high_watermark + 1)

    async def begin(self) -> None:
        """Take the place of the member of the group that read the partition so far."""
        if self._group[1]:
            self._stream.group_readers[self._group] = self._member
            await self._stream.notify()

    @property
    def is_replaced(self) -> bool:
        """Whether another member of the group reads the partition now."""
        return bool(self._group[1]) and (
            self._stream.group_readers.get(self._group) is not self._member
        )

    @property
    def has_news(self) -> bool:
        """Whether there is a message to read, or the subscription ends."""
        return (
            self._high_watermark >= self._next
            or self._partition in self._stream.paused
            or self._partition in self._stream.readonly
            or self.is_replaced
        )

    def read(self) -> list[StoredMessage]:
        """Return the messages that became visible."""
        self._check_paused("segment has been closed")
        found = self._stream.visible(self._partition, self._next)
        self._next = max(self._next, self._high_watermark + 1)
        stops = [i for i, message in enumerate(found) if message.offset == self._stop]
        return found[: stops[0] + 1] if stops else found

    def check_end(self) -> None:
        """Raise `SubscriptionEnded` behind the stop offset, and at the end of a read-only one."""
        if self._stop is not None and self._next > self._stop:
            raise SubscriptionEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, "Stop offset reached")
        if self._partition in self._stream.readonly and self._next >= self._following:
            raise SubscriptionEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, "End of readonly partition")

    @property
    def _high_watermark(self) -> int:
        return self._stream.high_watermark[self._partition]

    @property
    def _following(self) -> int:
        return self._stream.next_offset[self._partition]

    def _check_assigned(self) -> None:
        current = self._stream.group_readers.get(self._group)
        if current is not None and current.epoch > self._member.epoch:
            raise SubscriptionEnded(
                grpc.StatusCode.FAILED_PRECONDITION,
                "Consumer is not currently assigned this partition",
            )

    def _check_paused(self, text: str) -> None:
        if self._partition in self._stream.paused:
            raise SubscriptionEnded(grpc.StatusCode.INTERNAL, text)

    def _start(self, request: Any) -> int:
        messages = self._stream.partitions[self._partition]
        match request.startPosition:
            case api_pb2.OFFSET:
                return int(request.startOffset)
            case api_pb2.TIMESTAMP:
                later = (m.offset for m in messages if m.timestamp >= request.startTimestamp)
                return next(later, self._following)
            case api_pb2.EARLIEST:
                return messages[0].offset if messages else 0
            case api_pb2.LATEST:
                return max(self._following - 1, 0)
            case _:
                return self._following

    def _stop_offset(self, request: Any) -> int | None:
        messages = self._stream.partitions[self._partition]
        match request.stopPosition:
            case api_pb2.STOP_OFFSET:
                return int(request.stopOffset)
            case api_pb2.STOP_TIMESTAMP:
                earlier = (m.offset for m in messages if m.timestamp <= request.stopTimestamp)
                return max(earlier, default=-1)
            case api_pb2.STOP_LATEST:
                if not messages:
                    raise SubscriptionEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, "Stream is empty")
                return self._following - 1
        return self._following - 1 if self._partition in self._stream.readonly else None
