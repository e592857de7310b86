"""Publishing over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from feedapi_client import FeedConsumer
from feedapi_client.liftbridge import (
    AckPolicy,
    AckTimeoutError,
    IncorrectOffsetError,
    LiftbridgeError,
    LiftbridgeGrpcPublisher,
    MessageTooLargeError,
    NoStreamError,
    PublishRefusedError,
    Relay,
    Stream,
    StreamCursorStore,
    StreamOptions,
    StreamPublisher,
)
from feedapi_client.testing import Publisher
from tests.liftbridge.broker import Broker
from tests.liftbridge.helpers import SAFETY_NET
from tests.liftbridge.ledgers import FORMATS, KEY, offsets, read_relayed, save

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
async def grpc_publisher(broker: Broker) -> AsyncIterator[LiftbridgeGrpcPublisher]:
    async with LiftbridgeGrpcPublisher(broker.address, ack_timeout=SAFETY_NET) as publisher:
        yield publisher


async def test_messages_over_grpc_are_stored_in_order_with_key_and_headers(
    broker: Broker, grpc_publisher: LiftbridgeGrpcPublisher
) -> None:
    stream = Stream(broker.name, partitions=2)
    # One segment: Liftbridge 1.9 may crash where one ends while its cleaner looks at it.
    await broker.api.create_stream(stream, options=StreamOptions(segment_bytes=1 << 24))
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
    found = [m async for m in broker.api.subscribe(broker.name, partition=partition, until=2999)]
    assert [(m.value, m.key, m.headers["n"], m.headers["all"]) for m in found] == [
        (value, b"k", value, b"1") for value in values
    ]
    assert await grpc_publisher.publish(stream, b"x", ack_policy=AckPolicy.NONE) is None
    assert grpc_publisher.in_flight == 0


async def test_a_refused_message_over_grpc_has_the_error_that_it_has_over_nats(
    broker: Broker, grpc_publisher: LiftbridgeGrpcPublisher
) -> None:
    await broker.create(once=True)
    await grpc_publisher.publish(broker.name, b"x", expected_offset=0)
    with pytest.raises(IncorrectOffsetError, match=f"stream {broker.name}"):
        await grpc_publisher.publish(broker.name, b"x", expected_offset=5)
    with pytest.raises(NoStreamError, match="no such stream"):
        await grpc_publisher.publish("nothing", b"x")
    with pytest.raises(MessageTooLargeError, match="over the limit"):
        await grpc_publisher.publish(broker.name, b"x" * 2_000_000)
    grpc_publisher.max_message_bytes = None
    with pytest.raises(MessageTooLargeError, match="refused the message"):
        await grpc_publisher.publish(broker.name, b"x" * 1_048_000 + b"y" * 600)
    await broker.api.set_readonly(broker.name)
    with pytest.raises(PublishRefusedError, match="readonly"):
        await grpc_publisher.publish(broker.name, b"x", expected_offset=1)


async def test_a_message_over_grpc_wakes_a_paused_partition(
    broker: Broker, grpc_publisher: LiftbridgeGrpcPublisher
) -> None:
    await broker.create()
    await broker.api.pause_stream(broker.name)
    await grpc_publisher.publish(broker.name, b"x")
    assert await offsets(broker.api.subscribe(broker.name), 1) == [0]


@pytest.mark.parametrize("format", FORMATS)
async def test_a_relay_over_grpc_survives_a_crash_of_the_broker(
    broker: Broker, grpc_publisher: LiftbridgeGrpcPublisher, format: str
) -> None:
    await broker.create(once=True)
    grpc_publisher.ack_timeout = 5.0
    store = StreamCursorStore(
        grpc_publisher, broker.api, broker.name, format=format, give_up_after=SAFETY_NET
    )
    await store.load(KEY)
    for revision in range(1, 3):
        await save(store, revision, 2 * revision, 2 * revision + 1)
        await broker.crash()
    await save(store, 3, 6)
    assert await read_relayed(broker, 5) == list(range(2, 7))


async def test_a_publisher_over_grpc_reports_what_is_in_flight_when_the_broker_dies(
    broker: Broker, grpc_publisher: LiftbridgeGrpcPublisher
) -> None:
    await broker.create()
    await grpc_publisher.publish(broker.name, b"x")
    await broker.stop()
    try:
        # What was under way when the call ended may be stored; what comes later is not sent.
        text = ""
        with anyio.fail_after(30):
            while "not sent" not in text:
                with pytest.raises(AckTimeoutError) as caught:
                    await grpc_publisher.publish(broker.name, b"y", timeout=0.5)
                text = str(caught.value)
                assert "not sent" in text or "may be stored" in text
    finally:
        await broker.start()
    assert grpc_publisher.in_flight == 0


@pytest.mark.parametrize("way", ["nats", "grpc"])
async def test_both_publishers_refuse_and_take_the_same(
    broker: Broker, grpc_publisher: LiftbridgeGrpcPublisher, way: str
) -> None:
    name = (await broker.create()).name
    publisher: StreamPublisher = broker.publisher if way == "nats" else grpc_publisher
    refused: list[tuple[dict[str, Any], str]] = [
        ({"partition": 1}, "has the partitions 0 to 0, not 1"),
        ({"partition": -1}, "has the partitions 0 to 0, not -1"),
        ({"headers_each": [{"reply": b"x"}]}, "'subject' and 'reply'"),
        ({"timeout": 0}, "timeout must be positive, not 0"),
        ({"keys": [b"k"] * 2}, "not 1 values, 2 keys"),
    ]
    for given, said in refused:
        with pytest.raises(ValueError, match=said):
            await publisher.publish_many(name, [b"x"], **given)
    for wrong in (None, "text", 5):
        with pytest.raises(TypeError, match="a value is bytes"):
            await publisher.publish(name, wrong)  # type: ignore[arg-type]
    assert publisher.in_flight == 0
    await publisher.publish_many(name, [bytearray(b"a"), memoryview(b"b")])
    assert await broker.values() == [b"a", b"b"]


async def test_addresses_limits_and_an_open_publisher_are_needed() -> None:
    wrong: list[dict[str, Any]] = [{"addresses": []}, {"max_in_flight": 0}, {"ack_timeout": 0}]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"needs the address|must be positive"):
            LiftbridgeGrpcPublisher(**arguments)
    with pytest.raises(LiftbridgeError, match="async with"):
        await LiftbridgeGrpcPublisher("127.0.0.1:1").publish("s", b"x")


async def test_a_relay_over_grpc_to_a_missing_stream_ends_soon(
    broker: Broker,
    grpc_publisher: LiftbridgeGrpcPublisher,
    feed: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("feedapi_client.liftbridge.at_least_once._LOOKED_FOR", 1.0)
    with anyio.fail_after(SAFETY_NET):
        async with FeedConsumer(feed.url or "", follow=False) as consumer:
            with pytest.raises(NoStreamError, match="no such stream"):
                await Relay(consumer, grpc_publisher, broker.name).run()
