"""A relay that is at least once: a real feed over HTTP, a real NATS server, a real broker."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import orjson
import pytest

from feedapi_client import FeedConsumer, Limits, MemoryCursorStore, RetryPolicy
from feedapi_client.liftbridge import (
    AckPolicy,
    AckTimeoutError,
    LiftbridgeApi,
    LiftbridgePublisher,
    Message,
    OutgoingBatch,
    Relay,
    Stream,
    StreamError,
    StreamReadonlyError,
    reveal_newest,
)
from feedapi_client.liftbridge.at_least_once import AcknowledgedPublishing
from feedapi_client.liftbridge.message_publisher import publish_until_acked
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import NatsServer
from tests.liftbridge.acker import Acker
from tests.liftbridge.broker import Broker
from tests.liftbridge.helpers import SAFETY_NET, eventually
from tests.liftbridge.ledgers import events, look_often, offsets
from tests.liftbridge.middle import Fault, Middle, man_in_the_middle

pytestmark = pytest.mark.anyio

Feeds = Callable[..., Publisher]


async def relay(
    feed: Publisher,
    broker: Broker,
    stream: Stream | str,
    *,
    store: Any = None,
    limits: Limits | None = None,
    retry: RetryPolicy | None = None,
    **options: Any,
) -> Relay:
    """Relay a feed to its end."""
    async with FeedConsumer(
        feed.url or "", store=store, follow=False, limits=limits, retry=retry
    ) as consumer:
        relay = Relay(consumer, broker.publisher, stream, **options)
        await relay.run()
    return relay


@asynccontextmanager
async def running(feed: Publisher, broker: Broker, **options: Any) -> AsyncIterator[Relay]:
    """A relay that follows its feed, until the test has seen what it wants to see."""
    async with (
        FeedConsumer(feed.url or "") as consumer,
        anyio.create_task_group() as tasks,
    ):
        relay = Relay(consumer, broker.publisher, broker.name, **options)
        tasks.start_soon(relay.run)
        await eventually(lambda: relay.progress.events == 20)
        yield relay
        consumer.stop()


# What is written


async def test_a_message_holds_payload_partition_and_cursor_whatever_headers_are_given(
    feedapi_publisher: Publisher, broker: Broker
) -> None:
    stream, store = await broker.create(), MemoryCursorStore()
    feedapi_publisher.append(0, b'{"entity": "a",  "n":1}')
    own = {"feedapi-partition": b"9", "feedapi-cursor": b"x", "own": b"kept"}
    await relay(feedapi_publisher, broker, stream, store=store, headers=lambda _: own)
    [message] = await broker.messages()
    assert message.value == b'{"entity": "a",  "n":1}'
    [position] = (await store.load(FeedConsumer(feedapi_publisher.url or "").key)).values()
    assert message.headers["feedapi-partition"] == b"0"
    assert message.headers["feedapi-cursor"].decode() == position.cursor
    assert message.headers["own"] == b"kept"


async def test_a_message_has_the_given_key_and_headers_and_the_key_chooses_the_partition(
    feedapi_publisher: Publisher, broker: Broker
) -> None:
    stream = await broker.create(partitions=3)
    feedapi_publisher.extend(0, events(100))
    await relay(
        feedapi_publisher,
        broker,
        stream,
        key=lambda event: event.json()["entity"].encode(),
        headers=lambda event: {"n": b"%d" % event.json()["n"]},
    )
    found = []
    for partition in range(3):
        messages = [
            (each, orjson.loads(each.value)) for each in await broker.messages("", partition)
        ]
        for message, event in messages:
            assert stream.partition_of(message.key) == partition
            assert (message.key.decode(), int(message.headers["n"])) == (
                event["entity"],
                event["n"],
            )
        numbers = [event["n"] for _, event in messages]
        assert numbers == sorted(numbers)
        found += numbers
    assert sorted(found) == list(range(100))


async def test_without_a_key_the_feeds_partition_chooses_the_partition(
    feedapi_publisher_factory: Feeds, broker: Broker
) -> None:
    feed = feedapi_publisher_factory(3)
    for partition in range(3):
        feed.extend(partition, events(10, 10 * partition))
    await relay(feed, broker, await broker.create(partitions=2))
    assert sorted(await broker.numbers()) == [*range(10), *range(20, 30)]
    assert await broker.numbers(partition=1) == list(range(10, 20))


@pytest.mark.usefixtures("short_waits")
async def test_splits_are_followed_in_order(feedapi_publisher: Publisher, broker: Broker) -> None:
    feed, stream = feedapi_publisher, await broker.create()
    feed.extend(0, events(500))
    children = feed.split(0, method="starts-after")
    for event in events(400, 500):
        feed.publish(event["entity"], event)
    feed.split(children[0], method="cursor-from")
    for event in events(300, 900):
        feed.publish(event["entity"], event)
    await relay(feed, broker, stream)
    found = await broker.numbers()
    assert sorted(found) == list(range(1200))
    for entity in range(7):
        mine = [n for n in found if n % 7 == entity]
        assert mine == sorted(mine)


# What a broker loses, and acks that are lost


async def test_the_cursor_is_never_ahead_of_the_acks(
    feedapi_publisher_factory: Feeds, broker: Broker, middle: Middle
) -> None:
    stream, store = await broker.create(), MemoryCursorStore()
    feed = feedapi_publisher_factory(1, page_size=100)
    feed.extend(0, events(1000))
    middle.decide = lambda message: (
        Fault.DROP_ACK if orjson.loads(message.value)["n"] >= 500 else None
    )
    limits, retry = Limits(max_batch_bytes=1000), RetryPolicy(give_up_after=0.1)
    with pytest.raises(AckTimeoutError):
        await relay(feed, broker, stream, store=store, limits=limits, retry=retry)
    committed = (await store.load(FeedConsumer(feed.url or "").key))[0].cursor
    seen = [
        orjson.loads(message.value)["n"]
        for message in await broker.messages()
        if message.headers["feedapi-cursor"].decode() == committed
    ]
    assert max(seen) < 500
    middle.clear()
    await relay(feed, broker, stream, store=store)
    assert set(await broker.numbers()) == set(range(1000))


async def test_a_lost_message_is_published_again_with_all_after_it(
    feedapi_publisher: Publisher, broker: Broker, middle: Middle
) -> None:
    stream = await broker.create()
    feedapi_publisher.extend(0, events(10))
    middle.script(None, None, None, Fault.LOSE)
    done = await relay(feedapi_publisher, broker, stream)
    assert await broker.numbers() == [0, 1, 2, *range(4, 10), *range(3, 10)]
    assert done.progress.retries == 1


async def relay_during_restart(
    feed: Publisher, nats_url: str, stream: str, restart: Callable[[], Awaitable[object]]
) -> None:
    """Relay 2000 events, and restart something after 200. What is published meanwhile is lost."""
    feed.extend(0, events(2000))
    down, is_up = anyio.Event(), False

    def decide(_: Message) -> Fault | None:
        if middle.received <= 200 or is_up:
            return None
        down.set()
        return Fault.LOSE

    async def restart_when_down() -> None:
        nonlocal is_up
        await down.wait()
        await restart()
        is_up = True

    # A short ack timeout, because messages may be lost on the way; many attempts, because acks may
    # take longer than that.
    async with (
        man_in_the_middle(nats_url) as middle,
        LiftbridgePublisher(middle.url, ack_timeout=0.3, max_in_flight=20) as publisher,
        FeedConsumer(feed.url or "", follow=False) as consumer,
        anyio.create_task_group() as tasks,
    ):
        middle.decide = decide
        tasks.start_soon(restart_when_down)
        running = Relay(consumer, publisher, stream)
        await running.run()
    assert running.progress.retries >= 1


async def test_a_broker_that_restarts_in_the_middle_costs_a_retry(
    feedapi_publisher: Publisher, broker: Broker
) -> None:
    await broker.create()
    await relay_during_restart(feedapi_publisher, broker.nats_url, broker.name, broker.crash)
    await reveal_newest(broker.publisher, broker.api, broker.name)
    assert set(await broker.numbers()) == set(range(2000))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # nats-py 2.16 forgets connections
async def test_a_nats_server_that_restarts_in_the_middle_costs_a_retry(
    feedapi_publisher: Publisher,
) -> None:
    with NatsServer() as server:
        async with Acker(server.url, "s") as acker:

            async def restart() -> None:
                await anyio.to_thread.run_sync(server.restart)

            await relay_during_restart(feedapi_publisher, server.url, "s", restart)
    assert {orjson.loads(value)["n"] for value in acker.values("s")} == set(range(2000))
    gc.collect()


@pytest.mark.parametrize("more", [5, 0])
async def test_messages_that_the_broker_loses_after_its_ack_are_published_again(
    broker: Broker,
    feed: Publisher,
    more: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    impatient: None,
) -> None:
    look_often(monkeypatch)
    await broker.create()
    # Without the API the next messages show it, which get the same offsets.
    async with running(feed, broker, api=None if more else broker.api) as relay:
        await broker.lose(8)
        feed.extend(0, [{"n": n} for n in range(20, 20 + more)])
        await eventually(lambda: relay.progress.recovered >= 8)
        await eventually(lambda: relay.progress.events == 20 + more)
    await reveal_newest(broker.publisher, broker.api, broker.name)
    last = dict.fromkeys(reversed(await broker.numbers()))
    assert list(last)[::-1] == list(range(20 + more))
    assert "lost messages that it had acked, in the partitions 0" in caplog.text


async def test_what_is_acked_while_a_relay_looks_at_its_stream_is_not_taken_for_lost(
    broker: Broker, feed: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.create()
    async with running(feed, broker, api=broker.api) as relay:
        glance = broker.api.glance

        async def slowly(*place: Any) -> Any:
            found = await glance(*place)
            feed.append(0, {"n": 20})
            await eventually(lambda: relay.progress.events == 21)
            return found

        broker.api.glance = slowly  # type: ignore[method-assign]
        await relay._publishing.look_for_losses()
    assert await broker.numbers() == list(range(21))
    assert (relay.progress.recovered, caplog.text) == (0, "")


async def publishing_of_eight(broker: Broker) -> tuple[Stream, AcknowledgedPublishing]:
    """Publish events of two partitions of a feed: five, and three."""
    stream = await broker.create()
    publishing = AcknowledgedPublishing(
        broker.publisher,
        stream,
        ack_policy=AckPolicy.ALL,
        give_up_after=None,
        api=broker.api,
        on_retry=lambda *_: None,
        on_recovered=lambda _: None,
    )
    for source, numbers in enumerate([range(5), range(5, 8)]):
        values = [b'{"n":%d}' % n for n in numbers]
        await publishing.publish(OutgoingBatch(source, "c", values), {}, by_key=False)
    return stream, publishing


async def test_what_is_lost_is_published_again_also_where_that_takes_long(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    """Longer than what was acked is remembered for: a lost partition has no leader for a while."""
    _, publishing = await publishing_of_eight(broker)
    await broker.lose(8)
    monkeypatch.setattr("feedapi_client.liftbridge.at_least_once._KEPT_SECONDS", 0.2)

    async def late(*batch: Any, **how: Any) -> Any:
        await anyio.sleep(0.5)
        return await publish_until_acked(*batch, **how)

    monkeypatch.setattr("feedapi_client.liftbridge.at_least_once.publish_until_acked", late)
    await publishing.look_for_losses()
    assert set(await broker.numbers()) == set(range(8))


async def test_what_could_not_be_published_again_is_so_by_the_next_look(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    stream, publishing = await publishing_of_eight(broker)
    await broker.lose(2)

    async def gives_up(*batch: Any, **how: Any) -> Any:
        if b'{"n":7}' in batch[2]:
            raise AckTimeoutError("no ack", stream=stream.name, correlation_id="1")
        return await publish_until_acked(*batch, **how)

    with monkeypatch.context() as patch:
        patch.setattr("feedapi_client.liftbridge.at_least_once.publish_until_acked", gives_up)
        with pytest.raises(AckTimeoutError):
            await publishing.look_for_losses()
    await publishing.look_for_losses()
    assert set(await broker.numbers()) == set(range(8))


# Streams that are missing, paused, read-only, or others than before


async def test_a_relay_wakes_a_paused_partition_and_is_refused_by_a_read_only_one(
    broker: Broker, feed: Publisher
) -> None:
    stream = await broker.create()
    await broker.api.pause_stream(broker.name)
    await relay(feed, broker, stream, api=broker.api)
    assert await offsets(broker.api.subscribe(broker.name), 20) == list(range(20))
    await broker.api.set_readonly(broker.name)
    with pytest.raises(StreamReadonlyError):
        await relay(feed, broker, stream, api=broker.api)


async def test_a_running_relay_wakes_a_partition_that_is_paused(
    broker: Broker, feed: Publisher, impatient: None
) -> None:
    await broker.create()
    async with running(feed, broker, api=broker.api) as relay:
        await broker.api.pause_stream(broker.name)
        feed.extend(0, [{"n": n} for n in range(20, 40)])
        await eventually(lambda: relay.progress.events == 40)
    assert relay.progress.retries >= 1
    assert set(await broker.numbers()) == set(range(40))


async def test_a_stream_that_is_created_again_with_other_partitions_ends_the_relay(
    broker: Broker, feed: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)
    stream = await broker.create(partitions=2)
    async with FeedConsumer(feed.url or "") as consumer:
        relay = Relay(consumer, broker.publisher, stream, api=broker.api)

        async def replace() -> None:
            await eventually(lambda: relay.progress.events == 20)
            async with LiftbridgeApi(broker.address) as other:
                await other.delete_stream(broker.name)
                await other.create_stream(Stream(broker.name, partitions=4))

        with anyio.fail_after(SAFETY_NET):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(replace)
                with pytest.raises(StreamError, match="it has 4 partitions"):
                    await relay.run()
    assert relay.progress.recovered == 0


# What a relay is given


def test_a_relay_needs_a_stream_and_acks() -> None:
    consumer = FeedConsumer("http://localhost/feed")
    with pytest.raises(ValueError, match="stream"):
        Relay(consumer, LiftbridgePublisher())
    with pytest.raises(ValueError, match="no subject that can be published to"):
        Relay(consumer, LiftbridgePublisher(), Stream("s", "orders.>"))
    with pytest.raises(ValueError, match="acks"):
        Relay(consumer, LiftbridgePublisher(ack_policy=AckPolicy.NONE), "s")
