"""Publishing over gRPC, on both brokers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from feedapi_client import FeedConsumer
from feedapi_client.liftbridge import (
    AckPolicy,
    AckTimeoutError,
    IncorrectOffsetError,
    LiftbridgeApi,
    LiftbridgeGrpcPublisher,
    LiftbridgePublisher,
    MessageTooLargeError,
    NoStreamError,
    PublishRefusedError,
    Relay,
    Stream,
    StreamCursorStore,
    StreamOptions,
)
from feedapi_client.testing import Publisher
from tests.liftbridge.clusters import Cluster
from tests.liftbridge.contract.reading import FORMATS, KEY, read, relayed, save
from tests.liftbridge.helpers import SAFETY_NET

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
async def grpc_publisher(cluster: Cluster) -> AsyncIterator[LiftbridgeGrpcPublisher]:
    async with LiftbridgeGrpcPublisher(cluster.address, ack_timeout=SAFETY_NET) as publisher:
        yield publisher


async def test_messages_over_grpc_are_stored_in_order_with_key_and_headers(
    cluster: Cluster, api: LiftbridgeApi, grpc_publisher: LiftbridgeGrpcPublisher, name: str
) -> None:
    stream = Stream(name, partitions=2)
    # One segment: Liftbridge 1.9 may crash where one ends while its cleaner looks at it.
    await api.create_stream(stream, options=StreamOptions(segment_bytes=1 << 24))
    values = [b"%d" % n for n in range(3000)]
    acks = await grpc_publisher.publish_many(
        stream,
        values,
        keys=[b"k"] * 3000,
        headers={"all": b"1"},
        headers_each=[{"n": value} for value in values],
    )
    partition = stream.partition_of(b"k")
    assert [ack and ack.offset for ack in acks] == list(range(3000))
    found = [m async for m in api.subscribe(name, partition=partition, until=2999)]
    assert [(m.value, m.key, m.headers["n"], m.headers["all"]) for m in found] == [
        (value, b"k", value, b"1") for value in values
    ]
    assert await grpc_publisher.publish(stream, b"x", ack_policy=AckPolicy.NONE) is None
    assert grpc_publisher.in_flight == 0


async def test_a_refused_message_over_grpc_has_the_error_that_it_has_over_nats(
    cluster: Cluster, api: LiftbridgeApi, grpc_publisher: LiftbridgeGrpcPublisher, name: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    await grpc_publisher.publish(name, b"x", expected_offset=0)
    with pytest.raises(IncorrectOffsetError, match=f"stream {name}"):
        await grpc_publisher.publish(name, b"x", expected_offset=5)
    with pytest.raises(NoStreamError, match="no such stream"):
        await grpc_publisher.publish("nothing", b"x")
    with pytest.raises(MessageTooLargeError, match="over the limit"):
        await grpc_publisher.publish(name, b"x" * 2_000_000)
    grpc_publisher.max_message_bytes = None
    with pytest.raises(MessageTooLargeError, match="refused the message"):
        await grpc_publisher.publish(name, b"x" * 1_048_000 + b"y" * 600)
    await api.set_readonly(name)
    with pytest.raises(PublishRefusedError, match="readonly"):
        await grpc_publisher.publish(name, b"x", expected_offset=1)


async def test_a_message_over_grpc_wakes_a_paused_partition(
    cluster: Cluster, api: LiftbridgeApi, grpc_publisher: LiftbridgeGrpcPublisher, name: str
) -> None:
    await api.create_stream(name)
    await api.pause_stream(name)
    await grpc_publisher.publish(name, b"x")
    assert await read(api.subscribe(name), 1) == [0]


@pytest.mark.parametrize("format", FORMATS)
async def test_a_relay_over_grpc_survives_a_crash_of_the_broker(
    cluster: Cluster,
    api: LiftbridgeApi,
    grpc_publisher: LiftbridgeGrpcPublisher,
    name: str,
    format: str,
) -> None:
    await api.create_stream(name, concurrency_control=True)
    grpc_publisher.ack_timeout = 5.0
    store = StreamCursorStore(grpc_publisher, api, name, format=format, give_up_after=SAFETY_NET)
    await store.load(KEY)
    for revision in range(1, 3):
        await save(store, revision, 2 * revision, 2 * revision + 1)
        await cluster.crash()
    await save(store, 3, 6)
    assert await relayed(api, name, 5) == list(range(2, 7))


async def test_a_publisher_over_grpc_reports_what_is_in_flight_when_the_broker_dies(
    cluster: Cluster, api: LiftbridgeApi, grpc_publisher: LiftbridgeGrpcPublisher, name: str
) -> None:
    await api.create_stream(name)
    await grpc_publisher.publish(name, b"x")
    await cluster.stop()
    try:
        # What was under way when the call ended may be stored; what comes later is not sent.
        text = ""
        with anyio.fail_after(30):
            while "not sent" not in text:
                with pytest.raises(AckTimeoutError) as caught:
                    await grpc_publisher.publish(name, b"y", timeout=0.5)
                text = str(caught.value)
                assert "not sent" in text or "may be stored" in text
    finally:
        await cluster.start()
    assert grpc_publisher.in_flight == 0


@pytest.mark.parametrize("way", ["nats", "grpc"])
async def test_both_publishers_refuse_and_take_the_same(
    cluster: Cluster, api: LiftbridgeApi, name: str, way: str
) -> None:
    await api.create_stream(name)
    async with (
        LiftbridgePublisher(cluster.nats_url)
        if way == "nats"
        else LiftbridgeGrpcPublisher(cluster.address) as publisher
    ):
        with pytest.raises(ValueError, match="has the partitions 0 to 0, not 1"):
            await publisher.publish(name, b"x", partition=1)
        with pytest.raises(ValueError, match="has the partitions 0 to 0, not -1"):
            await publisher.publish(name, b"x", partition=-1)
        with pytest.raises(ValueError, match="'subject' and 'reply'"):
            await publisher.publish_many(name, [b"x"], headers_each=[{"reply": b"x"}])
        with pytest.raises(ValueError, match="timeout must be positive, not 0"):
            await publisher.publish_many(name, [b"x"], timeout=0)
        for wrong in (None, "text", 5):
            with pytest.raises(TypeError, match="a value is bytes"):
                await publisher.publish(name, wrong)  # type: ignore[arg-type]
        assert publisher.in_flight == 0
        await publisher.publish_many(name, [bytearray(b"a"), memoryview(b"b")])
    assert [m.value async for m in api.subscribe(name, until=1)] == [b"a", b"b"]


async def test_a_relay_over_grpc_to_a_missing_stream_ends_soon(
    cluster: Cluster,
    grpc_publisher: LiftbridgeGrpcPublisher,
    name: str,
    feed: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("feedapi_client.liftbridge.at_least_once._LOOKED_FOR", 1.0)
    with anyio.fail_after(SAFETY_NET):
        async with FeedConsumer(feed.url or "", follow=False) as consumer:
            with pytest.raises(NoStreamError, match="no such stream"):
                await Relay(consumer, grpc_publisher, name).run()
