"""A real broker that tests share, and what can be done to it."""

from __future__ import annotations

import os
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import grpc
import orjson

from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgeError,
    LiftbridgePublisher,
    Message,
    Stream,
)
from feedapi_client.testing.liftbridge import LiftbridgeServer
from tests import components
from tests.http.certificates import Certificate
from tests.liftbridge.helpers import SAFETY_NET

# It notices soon that a member of a group is gone, so that no test waits long for it.
# Segments are large: what is cut off a log is in one of them.
SETTINGS: Mapping[str, Any] = {
    "metadata.cache.max.age": "1s",
    "activity.stream.enabled": True,
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
"""An entry of a segment's index: offset in the segment, timestamp, position, size."""
FAILOVER_SECONDS = 180.0
"""Seconds that no failover takes, not even on a busy machine."""


class Broker:
    """A real broker with clients, and the name of a stream that no other test has.

    Attributes:
        publisher: publishes over NATS. A message that is lost times out later than any test.
    """

    def __init__(
        self,
        server: LiftbridgeServer,
        api: LiftbridgeApi,
        publisher: LiftbridgePublisher,
        name: str,
    ) -> None:
        self.server, self.api, self.publisher, self.name = server, api, publisher, name
        self.address, self.nats_url = server.address, server.nats_url

    async def create(
        self, name: str = "", partitions: int = 1, *, subject: str = "", once: bool = False
    ) -> Stream:
        """Create a stream, by default the test's own. `once`: for relays that are exactly once."""
        stream = Stream(name or self.name, subject, partitions)
        await self.api.create_stream(stream, concurrency_control=once)
        return stream

    async def newest(self, name: str = "", partition: int = 0) -> int:
        """Return the offset of a partition's newest message, -1 where there is none."""
        return (await self.api.partition_metadata(name or self.name, partition)).newest_offset

    async def messages(self, name: str = "", partition: int = 0) -> list[Message]:
        """Return what a partition holds."""
        name = name or self.name
        if (newest := await self.newest(name, partition)) < 0:
            return []
        found = self.api.subscribe(name, partition=partition, until=newest)
        return [message async for message in found]

    async def values(self, name: str = "", partition: int = 0) -> list[bytes]:
        return [message.value for message in await self.messages(name, partition)]

    async def numbers(self, name: str = "", partition: int = 0) -> list[int]:
        """Return the numbers of the events in a partition, also of interrupted attempts."""
        return [
            orjson.loads(line)["n"]
            for value in await self.values(name, partition)
            for line in value.split(b"\n")
            if line
        ]

    # What can be done to it

    async def stop(self) -> None:
        """Kill the broker."""
        await anyio.to_thread.run_sync(self.server.kill)

    async def start(self) -> None:
        """Start the broker that was killed, and wait until it knows the test's stream again.

        It answers before it has read its log of streams.
        """
        await anyio.to_thread.run_sync(self.server.start)
        if (self.server.data() / "streams" / self.name).exists():
            with anyio.fail_after(SAFETY_NET):
                while not await self._is_known():  # noqa: ASYNC110
                    await anyio.sleep(0.02)

    async def _is_known(self) -> bool:
        try:
            return bool((await self.api.partition_metadata(self.name)).leader)
        except LiftbridgeError:
            return False

    async def crash(self) -> None:
        """Kill the broker and start it again, before it wrote down its high watermarks."""
        await self.stop()
        await self.start()

    async def tear(self) -> None:
        """Kill the broker between its write of the newest message to the log and to the index."""
        await self.stop()
        try:
            self._cut_index(1)
        finally:  # other tests need it
            await self.start()

    async def lose(self, count: int, *, keep_high_watermark: bool = False) -> None:
        """Kill the broker, let it lose the stream's newest messages, and start it again.

        That is what remains when two leaders of three die within seconds.
        """
        await self.stop()
        try:
            position = self._cut_index(count)
            os.truncate(self._file("*.log"), position)
            if keep_high_watermark:
                self._write_high_watermark(len(self._entries()) + count - 1)
        finally:
            await self.start()

    async def expire(self, before: int) -> None:
        """Stop the broker, remove messages as retention removes segments, and start it again."""
        await self.stop()
        try:
            log, index = self._file("*.log"), self._file("*.index")
            kept = [_INDEX_ENTRY.unpack(entry) for entry in self._entries()][before:]
            start = kept[0][2]
            moved = [(at - before, time, place - start, size) for at, time, place, size in kept]
            content = b"".join(_INDEX_ENTRY.pack(*entry) for entry in moved)
            index.write_bytes(content.ljust(index.stat().st_size, b"\0"))
            log.write_bytes(log.read_bytes()[start:])
            self._write_high_watermark(before + len(kept) - 1)
            for file in (log, index):
                file.rename(file.with_stem(f"{before:020}"))
        finally:
            await self.start()

    def _cut_index(self, count: int) -> int:
        """Delete the last entries of the index, and return where the first of them begins."""
        entries, index = self._entries(), self._file("*.index")
        _, _, position, _ = _INDEX_ENTRY.unpack(entries[-count])
        index.write_bytes(b"".join(entries[:-count]).ljust(index.stat().st_size, b"\0"))
        return int(position)

    def _write_high_watermark(self, offset: int) -> None:
        mark = self._file("*.log").with_name("replication-offset-checkpoint")
        mark.write_text(str(offset))

    def _entries(self) -> list[bytes]:
        """Return the entries of the index."""
        content, size = self._file("*.index").read_bytes(), _INDEX_ENTRY.size
        parts = [content[at : at + size] for at in range(0, len(content), size)]
        return [part for part in parts if any(part)]

    def _file(self, pattern: str) -> Path:
        [file] = (self.server.data() / "streams" / self.name / "0").glob(pattern)
        return file


@asynccontextmanager
async def open_broker(
    server: LiftbridgeServer, name: str, ack_timeout: float = SAFETY_NET, **options: Any
) -> AsyncIterator[Broker]:
    """Connect to a broker. The options are those of the publisher."""
    async with (
        LiftbridgeApi(server.addresses, timeout=SAFETY_NET) as api,
        LiftbridgePublisher(server.nats_url, ack_timeout=ack_timeout, **options) as publisher,
    ):
        yield Broker(server, api, publisher, name)


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
