"""The gRPC API against an in-process server built on the same definition."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import anyio
import pytest

from feedapi_client.liftbridge import (
    AckTimeoutError,
    BrokerUnavailableError,
    LiftbridgeApi,
    LiftbridgeError,
    LiftbridgePublisher,
    Message,
    Stream,
    StreamError,
    StreamOptions,
)
from feedapi_client.testing.liftbridge import LiftbridgeBroker, free_port
from tests.liftbridge.helpers import SAFETY_NET

pytestmark = pytest.mark.anyio


async def read(messages: AsyncGenerator[Message, None], count: int) -> list[bytes]:
    values: list[bytes] = []
    async with aclosing(messages) as open_messages:
        async for message in open_messages:
            values.append(message.value)
            if len(values) == count:
                break
    return values


async def test_a_stream_is_created_once(api: LiftbridgeApi, api_broker: LiftbridgeBroker) -> None:
    stream = Stream("s", "subject", 3)
    assert await api.create_stream(stream, concurrency_control=True) is True
    assert await api.create_stream(stream) is False
    assert api_broker.streams["s"].concurrency_control
    metadata = await api.metadata("s")
    assert metadata.stream == stream
    assert set(metadata.partitions) == {0, 1, 2}


async def test_a_message_is_read_back_with_key_and_headers(
    api: LiftbridgeApi, publisher: LiftbridgePublisher
) -> None:
    await api.create_stream("s")
    await publisher.publish("s", b"hello", key=b"k", headers={"h": b"x"})
    async with aclosing(api.subscribe("s", 0)) as messages:
        async for message in messages:
            assert (message.offset, message.value, message.key, message.headers["h"]) == (
                0,
                b"hello",
                b"k",
                b"x",
            )
            assert isinstance(message, Message)
            break


@pytest.mark.parametrize(
    ("start", "expected"),
    [(0, b"0"), (3, b"3"), ("earliest", b"0"), ("latest", b"4"), ("new", b"new")],
)
async def test_a_subscription_starts_at_the_given_position(
    api: LiftbridgeApi, publisher: LiftbridgePublisher, start: int | str, expected: bytes
) -> None:
    await api.create_stream("s")
    await publisher.publish_many("s", [b"%d" % i for i in range(5)])
    seen: list[bytes] = []

    async def first() -> None:
        seen.extend(await read(api.subscribe("s", start), 1))  # type: ignore[arg-type]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first)
        while not seen:
            await anyio.sleep(0.05)
            if start == "new":
                await publisher.publish("s", b"new")
    assert seen == [expected]


async def test_a_subscription_ends_after_the_given_offset(
    api: LiftbridgeApi, publisher: LiftbridgePublisher
) -> None:
    await api.create_stream("s")
    await publisher.publish_many("s", [b"%d" % i for i in range(2000)])
    assert [message.offset async for message in api.subscribe("s", 500, until=1500)] == list(
        range(500, 1501)
    )
    assert [message async for message in api.subscribe("s", 7, until=6)] == []


async def test_a_subscription_continues_with_later_messages(
    api: LiftbridgeApi, publisher: LiftbridgePublisher
) -> None:
    await api.create_stream(Stream("s", partitions=2))
    seen: list[bytes] = []

    async def follow() -> None:
        seen.extend(await read(api.subscribe("s", 0, partition=1), 20))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        for i in range(20):
            await publisher.publish(Stream("s", partitions=2), b"%d" % i, partition=1)
    assert seen == [b"%d" % i for i in range(20)]


async def test_a_subscription_survives_a_restart_of_the_broker(
    api: LiftbridgeApi, api_broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await api.create_stream("s")
    await publisher.publish_many("s", [b"0", b"1"])
    seen: list[bytes] = []
    async with aclosing(api.subscribe("s")) as messages:
        async for message in messages:
            seen.append(message.value)
            if len(seen) == 2:
                await api_broker.restart()
                await publisher.publish_many("s", [b"2", b"3"])
            if len(seen) == 4:
                break
    assert seen == [b"0", b"1", b"2", b"3"]


async def test_a_subscription_without_messages_ends_after_its_idle_timeout(
    api: LiftbridgeApi,
) -> None:
    await api.create_stream("s")
    with pytest.raises(BrokerUnavailableError, match="no message"):
        await read(api.subscribe("s", idle_timeout=0.1), 1)


async def test_a_partitions_metadata_holds_its_offsets(
    api: LiftbridgeApi, publisher: LiftbridgePublisher
) -> None:
    await api.create_stream("s")
    empty = await api.partition_metadata("s")
    assert (empty.newest_offset, empty.high_watermark) == (-1, -1)
    await publisher.publish_many("s", [b"x"] * 3)
    assert (await api.partition_metadata("s")).newest_offset == 2


async def test_cursors_are_kept_by_name(api: LiftbridgeApi) -> None:
    await api.create_stream("s")
    assert await api.fetch_cursor("s", "mine") is None
    await api.set_cursor("s", "mine", 41)
    await api.set_cursor("s", "zero", 0)
    assert await api.fetch_cursor("s", "mine") == 41
    assert await api.fetch_cursor("s", "zero") == 0
    assert await api.fetch_cursor("s", "yours") is None


async def test_a_deleted_stream_is_gone(api: LiftbridgeApi) -> None:
    await api.create_stream("s")
    await api.delete_stream("s")
    with pytest.raises(StreamError):
        await api.metadata("s")


async def test_deleting_a_stream_ends_its_subscriptions(
    api: LiftbridgeApi, publisher: LiftbridgePublisher
) -> None:
    await api.create_stream("s")
    await publisher.publish("s", b"x")
    async with aclosing(api.subscribe("s")) as messages:
        assert (await anext(messages)).value == b"x"
        await api.delete_stream("s")
        with pytest.raises(StreamError, match="stream s"):
            await anext(messages)
    with pytest.raises(AckTimeoutError):
        await publisher.publish("s", b"y", timeout=0.2)


async def test_a_missing_stream_or_partition_is_an_error_that_names_it(api: LiftbridgeApi) -> None:
    with pytest.raises(StreamError, match="nothing"):
        await api.partition_metadata("nothing")
    with pytest.raises(StreamError, match="nothing"):
        await read(api.subscribe("nothing"), 1)
    with pytest.raises(StreamError, match="nothing"):
        await api.delete_stream("nothing")
    await api.create_stream("s")
    with pytest.raises(StreamError, match="no partition 1"):
        await read(api.subscribe("s", partition=1), 1)


async def test_a_refused_request_is_an_error_with_the_brokers_details(api: LiftbridgeApi) -> None:
    unnamed = Stream("s")
    object.__setattr__(unnamed, "name", "")
    with pytest.raises(LiftbridgeError, match=r"INVALID_ARGUMENT.*Name cannot be empty"):
        await api.create_stream(unnamed)


async def test_a_missing_broker_is_an_error_after_the_timeout() -> None:
    async with LiftbridgeApi(f"127.0.0.1:{free_port()}", timeout=0.5) as api:
        with pytest.raises(BrokerUnavailableError):
            await api.metadata("s")
        with pytest.raises(BrokerUnavailableError):
            await read(api.subscribe("s"), 1)


async def test_the_next_address_is_tried_when_the_first_does_not_answer(
    api_broker: LiftbridgeBroker,
) -> None:
    addresses = [f"127.0.0.1:{free_port()}", api_broker.address]
    async with LiftbridgeApi(addresses, timeout=SAFETY_NET) as api:
        assert await api.create_stream("s")


def test_at_least_one_address_is_needed() -> None:
    with pytest.raises(ValueError, match="at least one"):
        LiftbridgeApi([])


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_on_trio_the_error_says_that_asyncio_is_needed(anyio_backend: str) -> None:
    with pytest.raises(LiftbridgeError, match="asyncio"):
        await LiftbridgeApi().__aenter__()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (StreamOptions(retention_messages=39_999), "Keep 40,000 or more"),
        (StreamOptions(retention_bytes=2**28 - 1), "Keep 268,435,456 or more"),
        (StreamOptions(retention_seconds=14_399), "14400 seconds or more"),
        (StreamOptions(retention_bytes=2**28, segment_bytes=2**28), "at most 67,108,864"),
        (StreamOptions(retention_messages=40_000, segment_bytes=2**28), "at most 1,280,000"),
    ],
)
async def test_a_ledger_that_would_lose_its_snapshot_is_not_created(
    api: LiftbridgeApi, api_broker: LiftbridgeBroker, options: StreamOptions, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        await api.create_stream("ledger", concurrency_control=True, options=options)
    assert "ledger" not in api_broker.create_requests
    assert await api.create_stream("other", options=options)


async def test_a_stream_with_fewer_replicas_than_min_isr_is_not_created(
    api: LiftbridgeApi, api_broker: LiftbridgeBroker
) -> None:
    with pytest.raises(ValueError, match="no message would be acked"):
        await api.create_stream("s", replication_factor=1, min_isr=2)
    assert "s" not in api_broker.create_requests


async def test_a_subject_that_would_be_lines_of_nats_is_refused(api: LiftbridgeApi) -> None:
    for subject in ("a b", "a\r\nPUB b 1\r\nx", "a..b", "", "a.*", ">"):
        with pytest.raises(ValueError, match="no subject that can be published to"):
            await api.publish_to_subject(subject, b"x")


async def test_segments_of_a_ledger_fit_to_its_retention(
    api: LiftbridgeApi, api_broker: LiftbridgeBroker
) -> None:
    options = StreamOptions(retention_messages=40_000, retention_bytes=2**28)
    await api.create_stream("ledger", concurrency_control=True, options=options)
    assert api_broker.create_requests["ledger"].segmentMaxBytes.value == 1_280_000
    much = StreamOptions(retention_bytes=2**40)
    await api.create_stream("endless", concurrency_control=True, options=much)
    assert not api_broker.create_requests["endless"].HasField("segmentMaxBytes")
