"""What holds against the stand-in and against the real broker, in the same words."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import anyio.lowlevel
import orjson
import pytest

from feedapi_client import FeedConsumer
from feedapi_client.liftbridge import (
    AckPolicy,
    AckTimeoutError,
    BrokerUnavailableError,
    IncorrectOffsetError,
    LiftbridgeApi,
    LiftbridgeError,
    LiftbridgeGrpcPublisher,
    LiftbridgePublisher,
    Message,
    MessageTooLargeError,
    OutgoingBatch,
    PublishRefusedError,
    Relay,
    RelayReader,
    Stream,
    StreamCursorStore,
    StreamError,
    StreamGapError,
    StreamOptions,
    StreamPausedError,
    StreamReadonlyError,
)
from feedapi_client.model import FeedKey, Position
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeBroker, LiftbridgeServer, NatsServer
from tests.liftbridge.clusters import SETTINGS, Cluster, Real, StandIn, require_liftbridge
from tests.liftbridge.helpers import SAFETY_NET

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

FORMATS = ["batch", "events"]
KEY = FeedKey("http://localhost/feed")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def real_server(nats_server: NatsServer) -> Iterator[LiftbridgeServer]:
    require_liftbridge()
    with LiftbridgeServer(nats_server.url, settings=SETTINGS) as server:
        yield server


@pytest.fixture(params=["stand-in", "real"])
async def cluster(
    request: pytest.FixtureRequest, nats_server: NatsServer, anyio_backend: str
) -> AsyncIterator[Cluster]:
    if request.param == "real":
        yield Real(request.getfixturevalue("real_server"), nats_server.url)
        return
    async with LiftbridgeBroker(nats_server.url, grpc=True) as broker:
        yield StandIn(broker, nats_server.url)


@pytest.fixture
async def api(cluster: Cluster) -> AsyncIterator[LiftbridgeApi]:
    async with LiftbridgeApi(cluster.address, timeout=SAFETY_NET) as api:
        yield api


@pytest.fixture
async def publisher(cluster: Cluster) -> AsyncIterator[LiftbridgePublisher]:
    # A short ack timeout, because messages are lost while the broker is down.
    async with LiftbridgePublisher(cluster.nats_url, ack_timeout=1.0) as publisher:
        yield publisher


@pytest.fixture
def name() -> str:
    """A name for a stream that no other test has."""
    return f"contract-{next(_numbers)}"


def store_of(
    publisher: LiftbridgePublisher, api: LiftbridgeApi, name: str, format: str
) -> StreamCursorStore:
    return StreamCursorStore(publisher, api, name, format=format, attempts=1000)


async def save(store: StreamCursorStore, revision: int, *numbers: int) -> None:
    """Save position `revision` with events of these numbers."""
    batch = OutgoingBatch(0, f"c{revision}", [b'{"n":%d}' % n for n in numbers])
    await store.save(KEY, {0: Position(f"c{revision}", revision=revision)}, transaction=batch)


async def read(messages: AsyncGenerator[Message, None], count: int) -> list[int]:
    """Return the offsets of the first messages."""
    offsets: list[int] = []
    async with aclosing(messages) as open_messages:
        async for message in open_messages:
            offsets.append(message.offset)
            if len(offsets) == count:
                break
    return offsets


async def relayed(api: LiftbridgeApi, name: str, count: int, **options: Any) -> list[int]:
    """Return the numbers of the first relayed events."""
    found: list[int] = []
    async with aclosing(RelayReader(api, name, **options).batches()) as batches:
        async for batch in batches:
            found += [orjson.loads(event)["n"] for event in batch.events]
            if len(found) >= count:
                break
    return found


# After a crash the high watermark is below the newest offset


@pytest.mark.parametrize("format", FORMATS)
async def test_a_relay_starts_after_a_crash_of_the_broker(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str, format: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    store = store_of(publisher, api, name, format)
    await store.load(KEY)
    await save(store, 1, 1, 2)
    await cluster.crash()
    restarted = store_of(publisher, api, name, format)
    assert await restarted.load(KEY) == {0: Position("c1", revision=1)}
    await save(restarted, 2, 3)
    assert await relayed(api, name, 3) == [1, 2, 3]


@pytest.mark.parametrize("format", FORMATS)
async def test_a_running_relay_survives_a_crash_of_the_broker(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str, format: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    store = store_of(publisher, api, name, format)
    await store.load(KEY)
    for revision in range(1, 4):
        await cluster.stop()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(save, store, revision, revision)
            await anyio.lowlevel.checkpoint()
            await cluster.start()
    await save(store, 4, 4)
    assert await relayed(api, name, 4) == [1, 2, 3, 4]


@pytest.mark.parametrize("start", [5, "new"])
async def test_a_subscription_above_the_high_watermark_gets_nothing_older(
    cluster: Cluster,
    api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    name: str,
    start: Any,
) -> None:
    await api.create_stream(name)
    await publisher.publish_many(name, [b"x"] * 5)
    await cluster.crash()
    await api.partition_metadata(name)
    found: list[int] = []

    async def follow() -> None:
        found.extend(await read(api.subscribe(name, start), 1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        while not found:
            await publisher.publish(name, b"later")
    assert found[0] >= 5


async def test_what_was_stored_before_a_crash_is_hidden_until_something_is_published(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name)
    await publisher.publish_many(name, [b"x"] * 5)
    await cluster.crash()
    found = await api.partition_metadata(name)
    assert (found.high_watermark, found.newest_offset) == (-1, 4)
    with pytest.raises(BrokerUnavailableError, match="no message"):
        await read(api.subscribe(name, idle_timeout=0.5), 1)
    await publisher.publish(name, b"y")
    assert await read(api.subscribe(name), 6) == list(range(6))


async def test_a_reader_that_resumes_after_a_crash_gets_each_batch_once(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    store = store_of(publisher, api, name, "batch")
    await store.load(KEY)
    for n in range(1, 6):
        await save(store, n, n)
    start = (await api.partition_metadata(name)).newest_offset + 1
    await cluster.crash()
    await api.partition_metadata(name)
    found: list[int] = []

    async def follow() -> None:
        found.extend(await relayed(api, name, 1, start=start))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        await save(store, 6, 6)
    assert found == [6]


async def test_a_live_subscription_survives_a_crash_of_the_broker(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name)
    await publisher.publish_many(name, [b"x"] * 5)
    found: list[int] = []
    async with aclosing(api.subscribe(name)) as messages:
        async for message in messages:
            found.append(message.offset)
            if len(found) == 5:
                await cluster.crash()
                await api.partition_metadata(name)
                await publisher.publish_many(name, [b"y"] * 5)
            if len(found) == 10:
                break
    assert found == list(range(10))


# Compaction


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


async def test_a_reader_refuses_a_stream_that_was_compacted(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(
        name, concurrency_control=True, options=StreamOptions(compact=True, cleaner_seconds=0.2)
    )
    await write_with_keys(publisher, name, COUNT)
    await compacted(cluster, api, name)
    with pytest.raises(StreamGapError, match="compaction"):
        await relayed(api, name, COUNT, start=0)


async def test_the_end_of_a_subscription_is_not_overshot_when_its_message_is_gone(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name, options=StreamOptions(compact=True, cleaner_seconds=0.2))
    await publisher.publish_many(name, [b"%d" % n for n in range(COUNT)], keys=[b"k"] * COUNT)
    left = await compacted(cluster, api, name)
    until = left[0] - 1 if left[0] else next(n for n in range(COUNT) if n not in left)
    found = [message.offset async for message in api.subscribe(name, 0, until=until)]
    assert found == [offset for offset in left if offset <= until]


async def test_a_ledger_is_not_compacted_or_paused_where_the_broker_does_that_by_default(
    nats_server: NatsServer, anyio_backend: str, name: str
) -> None:
    require_liftbridge()
    settings = {**SETTINGS, "streams.compact.enabled": True, "streams.auto.pause.time": "200ms"}
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


# Paused and read-only partitions


async def test_a_paused_partition_has_an_error_of_its_own_and_a_subscription_can_wake_it(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name)
    await publisher.publish_many(name, [b"x"] * 3)
    await api.pause_stream(name)
    assert (await api.metadata(name)).partitions[0].paused
    with pytest.raises(StreamPausedError, match="paused partition 0"):
        await api.partition_metadata(name)
    with pytest.raises(StreamPausedError, match="paused partition 0"):
        await read(api.subscribe(name), 1)
    with pytest.raises(AckTimeoutError):
        await publisher.publish(name, b"lost", timeout=0.2)
    assert await read(api.subscribe(name, resume=True), 3) == [0, 1, 2]
    assert (await api.partition_metadata(name)).newest_offset == 2


async def test_a_live_subscription_ends_with_that_error_when_the_partition_is_paused(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name)
    await publisher.publish(name, b"x")
    async with aclosing(api.subscribe(name)) as messages:
        assert (await anext(messages)).offset == 0
        await api.pause_stream(name)
        with pytest.raises(StreamPausedError):
            await anext(messages)


@pytest.mark.parametrize("format", FORMATS)
async def test_a_relay_that_is_exactly_once_wakes_a_paused_partition(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str, format: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    store = store_of(publisher, api, name, format)
    await api.pause_stream(name)
    await store.load(KEY)
    await save(store, 1, 1, 2)
    await api.pause_stream(name)
    await save(store, 2, 3)
    await api.pause_stream(name)
    assert await relayed(api, name, 3) == [1, 2, 3]


async def test_a_subscription_to_a_read_only_partition_ends_after_its_last_message(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name)
    await publisher.publish_many(name, [b"x"] * 3)
    async with aclosing(api.subscribe(name)) as messages:
        live = [(await anext(messages)).offset]
        await api.set_readonly(name)
        live += [message.offset async for message in messages]
    assert live == [0, 1, 2]
    assert (await api.partition_metadata(name)).readonly
    assert [message.offset async for message in api.subscribe(name)] == [0, 1, 2]
    assert [message async for message in api.subscribe(name, 3)] == []
    assert [message async for message in api.subscribe(name, "new")] == []
    await api.set_readonly(name, False)
    await publisher.publish(name, b"y")
    assert await read(api.subscribe(name, "latest"), 1) == [3]


async def test_a_relay_to_a_read_only_partition_ends_with_an_error_of_its_own(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name, concurrency_control=True)
    store = store_of(publisher, api, name, "batch")
    await store.load(KEY)
    await api.set_readonly(name)
    with pytest.raises(StreamReadonlyError, match="partition 0 is read-only"):
        await save(store, 1, 1)
    with pytest.raises(StreamReadonlyError):
        await store.load(KEY)


# A relay that is at least once


@pytest.fixture
def feed(feedapi_publisher: Publisher) -> Publisher:
    feedapi_publisher.extend(0, [{"n": n} for n in range(20)])
    return feedapi_publisher


async def run_relay(
    feed: Publisher, publisher: LiftbridgePublisher, name: str, api: LiftbridgeApi
) -> None:
    async with FeedConsumer(feed.url or "", follow=False) as consumer:
        await Relay(consumer, publisher, name, api=api).run()


async def test_a_missing_stream_is_named_before_the_first_message(
    cluster: Cluster,
    api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    name: str,
    feed: Publisher,
) -> None:
    with pytest.raises(StreamError, match=f"stream {name}: there is no such stream"):
        await run_relay(feed, publisher, name, api)
    assert publisher.stats.published == 0


async def test_a_relay_wakes_a_paused_partition_and_is_refused_by_a_read_only_one(
    cluster: Cluster,
    api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    name: str,
    feed: Publisher,
) -> None:
    await api.create_stream(name)
    await api.pause_stream(name)
    await run_relay(feed, publisher, name, api)
    assert await read(api.subscribe(name), 20) == list(range(20))
    await api.set_readonly(name)
    with pytest.raises(StreamReadonlyError):
        await run_relay(feed, publisher, name, api)


async def test_a_running_relay_wakes_a_partition_that_is_paused(
    cluster: Cluster,
    api: LiftbridgeApi,
    publisher: LiftbridgePublisher,
    name: str,
    feed: Publisher,
) -> None:
    await api.create_stream(name)
    async with FeedConsumer(feed.url or "") as consumer:
        running = Relay(consumer, publisher, name, api=api)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.run)
            with anyio.fail_after(SAFETY_NET):
                while running.progress.events < 20:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                await api.pause_stream(name)
                feed.extend(0, [{"n": n} for n in range(20, 40)])
                while running.progress.events < 40:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            consumer.stop()
    assert running.progress.retries >= 1
    assert {orjson.loads(m.value)["n"] async for m in api.subscribe(name, until="latest")} == set(
        range(40)
    )


# Times, cursors, the cluster


async def test_a_subscription_starts_and_ends_at_a_time(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name)
    await publisher.publish_many(name, [b"x"] * 3)
    times = [m.timestamp async for m in api.subscribe(name, until="latest")]
    await anyio.sleep(0.002)  # the resolution of a datetime is a microsecond
    middle = datetime.now(UTC)
    await publisher.publish_many(name, [b"y"] * 3)
    assert middle.timestamp() * 1e9 > times[-1]
    assert await read(api.subscribe(name, middle), 3) == [3, 4, 5]
    assert [m.offset async for m in api.subscribe(name, until=middle)] == [0, 1, 2]
    assert await read(api.subscribe(name, timedelta(hours=1)), 6) == list(range(6))
    assert [m.offset async for m in api.subscribe(name, until="latest")] == list(range(6))
    assert [m.offset async for m in api.subscribe(name, from_replica=True, until=2)] == [0, 1, 2]


async def test_an_empty_stream_has_no_latest_message(
    cluster: Cluster, api: LiftbridgeApi, name: str
) -> None:
    await api.create_stream(name)
    assert [m async for m in api.subscribe(name, until="latest")] == []


async def test_a_broker_without_cursors_says_which_setting_it_needs(
    cluster: Cluster, api: LiftbridgeApi, name: str
) -> None:
    if isinstance(cluster, StandIn):
        cluster.broker.keeps_cursors = False
    await api.create_stream(name)
    for call in (api.set_cursor(name, "c", 1), api.fetch_cursor(name, "c")):
        with pytest.raises(LiftbridgeError, match=r"cursors\.stream\.partitions") as caught:
            await call
        assert not isinstance(caught.value, BrokerUnavailableError)


async def test_the_cluster_lists_brokers_and_streams(
    cluster: Cluster, api: LiftbridgeApi, name: str
) -> None:
    await api.create_stream(Stream(name, partitions=2))
    found = await api.cluster(groups=["unknown"])
    assert [broker.address for broker in found.brokers.values()] == [cluster.address]
    assert found.streams[name].stream == Stream(name, partitions=2)
    assert found.groups == {}


async def test_a_deleted_stream_ends_its_subscription(
    cluster: Cluster, api: LiftbridgeApi, publisher: LiftbridgePublisher, name: str
) -> None:
    await api.create_stream(name)
    await publisher.publish(name, b"x")
    async with LiftbridgeApi(cluster.address) as other, aclosing(other.subscribe(name)) as messages:
        assert (await anext(messages)).offset == 0
        await api.delete_stream(name)
        with pytest.raises(StreamError, match=name):
            await anext(messages)


# Publishing over gRPC


@pytest.fixture
async def grpc_publisher(cluster: Cluster) -> AsyncIterator[LiftbridgeGrpcPublisher]:
    async with LiftbridgeGrpcPublisher(cluster.address, ack_timeout=SAFETY_NET) as publisher:
        yield publisher


async def test_messages_over_grpc_are_stored_in_order_with_key_and_headers(
    cluster: Cluster, api: LiftbridgeApi, grpc_publisher: LiftbridgeGrpcPublisher, name: str
) -> None:
    stream = Stream(name, partitions=2)
    await api.create_stream(stream)
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
    with pytest.raises(PublishRefusedError, match="no such stream"):
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
    store = StreamCursorStore(grpc_publisher, api, name, format=format, attempts=1000)
    await store.load(KEY)
    for revision in range(1, 4):
        await save(store, revision, 2 * revision, 2 * revision + 1)
        await cluster.crash()
    await save(store, 4, 8)
    assert await relayed(api, name, 7) == list(range(2, 9))


async def test_a_publisher_over_grpc_reports_what_is_in_flight_when_the_broker_dies(
    cluster: Cluster, api: LiftbridgeApi, grpc_publisher: LiftbridgeGrpcPublisher, name: str
) -> None:
    await api.create_stream(name)
    await grpc_publisher.publish(name, b"x")
    await cluster.stop()
    try:
        with pytest.raises(AckTimeoutError):
            await grpc_publisher.publish(name, b"y", timeout=0.5)
        with pytest.raises(AckTimeoutError, match="not sent"):
            await grpc_publisher.publish(name, b"y", timeout=0.5)
    finally:
        await cluster.start()
    assert grpc_publisher.in_flight == 0
