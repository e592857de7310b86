"""Compaction, on both brokers."""

from __future__ import annotations

import anyio
import pytest

from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgePublisher,
    StreamGapError,
    StreamOptions,
)
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from tests.liftbridge.clusters import CLEANS_OFTEN, Cluster, require_liftbridge
from tests.liftbridge.contract.reading import relayed
from tests.liftbridge.helpers import SAFETY_NET

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def write_with_keys(publisher: LiftbridgePublisher, name: str, count: int) -> None:
    """Write events of one key as a relay does, one a batch."""
    for n in range(count):
        await publisher.publish(
            name,
            b'{"n":%d}' % n,
            key=b"k",
            expected_offset=n,
            headers={
                "feedapi-attempt": b"a%d" % n,
                "feedapi-index": b"0",
                "feedapi-count": b"1",
                "feedapi-format": b"events",
                "feedapi-snapshot": b"0",
                "feedapi-partition": b"0",
                "feedapi-cursor": b"c%d" % n,
            },
        )


async def compacted(cluster: Cluster, api: LiftbridgeApi, name: str) -> list[int]:
    """Wait until messages in the middle are gone, and return the offsets of the others."""
    with anyio.fail_after(SAFETY_NET):
        while True:
            await cluster.compact(name)
            found = [m.offset async for m in api.subscribe(name, "earliest", until=COUNT - 1)]
            if len(found) < COUNT:
                return found


COUNT = 60
COMPACTED = StreamOptions(compact=True, cleaner_seconds=0.2, segment_bytes=1024)


async def test_a_reader_refuses_a_stream_that_was_compacted(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name, concurrency_control=True, options=COMPACTED)
    await write_with_keys(publisher, name, COUNT)
    await compacted(cluster, api, name)
    with pytest.raises(StreamGapError, match="compaction"):
        await relayed(api, name, COUNT, start=0)


async def test_the_end_of_a_subscription_is_not_overshot_when_its_message_is_gone(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name, options=COMPACTED)
    await publisher.publish_many(name, [b"%d" % n for n in range(COUNT)], keys=[b"k"] * COUNT)
    left = await compacted(cluster, api, name)
    until = left[0] - 1 if left[0] else next(n for n in range(COUNT) if n not in left)
    found = [message.offset async for message in api.subscribe(name, 0, until=until)]
    assert found == [offset for offset in left if offset <= until]


async def test_a_ledger_is_not_compacted_or_paused_where_the_broker_does_that_by_default(
    nats_server: NatsServer, anyio_backend: str, name: str
) -> None:
    require_liftbridge()
    settings = {
        **CLEANS_OFTEN,
        "streams.segment.max.bytes": 1024,
        "streams.compact.enabled": True,
        "streams.auto.pause.time": "200ms",
    }
    with LiftbridgeServer(nats_server.url, settings=settings) as server:
        async with (
            LiftbridgeApi(server.address) as api,
            LiftbridgePublisher(nats_server.url, ack_timeout=SAFETY_NET) as publisher,
        ):
            await api.create_stream(name, concurrency_control=True)
            other = f"{name}-other"
            await api.create_stream(other, options=StreamOptions(cleaner_seconds=0.2))
            await write_with_keys(publisher, name, COUNT)
            # The other stream shows that the broker has done both to whom it does it.
            with anyio.fail_after(SAFETY_NET):
                while not (await api.metadata(other)).partitions[0].paused:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            assert not (await api.metadata(name)).partitions[0].paused
            assert await relayed(api, name, COUNT, start=0) == list(range(COUNT))
