"""The relay, at least once: a real feed over HTTP, a real NATS server, a simulated broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import orjson
import pytest

from feedapi_client import FeedConsumer, FetchOptions, Limits, MemoryCursorStore, RetryPolicy
from feedapi_client.liftbridge import (
    AckPolicy,
    AckTimeoutError,
    LiftbridgePublisher,
    Message,
    MessageTooLargeError,
    Relay,
    Stream,
)
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import BrokerFault, LiftbridgeBroker, NatsServer
from tests.liftbridge.helpers import Faults, eventually

pytestmark = pytest.mark.anyio

Feeds = Callable[..., Publisher]


@pytest.fixture
async def faults(broker: LiftbridgeBroker, publisher: LiftbridgePublisher) -> AsyncIterator[Faults]:
    async with Faults(broker, publisher) as faults:
        yield faults


def numbers(broker: LiftbridgeBroker, stream: str = "s", partition: int = 0) -> list[int]:
    return [orjson.loads(message.value)["n"] for message in broker.messages(stream, partition)]


def events(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"entity": f"e{i % 7}", "n": i} for i in range(start, start + count)]


async def relay(
    feed: Publisher,
    publisher: LiftbridgePublisher,
    stream: Stream | str = "s",
    *,
    store: Any = None,
    **options: Any,
) -> Relay:
    assert feed.url
    async with FeedConsumer(feed.url, store=store, follow=False) as consumer:
        relay = Relay(consumer, publisher, stream, **options)
        await relay.run()
    return relay


async def test_every_event_becomes_a_message_in_order(
    feedapi_publisher: Publisher, broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    feedapi_publisher.extend(0, events(2500))
    done = await relay(feedapi_publisher, publisher)
    assert numbers(broker) == list(range(2500))
    assert (done.progress.events, done.progress.retries) == (2500, 0)


async def test_a_message_holds_payload_partition_and_cursor(
    feedapi_publisher: Publisher, broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    feedapi_publisher.append(0, b'{"entity": "a",  "n":1}')
    store = MemoryCursorStore()
    await relay(feedapi_publisher, publisher, store=store)
    [message] = broker.messages("s")
    assert message.value == b'{"entity": "a",  "n":1}'
    assert message.headers["feedapi-partition"] == b"0"
    assert feedapi_publisher.url
    [position] = (await store.load(FeedConsumer(feedapi_publisher.url).key)).values()
    assert message.headers["feedapi-cursor"].decode() == position.cursor


async def test_a_message_has_the_given_key_and_headers_and_the_key_chooses_the_partition(
    feedapi_publisher: Publisher, broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s", partitions=3)
    feedapi_publisher.extend(0, events(100))
    stream = Stream("s", partitions=3)
    await relay(
        feedapi_publisher,
        publisher,
        stream,
        key=lambda event: event.json()["entity"].encode(),
        headers=lambda event: {"n": b"%d" % event.json()["n"]},
    )
    messages = [
        (partition, message)
        for partition in range(3)
        for message in broker.messages("s", partition)
    ]
    assert len(messages) == 100
    for partition, message in messages:
        assert stream.partition_of(message.key) == partition
        assert message.key.decode() == orjson.loads(message.value)["entity"]
        assert int(message.headers["n"]) == orjson.loads(message.value)["n"]
    for partition in range(3):
        assert numbers(broker, partition=partition) == sorted(numbers(broker, partition=partition))


async def test_without_a_key_the_feeds_partition_chooses_the_partition(
    feedapi_publisher_factory: Feeds, broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    feed = feedapi_publisher_factory(3)
    for partition in range(3):
        feed.extend(partition, events(10, 10 * partition))
    await broker.create_stream("s", partitions=2)
    await relay(feed, publisher, Stream("s", partitions=2))
    assert sorted(numbers(broker, partition=0)) == [*range(10), *range(20, 30)]
    assert numbers(broker, partition=1) == list(range(10, 20))


async def test_headers_of_events_can_be_added_to_messages(
    feedapi_publisher_factory: Feeds, broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    feed = feedapi_publisher_factory(1, dialect="v1")
    feed.append(0, {"entity": "a"}, headers={"trace": "t1"})
    await broker.create_stream("s")
    async with FeedConsumer(
        feed.url or "", follow=False, v1_partitions=1, fetch=FetchOptions(v1_headers=["_all"])
    ) as consumer:
        await Relay(
            consumer,
            publisher,
            "s",
            headers=lambda event: {
                key: str(value).encode() for key, value in event.headers.items()
            },
        ).run()
    assert broker.messages("s")[0].headers["trace"] == b"t1"


async def test_headers_of_events_do_not_replace_those_of_the_relay(
    feedapi_publisher: Publisher, broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    feedapi_publisher.extend(0, events(2))
    await relay(
        feedapi_publisher,
        publisher,
        headers=lambda _: {"feedapi-partition": b"9", "feedapi-cursor": b"x", "own": b"kept"},
    )
    for message in broker.messages("s"):
        assert message.headers["own"] == b"kept"
        assert message.headers["feedapi-partition"] == b"0"
        assert message.headers["feedapi-cursor"] != b"x"


async def test_a_second_run_continues_after_the_committed_cursor(
    feedapi_publisher: Publisher, broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    store = MemoryCursorStore()
    for start in (0, 300):
        feedapi_publisher.extend(0, events(300, start))
        await relay(feedapi_publisher, publisher, store=store)
    assert numbers(broker) == list(range(600))


@pytest.mark.usefixtures("short_waits")
async def test_splits_are_followed_in_order(
    feedapi_publisher: Publisher, broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    feedapi_publisher.extend(0, events(500))
    children = feedapi_publisher.split(0, method="starts-after")
    for n in range(500, 900):
        feedapi_publisher.publish(f"e{n % 7}", {"entity": f"e{n % 7}", "n": n})
    feedapi_publisher.split(children[0], method="cursor-from")
    for n in range(900, 1200):
        feedapi_publisher.publish(f"e{n % 7}", {"entity": f"e{n % 7}", "n": n})
    await relay(feedapi_publisher, publisher)
    found = numbers(broker)
    assert sorted(found) == list(range(1200))
    for entity in range(7):
        mine = [n for n in found if n % 7 == entity]
        assert mine == sorted(mine)


async def test_the_cursor_is_never_ahead_of_the_acks(
    feedapi_publisher_factory: Feeds,
    broker: LiftbridgeBroker,
    publisher: LiftbridgePublisher,
    faults: Faults,
) -> None:
    await broker.create_stream("s")
    feed = feedapi_publisher_factory(1, page_size=100)
    feed.extend(0, events(1000))
    store = MemoryCursorStore()
    faults.decide = lambda message: (
        BrokerFault.DROP_ACK if orjson.loads(message.value)["n"] >= 500 else None
    )
    with pytest.raises(AckTimeoutError):
        async with FeedConsumer(
            feed.url or "",
            store=store,
            follow=False,
            limits=Limits(max_batch_bytes=1000),
            retry=RetryPolicy(give_up_after=0.1),
        ) as consumer:
            await Relay(consumer, publisher, "s").run()
    committed = (await store.load(FeedConsumer(feed.url or "").key))[0].cursor
    seen = [m for m in broker.messages("s") if m.headers["feedapi-cursor"].decode() == committed]
    assert seen
    assert max(orjson.loads(m.value)["n"] for m in seen) < 500
    faults.clear()
    await relay(feed, publisher, store=store)
    assert set(numbers(broker)) == set(range(1000))


async def test_a_lost_message_is_published_again_with_all_after_it(
    feedapi_publisher: Publisher,
    broker: LiftbridgeBroker,
    publisher: LiftbridgePublisher,
    faults: Faults,
) -> None:
    await broker.create_stream("s")
    feedapi_publisher.extend(0, events(10))
    faults.script(None, None, None, BrokerFault.LOSE)
    done = await relay(feedapi_publisher, publisher)
    assert numbers(broker) == [0, 1, 2, *range(4, 10), *range(3, 10)]
    assert done.progress.retries == 1


@pytest.mark.parametrize(
    "fault",
    [BrokerFault.DOUBLE_ACK, BrokerFault.FOREIGN_ACK, BrokerFault.UNKNOWN_ACK, BrokerFault.GARBAGE],
)
async def test_acks_that_are_wrong_or_double_change_nothing(
    feedapi_publisher: Publisher,
    broker: LiftbridgeBroker,
    publisher: LiftbridgePublisher,
    fault: BrokerFault,
) -> None:
    await broker.create_stream("s")
    feedapi_publisher.extend(0, events(300))
    broker.always = fault
    await relay(feedapi_publisher, publisher)
    assert numbers(broker) == list(range(300))


class LostDuringRestart:
    """Restarts something after `at` messages. What is published meanwhile is lost."""

    def __init__(
        self, broker: LiftbridgeBroker, at: int, restart: Callable[[], Awaitable[object]]
    ) -> None:
        self._at = at
        self._restart = restart
        self._down = anyio.Event()
        self._up = False
        broker.decide = self._decide

    def _decide(self, message: Message) -> BrokerFault | None:
        self._at -= 1
        if self._at >= 0 or self._up:
            return None
        self._down.set()
        return BrokerFault.LOSE

    async def run(self) -> None:
        await self._down.wait()
        await self._restart()
        self._up = True


async def relay_during_restart(
    feed: Publisher,
    server: NatsServer,
    broker: LiftbridgeBroker,
    restart: Callable[[], Awaitable[object]],
) -> Relay:
    await broker.create_stream("s")
    feed.extend(0, events(2000))
    fault = LostDuringRestart(broker, 200, restart)
    # A short ack timeout, because messages may be lost on the way; many attempts, because acks may
    # take longer than that.
    async with (
        LiftbridgePublisher(server.url, ack_timeout=0.3, max_in_flight=20) as publisher,
        FeedConsumer(feed.url or "", follow=False) as consumer,
    ):
        running = Relay(consumer, publisher, "s")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fault.run)
            await running.run()
    return running


async def test_a_broker_that_restarts_in_the_middle_costs_a_retry(
    feedapi_publisher: Publisher, nats_server: NatsServer, broker: LiftbridgeBroker
) -> None:
    done = await relay_during_restart(feedapi_publisher, nats_server, broker, broker.restart)
    assert set(numbers(broker)) == set(range(2000))
    assert done.progress.retries >= 1


async def test_a_nats_server_that_restarts_in_the_middle_costs_a_retry(
    feedapi_publisher: Publisher,
) -> None:
    with NatsServer() as server:
        async with LiftbridgeBroker(server.url) as broker:
            done = await relay_during_restart(
                feedapi_publisher, server, broker, lambda: anyio.to_thread.run_sync(server.restart)
            )
    assert set(numbers(broker)) == set(range(2000))
    assert done.progress.retries >= 1


async def test_a_message_that_is_too_large_ends_the_relay_and_says_which_stream(
    feedapi_publisher: Publisher, nats_server: NatsServer, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("s")
    feedapi_publisher.extend(
        0, [{"entity": "a", "n": 0}, {"entity": "a", "n": 1, "text": "x" * 2000}]
    )
    async with LiftbridgePublisher(nats_server.url, max_message_bytes=1000) as publisher:
        with pytest.raises(MessageTooLargeError, match="stream s"):
            await relay(feedapi_publisher, publisher)


async def test_a_relay_ends_when_its_consumer_is_stopped(
    feedapi_publisher: Publisher, broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    feedapi_publisher.extend(0, events(100))
    async with (
        FeedConsumer(feedapi_publisher.url or "") as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(Relay(consumer, publisher, "s").run)
        await eventually(lambda: len(broker.messages("s")) == 100)
        consumer.stop()


def test_a_relay_needs_a_stream_and_acks() -> None:
    consumer = FeedConsumer("http://localhost/feed")
    with pytest.raises(ValueError, match="stream"):
        Relay(consumer, LiftbridgePublisher())
    with pytest.raises(ValueError, match="acks"):
        Relay(consumer, LiftbridgePublisher(ack_policy=AckPolicy.NONE), "s")


@pytest.mark.parametrize("argument", ["key", "headers"])
async def test_a_function_that_returns_text_is_named(
    feedapi_publisher: Publisher,
    broker: LiftbridgeBroker,
    publisher: LiftbridgePublisher,
    argument: str,
) -> None:
    await broker.create_stream("s")
    feedapi_publisher.append(0, {"n": 0})
    text: Any = {"key": lambda event: "e", "headers": lambda event: {"source": "docs"}}[argument]
    with pytest.raises(TypeError, match=f"{argument} of the relay returned str, and a message"):
        await relay(feedapi_publisher, publisher, **{argument: text})
