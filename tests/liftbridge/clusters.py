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
import grpc

from feedapi_client.liftbridge import LiftbridgeApi
from feedapi_client.testing.liftbridge import (
    LiftbridgeBroker,
    LiftbridgeServer,
)
from tests import components
from tests.http.certificates import Certificate

# The real broker notices soon that a member of a group is gone, so that no test waits long for it.
# Segments are large: what is cut off a log is in one of them.
SETTINGS: Mapping[str, Any] = {
    "metadata.cache.max.age": "1s",
    "cursors.stream.partitions": 2,
    "groups.consumer.timeout": "2s",
    "groups.coordinator.timeout": "2s",
}
CLEANS_OFTEN: Mapping[str, Any] = {**SETTINGS, "streams.cleaner.interval": "200ms"}
"""A broker that removes and compacts soon. With many streams it is never idle."""

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
        try:
            self._cut_index(stream, 1)
        finally:  # other tests need it
            await self.start()

    async def lose(self, stream: str, count: int, *, keep_high_watermark: bool = False) -> None:
        await self.stop()
        try:
            position = self._cut_index(stream, count)
            [log] = self._partition_of(stream).glob("*.log")
            os.truncate(log, position)
            if keep_high_watermark:
                newest = sum(1 for _ in self._entries(stream)) + count - 1
                mark = self._partition_of(stream) / "replication-offset-checkpoint"
                mark.write_text(str(newest))
        finally:  # other tests need it
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


def tls_settings(certificate: Certificate) -> Mapping[str, Any]:
    """Settings of a broker that shows the certificate, and asks its clients for it, too."""
    return {
        "tls.cert": str(certificate.path),
        "tls.key": str(certificate.key),
        "tls.client.auth.enabled": True,
        "tls.client.auth.ca": str(certificate.path),
    }


def trusting(certificate: Certificate, *, shown: bool = False) -> grpc.ChannelCredentials:
    """Credentials that trust the certificate; when `shown`, it is also that of the client."""
    content, key = certificate.path.read_bytes(), certificate.key.read_bytes()
    return grpc.ssl_channel_credentials(content, key if shown else None, content if shown else None)


def require_liftbridge() -> None:
    """Skip the test where the real broker can't be had. In CI it has to be."""
    components.require("liftbridge")


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
