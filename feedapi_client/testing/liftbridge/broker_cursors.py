"""The cursors of the stand-in broker: messages in a stream of its own, as in a real one."""

from __future__ import annotations

import zlib

from feedapi_client.liftbridge.stream_name import Stream
from feedapi_client.testing.liftbridge.streams import BrokerStream, BrokerStreams, StoredMessage

CURSORS = "__cursors"
PARTITIONS = 2


class BrokerCursors:
    """Sets and fetches cursors. What was fetched once is remembered until the next start."""

    def __init__(self, broker: BrokerStreams) -> None:
        self._broker = broker
        self._remembered: dict[str, int] = {}

    async def set(self, stream: str, cursor_id: str, partition: int, offset: int) -> None:
        """Append a cursor."""
        key = f"{cursor_id},{stream},{partition}"
        message = StoredMessage(0, str(offset).encode(), key=key.encode())
        await self._broker.store(self._kept(), _kept_in(key), message)
        self._remembered[key] = offset

    def fetch(self, stream: str, cursor_id: str, partition: int) -> int:
        """Return the largest offset among the messages that can be read; -1 when there is none."""
        key = f"{cursor_id},{stream},{partition}"
        if key not in self._remembered:
            found = self._kept().visible(_kept_in(key), 0)
            offsets = [int(message.value) for message in found if message.key == key.encode()]
            self._remembered[key] = max(offsets, default=-1)
        return self._remembered[key]

    def forget(self) -> None:
        """Forget what was fetched, as a broker that starts."""
        self._remembered.clear()

    def _kept(self) -> BrokerStream:
        return self._broker.streams[CURSORS]


def cursors_stream() -> Stream:
    """Return the stream that keeps the cursors."""
    return Stream(CURSORS, CURSORS, PARTITIONS)


def _kept_in(key: str) -> int:
    return zlib.crc32(key.encode()) % PARTITIONS
