"""The rarer calls of the gRPC API, on the real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta

import anyio
import pytest
from gufo.liftbridge import api_pb2

from feedapi_client.liftbridge import (
    AckPolicy,
    AckTimeoutError,
    ActivityKind,
    ConsumerGroupMetadata,
    IncorrectOffsetError,
    LiftbridgeApi,
    LiftbridgeError,
    MessageTooLargeError,
    PublishRefusedError,
    Stream,
    StreamOptions,
)
from feedapi_client.liftbridge.brokers import Brokers
from feedapi_client.liftbridge.group_membership import GroupMembership
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from tests.liftbridge.clusters import GROUP_SETTINGS, SETTINGS, require_liftbridge
from tests.liftbridge.helpers import SAFETY_NET

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
async def server(nats_server: NatsServer, anyio_backend: str) -> AsyncIterator[LiftbridgeServer]:
    require_liftbridge()
    settings = {**SETTINGS, "activity.stream.enabled": True}
    with LiftbridgeServer(nats_server.url, settings=settings) as server:
        yield server


@pytest.fixture
async def api(server: LiftbridgeServer) -> AsyncIterator[LiftbridgeApi]:
    async with LiftbridgeApi(server.address, timeout=SAFETY_NET) as api:
        yield api


async def test_a_single_message_is_published_and_acked(api: LiftbridgeApi, name: str) -> None:
    await api.create_stream(Stream(name, partitions=2))
    for offset in range(2):
        ack = await api.publish(name, b"x", key=b"k", partition=1, headers={"h": b"v"})
        assert ack is not None
        assert (ack.stream, ack.offset) == (name, offset)
    assert await api.publish(name, b"x", ack_policy=AckPolicy.NONE) is None
    async with aclosing(api.subscribe(name, partition=1)) as messages:
        message = await anext(messages)
    assert (message.value, message.key, message.headers["h"]) == (b"x", b"k", b"v")


async def test_a_single_message_that_is_refused_has_the_error_of_the_publishers(
    api: LiftbridgeApi, name: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    with pytest.raises(IncorrectOffsetError, match=name):
        await api.publish(name, b"x", expected_offset=7)
    with pytest.raises(MessageTooLargeError):
        await api.publish(name, b"x" * 2_000_000)
    with pytest.raises(PublishRefusedError, match="NOT_FOUND"):
        await api.publish(f"{name}-missing", b"x")


async def test_a_message_to_a_subject_is_stored_by_every_stream_on_it(
    api: LiftbridgeApi, name: str
) -> None:
    streams = [Stream(f"{name}-{letter}", f"{name}-subject") for letter in "ab"]
    for stream in streams:
        await api.create_stream(stream)
    ack = await api.publish_to_subject(f"{name}-subject", b"x", headers={"h": b"v"})
    assert ack is not None
    assert ack.msgSubject == f"{name}-subject"
    for stream in streams:
        async with aclosing(api.subscribe(stream.name)) as messages:
            assert (await anext(messages)).value == b"x"
    with pytest.raises(AckTimeoutError, match=f"{name}-nobody"):
        await api.publish_to_subject(f"{name}-nobody", b"x", timeout=0.5)


async def test_the_activity_stream_tells_of_changes(api: LiftbridgeApi, name: str) -> None:
    await api.create_stream(Stream(name, partitions=2))
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


async def test_timestamps_of_streams_and_partitions(
    api: LiftbridgeApi, server: LiftbridgeServer, name: str
) -> None:
    before = datetime.now(UTC) - timedelta(seconds=5)
    await api.create_stream(name)
    state = await api.partition_metadata(name)
    assert state.messages_received.first is None
    await api.publish(name, b"x")
    await api.set_readonly(name)
    found = await api.metadata(name)
    after = datetime.now(UTC) + timedelta(seconds=5)
    assert found.created is not None
    assert before < found.created < after
    state = await api.partition_metadata(name)
    assert state.messages_received.first is not None
    assert state.messages_received.latest is not None
    assert before < state.messages_received.first <= state.messages_received.latest < after
    assert state.readonly_changes.latest is not None
    assert state.pauses.first is None


async def test_a_broker_without_a_key_refuses_to_encrypt_at_once(
    api: LiftbridgeApi, name: str
) -> None:
    with anyio.fail_after(SAFETY_NET / 2), pytest.raises(LiftbridgeError, match="no key"):
        await api.create_stream(name, options=StreamOptions(encryption=True))


async def group(api: LiftbridgeApi, epoch: int = -1) -> ConsumerGroupMetadata:
    """Wait until the brokers know the group, in another epoch than this one."""
    with anyio.fail_after(SAFETY_NET):
        while True:
            found = (await api.cluster(groups=["g"])).groups.get("g")
            if found is not None and found.epoch != epoch:
                return found
            await anyio.sleep(0.1)


async def test_a_group_whose_coordinator_is_reported_has_another_one(
    nats_server: NatsServer, name: str
) -> None:
    require_liftbridge()
    with LiftbridgeServer(nats_server.url, nodes=3, settings=GROUP_SETTINGS) as server:
        async with LiftbridgeApi(server.addresses, timeout=SAFETY_NET) as api:
            await api.create_stream(name, replication_factor=3)
            brokers = Brokers(server.addresses, SAFETY_NET)
            try:
                member = GroupMembership(brokers, "g", "", [name])
                await member.join()
                found = await group(api)
                await brokers.call_all(
                    "g",
                    "ReportConsumerGroupCoordinator",
                    api_pb2.ReportConsumerGroupCoordinatorRequest(
                        groupId="g",
                        consumerId=member.consumer_id,
                        coordinator=found.coordinator,
                        epoch=found.epoch,
                    ),
                )
                assert (await group(api, found.epoch)).epoch > found.epoch
                # The member finds the new one, and goes on.
                assert await member.assignments() == {(name, 0)}
                await member.leave()
            finally:
                await brokers.close()
