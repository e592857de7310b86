"""Offsets that the cluster keeps under a name."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gufo.liftbridge import api_pb2

from feedapi_client.liftbridge.brokers import NO_CURSORS, Brokers, StreamMissingError
from feedapi_client.liftbridge.liftbridge_errors import LiftbridgeError
from feedapi_client.liftbridge.subscription import partition_metadata

_STREAM = "__cursors"

T = TypeVar("T")


class ClusterCursors:
    """The cursors of a cluster. They are messages in a stream of its own, which has partitions."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def set(self, stream: str, cursor_id: str, offset: int, partition: int) -> None:
        """Store an offset under a name."""

        async def call(kept_in: int, _: int) -> None:
            await self._set(kept_in, stream, cursor_id, offset, partition)

        await self._retry(stream, cursor_id, partition, call)

    async def fetch(self, stream: str, cursor_id: str, partition: int) -> int | None:
        """Return the offset stored under a name; None when there is none.

        A broker that starts answers with a cursor from before its newest ones, or with none, until
        something is appended to its stream of cursors, and remembers that answer. So that is looked
        at first, and a cursor is stored that nobody uses.
        """
        request = api_pb2.FetchCursorRequest(stream=stream, partition=partition, cursorId=cursor_id)

        async def call(kept_in: int, partitions: int) -> int | None:
            found = await partition_metadata(self._brokers, _STREAM, kept_in, resume=True)
            if found.high_watermark < found.newest_offset:
                await self._set(kept_in, _STREAM, _unused_cursor(kept_in, partitions), 0, 0)
            leader = await self._brokers.leader(_STREAM, kept_in)
            response = await self._brokers.call(stream, "FetchCursor", request, [leader])
            return int(response.offset) if response.offset >= 0 else None

        return await self._retry(stream, cursor_id, partition, call)

    async def _retry(
        self, stream: str, cursor_id: str, partition: int, call: Callable[[int, int], Awaitable[T]]
    ) -> T:
        """Repeat a call with the partition that keeps the cursor and their number."""

        async def once() -> T:
            count = await self._partitions()
            return await call(_kept_in(cursor_id, stream, partition, count), count)

        return await self._brokers.retry(once)

    async def _partitions(self) -> int:
        try:
            cluster = await self._brokers.metadata([_STREAM])
        except StreamMissingError as error:
            if self._brokers.has_seen(_STREAM):
                raise
            raise LiftbridgeError(NO_CURSORS) from error
        return cluster.streams[_STREAM].stream.partitions

    async def _set(
        self, kept_in: int, stream: str, cursor_id: str, offset: int, partition: int
    ) -> None:
        request = api_pb2.SetCursorRequest(
            stream=stream, partition=partition, cursorId=cursor_id, offset=offset
        )
        leader = await self._brokers.leader(_STREAM, kept_in)
        await self._brokers.call(stream, "SetCursor", request, [leader])


def _kept_in(cursor_id: str, stream: str, partition: int, count: int) -> int:
    """Return the partition that keeps a cursor, as the broker computes it."""
    return zlib.crc32(f"{cursor_id},{stream},{partition}".encode()) % count


def _unused_cursor(kept_in: int, partitions: int) -> str:
    """Return a name that nobody uses for a cursor that this partition keeps."""
    names = (f"feedapi-no-op-{n}" for n in itertools.count())
    return next(name for name in names if _kept_in(name, _STREAM, 0, partitions) == kept_in)
