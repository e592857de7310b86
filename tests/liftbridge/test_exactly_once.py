"""Exactly once: the stream holds events and positions together, and no other store exists."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import anyio
import pytest

from feedapi_client import FeedConsumer, FeedError, FetchOptions, Limits
from feedapi_client.liftbridge import (
    LiftbridgePublisher,
    MessageTooLargeError,
    Relay,
    RelayFencedError,
)
from feedapi_client.testing import Publisher
from tests.liftbridge.broker import Broker
from tests.liftbridge.helpers import SAFETY_NET, eventually
from tests.liftbridge.ledgers import (
    FORMATS,
    SMALL,
    batches,
    events,
    outgoing,
    relay,
    relayed,
    store_of,
)
from tests.liftbridge.middle import Fault, Middle, man_in_the_middle

pytestmark = pytest.mark.anyio

Feeds = Callable[..., Publisher]


def assert_in_order(found: list[int], count: int) -> None:
    """Assert that each event is there once, and those of an entity are in order."""
    assert sorted(found) == list(range(count))
    for entity in range(7):
        mine = [n for n in found if n % 7 == entity]
        assert mine == sorted(mine)


@pytest.mark.parametrize("format", FORMATS)
async def test_a_feed_is_relayed_once_and_a_new_relay_continues_where_the_stream_ends(
    feedapi_publisher_factory: Feeds, broker: Broker, format: str
) -> None:
    """Also through splits, with drained partitions and transferred cursors."""
    feed = feedapi_publisher_factory(2, page_size=70, vary=True)
    await broker.create(once=True)
    changes: list[Callable[[], object]] = [
        lambda: feed.split(0, method="starts-after"),
        lambda: feed.split(1, method="cursor-from"),
        lambda: None,
    ]
    for start, change in zip((0, 300, 600), changes, strict=True):
        for event in events(300, start):
            feed.publish(event["entity"], event)
        done = await relay(feed, broker, store_of(broker, format))
        assert done.exactly_once
        change()
    assert_in_order(await relayed(broker), 900)


async def test_an_event_message_has_the_key_and_headers_of_its_event(
    feedapi_publisher: Publisher, broker: Broker
) -> None:
    feedapi_publisher.extend(0, events(10))
    await broker.create(once=True)
    await relay(
        feedapi_publisher,
        broker,
        store_of(broker, "events"),
        key=lambda event: b"%d" % event.json()["n"],
        headers=lambda event: {"n": b"%d" % event.json()["n"]},
    )
    [batch] = await batches(broker)
    assert batch.keys == tuple(b"%d" % n for n in range(10))
    headers = [message.headers for message in await broker.messages()]
    assert [each["n"] for each in headers if "n" in each] == list(batch.keys)


async def test_one_message_is_one_batch_in_the_batch_format(
    feedapi_publisher: Publisher, broker: Broker
) -> None:
    feedapi_publisher.extend(0, events(10))
    await broker.create(once=True)
    await relay(feedapi_publisher, broker, store_of(broker))
    [batch] = await batches(broker)
    [message] = [m for m in await broker.messages() if m.headers["feedapi-format"] == b"batch"]
    assert message.value.split(b"\n") == [event.raw for event in batch.events]
    cursor = message.headers["feedapi-cursor"].decode()
    assert (batch.partition, batch.cursor, batch.keys) == (0, cursor, ())


def test_what_does_not_fit_together_is_refused_before_the_first_event(broker: Broker) -> None:
    def consumer(format: str, limits: Limits | None = None) -> FeedConsumer:
        store = store_of(broker, format)
        return FeedConsumer("http://localhost/feed", store=store, limits=limits)

    with pytest.raises(ValueError, match="events"):
        Relay(consumer("batch", SMALL), broker.publisher, key=lambda event: b"")
    with pytest.raises(ValueError, match="max_batch_bytes=524288"):
        Relay(consumer("batch"), broker.publisher)
    Relay(consumer("events"), broker.publisher)
    assert Relay(consumer("batch", SMALL), broker.publisher, broker.name).exactly_once
    with pytest.raises(ValueError, match="not to other"):
        Relay(consumer("batch", SMALL), broker.publisher, "other")


async def test_start_last_is_kept_before_the_first_event_is_relayed(
    feedapi_publisher: Publisher, broker: Broker
) -> None:
    feedapi_publisher.extend(0, events(10))
    await broker.create(once=True)
    url = feedapi_publisher.url or ""
    async with FeedConsumer(url, store=store_of(broker), start="last"):
        pass
    feedapi_publisher.extend(0, events(10, 10))
    async with FeedConsumer(
        url, store=store_of(broker), start="last", follow=False, limits=SMALL
    ) as consumer:
        await Relay(consumer, broker.publisher).run()
    assert await relayed(broker) == list(range(10, 20))


async def test_a_batch_that_does_not_fit_into_a_message_is_an_error_with_advice(
    feedapi_publisher: Publisher, broker: Broker
) -> None:
    feedapi_publisher.extend(0, [{"entity": "a", "text": "x" * 900}] * 10)
    await broker.create(once=True)
    broker.publisher.max_message_bytes = 3000
    async with FeedConsumer(
        feedapi_publisher.url or "",
        store=store_of(broker),
        follow=False,
        limits=Limits(max_batch_bytes=2000),
        fetch=FetchOptions(page_size_hint=10),
    ) as consumer:
        relay = Relay(consumer, broker.publisher)
        with pytest.raises(MessageTooLargeError, match=r"10 events.*max_batch_bytes.*'events'"):
            await relay.run()


@pytest.mark.parametrize("format", FORMATS)
async def test_a_broker_that_loses_doubles_and_garbles_changes_nothing(
    feedapi_publisher_factory: Feeds, broker: Broker, middle: Middle, format: str
) -> None:
    feed = feedapi_publisher_factory(1, page_size=40, vary=True)
    feed.extend(0, events(400))
    await broker.create(once=True)
    random, often = Random(7), 0.4 if format == "batch" else 0.04
    middle.decide = lambda _: random.choice(list(Fault)) if random.random() < often else None
    for _ in range(50):
        try:
            await relay(feed, broker, store_of(broker, format))
        except FeedError:
            continue  # A supervisor would start it again, too.
        break
    middle.clear()
    assert sorted(await relayed(broker)) == list(range(400))


@pytest.mark.parametrize("format", FORMATS)
async def test_a_broker_that_restarts_in_the_middle_changes_nothing(
    feedapi_publisher_factory: Feeds, broker: Broker, format: str
) -> None:
    feed = feedapi_publisher_factory(1, page_size=20)
    feed.extend(0, events(1000))
    await broker.create(once=True)
    # A short ack timeout, because messages are lost while the broker is down; many attempts,
    # because acks may take longer than that.
    async with (
        man_in_the_middle(broker.nats_url) as middle,
        LiftbridgePublisher(middle.url, ack_timeout=0.3) as broker.publisher,
        anyio.create_task_group() as tasks,
    ):

        async def restart() -> None:
            for received in (5, 15):
                await eventually(lambda received=received: middle.received > received)  # type: ignore[misc]
                await broker.crash()

        tasks.start_soon(restart)
        store = store_of(broker, format, give_up_after=SAFETY_NET)
        await relay(feed, broker, store)
    assert await relayed(broker) == list(range(1000))


async def test_an_idle_relay_ends_when_a_snapshot_shows_that_it_is_fenced(
    feedapi_publisher: Publisher, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedapi_client.liftbridge.relay._LOOK_SECONDS", 0.05)
    feedapi_publisher.extend(0, events(3))
    await broker.create(once=True)
    idle = store_of(broker, "events", snapshot_every=1)
    look, fenced = partial(idle.keep, idle_seconds=0), anyio.Event()

    async def keep() -> bool:
        await fenced.wait()  # a snapshot before would fence the successor
        return await look()

    monkeypatch.setattr(idle, "keep", keep)
    async with (
        FeedConsumer(feedapi_publisher.url or "", store=idle) as consumer,
        anyio.create_task_group() as tasks,
    ):
        idler = Relay(consumer, broker.publisher)

        async def fence() -> None:
            await eventually(lambda: idler.progress.events == 3)
            successor = store_of(broker, "events")
            [(partition, position)] = (await successor.load(consumer.key)).items()
            moved = {partition: position.advance("d")}
            await successor.save(consumer.key, moved, transaction=outgoing(4))
            fenced.set()

        tasks.start_soon(fence)
        with anyio.fail_after(SAFETY_NET), pytest.raises(RelayFencedError, match="another relay"):
            await idler.run()
