"""The two brokers that the contract tests run against: the stand-in, and the real one."""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from feedapi_client.liftbridge import LiftbridgeApi
from feedapi_client.testing.liftbridge import (
    LiftbridgeBroker,
    LiftbridgeServer,
    find_liftbridge,
)

# The real broker cleans up often and notices soon that a member of a group is gone, so that no test
# waits long for it.
SETTINGS: Mapping[str, Any] = {
    "streams.cleaner.interval": "200ms",
    "streams.segment.max.bytes": 1024,
    "metadata.cache.max.age": "1s",
    "cursors.stream.partitions": 2,
    "groups.consumer.timeout": "2s",
    "groups.coordinator.timeout": "2s",
}


# Several brokers: one that is dead is noticed sooner than by default. A follower that is caught up
# asks its leader every `max.idle.wait`, which has to be below the two limits before it.
FAILOVER_SETTINGS: Mapping[str, Any] = {
    "clustering.replica.max.leader.timeout": "3s",
    "clustering.replica.max.lag.time": "5s",
    "clustering.replica.max.idle.wait": "2s",
    "clustering.replica.fetch.timeout": "1s",
    "metadata.cache.max.age": "1s",
}
GROUP_SETTINGS: Mapping[str, Any] = {
    **FAILOVER_SETTINGS,
    "cursors.stream.partitions": 1,
    "cursors.stream.replication.factor": 3,
    "groups.consumer.timeout": "2s",
    "groups.coordinator.timeout": "2s",
}
_INDEX_ENTRY = struct.Struct(">iqii")
"""An entry of a segment's index: offset, timestamp, position, size."""
FAILOVER_SECONDS = 180.0
"""Seconds that no failover takes, not even on a busy machine."""


class Cluster(ABC):
    """A broker that can be harmed. `address` is its gRPC API, `nats_url` where publishers go."""

    nats_url: str
    address: str

    @abstractmethod
    async def crash(self) -> None:
        """Kill the broker and start it again, before it wrote down its high watermarks."""

    @abstractmethod
    async def stop(self) -> None:
        """Kill the broker."""

    @abstractmethod
    async def start(self) -> None:
        """Start the broker that was killed."""

    @abstractmethod
    async def tear(self, stream: str) -> None:
        """Kill the broker between its write of the newest message to the log and to the index."""

    @abstractmethod
    async def lose(self, stream: str, count: int, *, keep_high_watermark: bool = False) -> None:
        """Kill the broker, let it lose its newest messages, and start it again.

        That is what remains when two leaders of three die within seconds.
        """

    @abstractmethod
    async def compact(self, stream: str) -> None:
        """Let the broker compact the stream, where it does that at all."""


class StandIn(Cluster):
    def __init__(self, broker: LiftbridgeBroker, nats_url: str) -> None:
        self.broker, self.nats_url, self.address = broker, nats_url, broker.address

    async def crash(self) -> None:
        await self.broker.restart()

    async def stop(self) -> None:
        await self.broker.stop()

    async def start(self) -> None:
        await self.broker.start()

    async def tear(self, stream: str) -> None:
        await self.broker.stop()
        self.broker.tear(stream)
        await self.broker.start()

    async def lose(self, stream: str, count: int, *, keep_high_watermark: bool = False) -> None:
        await self.broker.stop()
        self.broker.lose(stream, count, keep_high_watermark=keep_high_watermark)
        await self.broker.start()

    async def compact(self, stream: str) -> None:
        await self.broker.compact(stream)


class Real(Cluster):
    def __init__(self, server: LiftbridgeServer, nats_url: str) -> None:
        self.server, self.nats_url, self.address = server, nats_url, server.address

    async def crash(self) -> None:
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        await anyio.to_thread.run_sync(self.server.kill)

    async def start(self) -> None:
        await anyio.to_thread.run_sync(self.server.start)

    async def tear(self, stream: str) -> None:
        await self.stop()
        self._cut_index(stream, 1)
        await self.start()

    async def lose(self, stream: str, count: int, *, keep_high_watermark: bool = False) -> None:
        await self.stop()
        position = self._cut_index(stream, count)
        [log] = self._partition_of(stream).glob("*.log")
        os.truncate(log, position)
        if keep_high_watermark:
            newest = sum(1 for _ in self._entries(stream)) + count - 1
            mark = self._partition_of(stream) / "replication-offset-checkpoint"
            mark.write_text(str(newest))
        await self.start()

    def _cut_index(self, stream: str, count: int) -> int:
        """Delete the last entries of the index, and return where the first of them begins."""
        [index] = self._partition_of(stream).glob("*.index")
        content, entries = bytearray(index.read_bytes()), self._entries(stream)
        _, _, position, _ = _INDEX_ENTRY.unpack_from(content, entries[-count])
        content[entries[-count] :] = bytes(len(content) - entries[-count])
        index.write_bytes(content)
        return int(position)

    def _entries(self, stream: str) -> list[int]:
        """Return where the entries of the index begin."""
        [index] = self._partition_of(stream).glob("*.index")
        content, size = index.read_bytes(), _INDEX_ENTRY.size
        return [at for at in range(0, len(content), size) if any(content[at : at + size])]

    def _partition_of(self, stream: str) -> Path:
        return self.server.data() / "streams" / stream / "0"

    async def compact(self, stream: str) -> None:
        """Nothing: its cleaner runs by itself, and the tests wait for what it does."""


def require_liftbridge() -> None:
    """Skip the test where the real broker is not installed. In CI it has to be."""
    if find_liftbridge() is None and not os.environ.get("CI"):
        pytest.skip(
            "the real Liftbridge is not installed: "
            "go install github.com/liftbridge-io/liftbridge@v1.9.0"
        )


async def in_sync_leader(server: LiftbridgeServer, api: LiftbridgeApi, stream: str) -> int:
    """Wait until all replicas of partition 0 are in sync, and return the number of its leader.

    A leader that dies while no other replica is in sync has no successor.
    """
    with anyio.fail_after(FAILOVER_SECONDS):
        while True:
            found = await api.partition_metadata(stream)
            if len(found.isr) == len(server.addresses):
                return server.node_of(found.leader)
            await anyio.sleep(0.1)
