"""The gRPC API of a broker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest

from feedapi_client.liftbridge import (
    AckPolicy,
    AckTimeoutError,
    ActivityKind,
    BrokerUnavailableError,
    IncorrectOffsetError,
    LiftbridgeApi,
    LiftbridgeError,
    MessageTooLargeError,
    PublishRefusedError,
    Stream,
    StreamError,
    StreamOptions,
)
from feedapi_client.liftbridge.brokers import Brokers
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer, free_port
from tests.liftbridge.broker import Broker, require_liftbridge
from tests.liftbridge.helpers import SAFETY_NET
from tests.liftbridge.ledgers import offsets, read
from tests.liftbridge.middle import grpc_middle

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


# Streams


async def test_a_stream_is_created_once_and_described_and_deleted(broker: Broker) -> None:
    stream = Stream(broker.name, f"{broker.name}-subject", 3)
    assert await broker.api.create_stream(stream, concurrency_control=True) is True
    assert await broker.api.create_stream(stream) is False
    metadata = await broker.api.metadata(stream.name)
    assert metadata.stream == stream
    assert set(metadata.partitions) == {0, 1, 2}
    with pytest.raises(IncorrectOffsetError):
        await broker.api.publish(stream.name, b"x", expected_offset=7)
    await broker.api.delete_stream(stream.name)
    with pytest.raises(StreamError):
        await broker.api.metadata(stream.name)


async def test_a_missing_stream_or_partition_is_an_error_that_names_it(broker: Broker) -> None:
    api, name = broker.api, broker.name
    for call in (
        lambda: api.partition_metadata(name),
        lambda: read(api.subscribe(name), 1),
        lambda: api.delete_stream(name),
    ):
        with pytest.raises(StreamError, match=name):
            await call()
    await broker.create()
    with pytest.raises(StreamError, match="no partition 1"):
        await read(api.subscribe(name, partition=1), 1)


async def test_a_refused_request_is_an_error_with_the_brokers_details(broker: Broker) -> None:
    unnamed = Stream("s")
    object.__setattr__(unnamed, "name", "")
    with pytest.raises(LiftbridgeError, match=r"INVALID_ARGUMENT.*Name cannot be empty"):
        await broker.api.create_stream(unnamed)
    with (
        anyio.fail_after(SAFETY_NET / 2),
        pytest.raises(LiftbridgeError, match="encryption handler"),
    ):
        await broker.api.create_stream(broker.name, options=StreamOptions(encryption=True))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"retention_messages": 39_999}, "Keep 40,000"),
        ({"retention_bytes": 2**28 - 1}, "Keep 268,435,456"),
        ({"retention_seconds": 10**9}, "nor cleaned by age"),
        ({"compact": True}, "neither compacted"),
        ({"retention_bytes": 2**28, "segment_bytes": 2**28}, "at most 67,108,864"),
        ({"retention_messages": 40_000, "segment_bytes": 2**28}, "at most 1,280,000"),
    ],
)
async def test_a_ledger_that_would_lose_its_snapshot_is_not_created(
    broker: Broker, given: dict[str, Any], says: str
) -> None:
    options = StreamOptions(**given)
    with pytest.raises(ValueError, match=says):
        await broker.api.create_stream(broker.name, concurrency_control=True, options=options)
    assert await broker.api.create_stream(broker.name, options=options)


async def test_a_stream_with_fewer_replicas_than_min_isr_is_not_created(broker: Broker) -> None:
    with pytest.raises(ValueError, match="no message would be acked"):
        await broker.api.create_stream(broker.name, replication_factor=1, min_isr=2)
    assert await broker.api.create_stream(broker.name)


async def test_segments_of_a_ledger_fit_to_its_retention(broker: Broker) -> None:
    async with grpc_middle(broker.address) as middle, LiftbridgeApi(middle.address) as api:
        for name, options in (
            (f"{broker.name}-a", StreamOptions(retention_messages=40_000, retention_bytes=2**28)),
            (f"{broker.name}-b", StreamOptions(retention_bytes=2**40)),
        ):
            await api.create_stream(name, concurrency_control=True, options=options)
        small, endless = (middle.created[f"{broker.name}-{letter}"] for letter in "ab")
    assert small.segmentMaxBytes.value == 1_280_000
    assert not endless.HasField("segmentMaxBytes")


# Subscriptions


@pytest.mark.parametrize(
    ("start", "expected"),
    [(0, b"0"), (3, b"3"), ("earliest", b"0"), ("latest", b"4"), ("new", b"new")],
)
async def test_a_subscription_starts_at_the_given_position(
    broker: Broker, start: Any, expected: bytes
) -> None:
    await broker.create()
    await broker.publisher.publish_many(broker.name, [b"%d" % i for i in range(5)])
    seen: list[bytes] = []

    async def first() -> None:
        seen.extend(m.value for m in await read(broker.api.subscribe(broker.name, start), 1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first)
        while not seen:
            await anyio.sleep(0.05)
            if start == "new":
                await broker.publisher.publish(broker.name, b"new")
    assert seen == [expected]


async def test_a_subscription_starts_and_ends_at_a_time(broker: Broker) -> None:
    api, name = broker.api, broker.name
    await broker.create()
    assert [m async for m in api.subscribe(name, until="latest")] == []
    await broker.publisher.publish_many(name, [b"x"] * 3)
    times = [m.timestamp async for m in api.subscribe(name, until="latest")]
    await anyio.sleep(0.002)  # the resolution of a datetime is a microsecond
    middle = datetime.now(UTC)
    await broker.publisher.publish_many(name, [b"y"] * 3)
    assert middle.timestamp() * 1e9 > times[-1]
    assert await offsets(api.subscribe(name, middle), 3) == [3, 4, 5]
    assert [m.offset async for m in api.subscribe(name, until=middle)] == [0, 1, 2]
    assert [m.offset async for m in api.subscribe(name, until="latest")] == list(range(6))


async def test_a_subscription_ends_after_the_given_offset(broker: Broker) -> None:
    await broker.create()
    await broker.publisher.publish_many(broker.name, [b"%d" % i for i in range(2000)])
    found = broker.api.subscribe(broker.name, 500, until=1500)
    assert [message.offset async for message in found] == list(range(500, 1501))
    assert [message async for message in broker.api.subscribe(broker.name, 7, until=6)] == []


async def test_deleting_a_stream_ends_its_subscriptions(broker: Broker) -> None:
    await broker.create()
    await broker.publisher.publish(broker.name, b"x")
    async with (
        LiftbridgeApi(broker.address) as other,
        aclosing(broker.api.subscribe(broker.name)) as messages,
        aclosing(other.subscribe(broker.name)) as messages_of_others,
    ):
        for each in (messages, messages_of_others):
            assert (await anext(each)).value == b"x"
        await broker.api.delete_stream(broker.name)
        for each in (messages, messages_of_others):
            with pytest.raises(StreamError, match=f"stream {broker.name}"):
                await anext(each)


# Single messages


async def test_a_single_message_is_published_and_acked(broker: Broker) -> None:
    await broker.create(partitions=2)
    for offset in range(2):
        ack = await broker.api.publish(
            broker.name, b"x", key=b"k", partition=1, headers={"h": b"v"}
        )
        assert ack is not None
        assert (ack.stream, ack.offset) == (broker.name, offset)
    assert await broker.api.publish(broker.name, b"x", ack_policy=AckPolicy.NONE) is None
    [message, _] = await broker.messages(partition=1)
    assert (message.value, message.key, message.headers["h"]) == (b"x", b"k", b"v")


async def test_a_single_message_that_is_refused_has_the_error_of_the_publishers(
    broker: Broker,
) -> None:
    await broker.create()
    with pytest.raises(MessageTooLargeError):
        await broker.api.publish(broker.name, b"x" * 2_000_000)
    with pytest.raises(PublishRefusedError, match="NOT_FOUND"):
        await broker.api.publish(f"{broker.name}-missing", b"x")
    for subject in ("a b", "a\r\nPUB b 1\r\nx", "a..b", "", "a.*", ">"):
        with pytest.raises(ValueError, match="no subject that can be published to"):
            await broker.api.publish_to_subject(subject, b"x")


async def test_a_message_to_a_subject_is_stored_by_every_stream_on_it(broker: Broker) -> None:
    names, subject = [f"{broker.name}-{letter}" for letter in "ab"], f"{broker.name}-subject"
    for name in names:
        await broker.create(name, subject=subject)
    ack = await broker.api.publish_to_subject(subject, b"x", headers={"h": b"v"})
    assert ack is not None
    assert ack.msgSubject == subject
    assert [await broker.values(name) for name in names] == [[b"x"], [b"x"]]
    with pytest.raises(AckTimeoutError, match=f"{broker.name}-nobody"):
        await broker.api.publish_to_subject(f"{broker.name}-nobody", b"x", timeout=0.5)


# Cursors, and what the cluster says of itself


async def test_cursors_are_kept_by_name_and_outlive_a_crash_of_the_broker(broker: Broker) -> None:
    api, name = broker.api, broker.name
    assert await api.fetch_cursor(name, "c", partition=1) is None
    for partition in range(4):
        await api.set_cursor(name, "c", 10 * partition, partition=partition)
    assert await api.fetch_cursor(name, "yours") is None
    await broker.crash()
    for partition in range(4):
        assert await api.fetch_cursor(name, "c", partition=partition) == 10 * partition


async def test_a_broker_without_cursors_says_which_setting_it_needs(
    nats_server: NatsServer,
) -> None:
    require_liftbridge()
    with LiftbridgeServer(nats_server.url) as server:
        async with LiftbridgeApi(server.address) as api:
            for call in (api.set_cursor("s", "c", 1), api.fetch_cursor("s", "c")):
                with pytest.raises(LiftbridgeError, match=r"cursors\.stream\.partitions") as caught:
                    await call
                assert not isinstance(caught.value, BrokerUnavailableError)


async def test_the_cluster_lists_brokers_and_streams(broker: Broker) -> None:
    stream = await broker.create(partitions=2)
    found = await broker.api.cluster(groups=["unknown"])
    assert [each.address for each in found.brokers.values()] == [broker.address]
    assert found.streams[broker.name].stream == stream
    assert found.groups == {}


async def test_partitions_and_streams_have_offsets_and_timestamps(broker: Broker) -> None:
    api, name = broker.api, broker.name
    before = datetime.now(UTC) - timedelta(seconds=5)
    await broker.create()
    state = await api.partition_metadata(name)
    assert state.messages_received.first is None
    assert (state.newest_offset, state.high_watermark) == (-1, -1)
    await broker.publisher.publish_many(name, [b"x"] * 3)
    await api.set_readonly(name)
    found = await api.metadata(name)
    after = datetime.now(UTC) + timedelta(seconds=5)
    assert found.created is not None
    assert before < found.created < after
    state = await api.partition_metadata(name)
    assert state.newest_offset == 2
    assert state.messages_received.first is not None
    assert state.messages_received.latest is not None
    assert before < state.messages_received.first <= state.messages_received.latest < after
    assert state.readonly_changes.latest is not None
    assert state.pauses.first is None


async def test_the_activity_stream_tells_of_changes(broker: Broker) -> None:
    api, name = broker.api, broker.name
    await broker.create(partitions=2)
    await api.pause_stream(name, [1])
    await api.resume_partition(name, 1)
    await api.set_readonly(name)
    async with api.group_consumer(f"g-{name}", [name], name="member-"):
        pass
    await api.delete_stream(name)
    seen = []
    with anyio.fail_after(SAFETY_NET):
        async with aclosing(api.activity()) as events:
            async for event in events:
                if name in event.streams or event.group == f"g-{name}":
                    seen.append(event)
                if seen and seen[-1].kind is ActivityKind.DELETE_STREAM:
                    break
    assert [event.kind for event in seen] == [
        ActivityKind.CREATE_STREAM,
        ActivityKind.PAUSE_STREAM,
        ActivityKind.RESUME_STREAM,
        ActivityKind.SET_STREAM_READONLY,
        ActivityKind.JOIN_CONSUMER_GROUP,
        ActivityKind.LEAVE_CONSUMER_GROUP,
        ActivityKind.DELETE_STREAM,
    ]
    assert [event.partitions for event in seen[:3]] == [(0, 1), (1,), (1,)]
    assert seen[3].readonly
    assert seen[4].consumer.startswith("member-")
    assert not seen[5].expired


# Brokers that do not answer


async def test_a_missing_broker_is_an_error_after_the_timeout() -> None:
    async with LiftbridgeApi(f"127.0.0.1:{free_port()}", timeout=0.5) as api:
        calls: list[Callable[[], Any]] = [
            lambda: api.metadata("s"),
            lambda: read(api.subscribe("s"), 1),
        ]
        for call in calls:
            with pytest.raises(BrokerUnavailableError):
                await call()
    with pytest.raises(ValueError, match="at least one"):
        LiftbridgeApi([])


async def test_the_next_address_is_tried_when_the_first_does_not_answer(broker: Broker) -> None:
    addresses = [f"127.0.0.1:{free_port()}", broker.address]
    async with LiftbridgeApi(addresses, timeout=SAFETY_NET) as api:
        assert await api.create_stream(broker.name)


def test_a_broker_that_can_not_read_what_it_lost_is_asked_again() -> None:
    text = "failed to read message headers: segment not found"
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, metadata, metadata, details=text)
    assert isinstance(Brokers(["localhost:1"], 1).translate("s", error), BrokerUnavailableError)
