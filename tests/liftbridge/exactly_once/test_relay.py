"""Exactly once: the stream holds events and positions together, and no other store exists."""

from __future__ import annotations

from functools import partial
from random import Random

import anyio
import pytest

from feedapi_client import FeedConsumer, FeedError, FetchOptions, Limits
from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgePublisher,
    MessageTooLargeError,
    Relay,
    RelayFencedError,
    StreamCursorStore,
)
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import BrokerFault, LiftbridgeBroker, NatsServer
from tests.liftbridge.exactly_once.streams import (
    FORMATS,
    SMALL,
    Feeds,
    Make,
    batches,
    events,
    outgoing,
    read,
    relay,
)
from tests.liftbridge.helpers import SAFETY_NET, Faults, eventually

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("format", FORMATS)
async def test_a_feed_is_relayed_once_and_a_new_relay_continues_where_the_stream_ends(
    feedapi_publisher_factory: Feeds,
    make: Make,
    publisher: LiftbridgePublisher,
    api: LiftbridgeApi,
    broker: LiftbridgeBroker,
    format: str,
) -> None:
    feed = feedapi_publisher_factory(1, page_size=70, vary=True)
    for start in (0, 300, 600):
        feed.extend(0, events(300, start))
        done = await relay(feed, publisher, make(format=format))
        assert done.exactly_once
    found = await read(api, broker)
    assert sorted(found) == list(range(900))
    for entity in range(7):
        mine = [n for n in found if n % 7 == entity]
        assert mine == sorted(mine)


@pytest.mark.parametrize("format", FORMATS)
async def test_splits_drained_partitions_and_transferred_cursors_survive_a_new_relay(
    feedapi_publisher_factory: Feeds,
    make: Make,
    publisher: LiftbridgePublisher,
    api: LiftbridgeApi,
    broker: LiftbridgeBroker,
    format: str,
) -> None:
    feed = feedapi_publisher_factory(2, page_size=70, vary=True)

    def publish(start: int) -> None:
        for n in range(start, start + 200):
            feed.publish(f"e{n % 7}", {"entity": f"e{n % 7}", "n": n})

    publish(0)
    await relay(feed, publisher, make(format=format))
    feed.split(0, method="starts-after")
    feed.split(1, method="cursor-from")
    publish(200)
    await relay(feed, publisher, make(format=format))
    publish(400)
    await relay(feed, publisher, make(format=format))
    found = await read(api, broker)
    assert sorted(found) == list(range(600))
    for entity in range(7):
        mine = [n for n in found if n % 7 == entity]
        assert mine == sorted(mine)


async def test_an_event_message_has_the_key_and_headers_of_its_event(
    feedapi_publisher: Publisher,
    make: Make,
    publisher: LiftbridgePublisher,
    api: LiftbridgeApi,
    broker: LiftbridgeBroker,
) -> None:
    feedapi_publisher.extend(0, events(10))
    await relay(
        feedapi_publisher,
        publisher,
        make(format="events"),
        key=lambda event: b"%d" % event.json()["n"],
        headers=lambda event: {"n": b"%d" % event.json()["n"]},
    )
    [batch] = await batches(api, broker)
    assert batch.keys == tuple(b"%d" % n for n in range(10))
    assert [
        message.headers["n"] for message in broker.messages("s") if "n" in message.headers
    ] == list(batch.keys)


async def test_one_message_is_one_batch_in_the_batch_format(
    feedapi_publisher: Publisher,
    make: Make,
    publisher: LiftbridgePublisher,
    api: LiftbridgeApi,
    broker: LiftbridgeBroker,
) -> None:
    feedapi_publisher.extend(0, events(10))
    await relay(feedapi_publisher, publisher, make())
    [batch] = await batches(api, broker)
    [message] = [
        message for message in broker.messages("s") if message.headers["feedapi-format"] == b"batch"
    ]
    assert message.value.split(b"\n") == [event.raw for event in batch.events]
    assert (batch.partition, batch.cursor, batch.keys) == (
        0,
        message.headers["feedapi-cursor"].decode(),
        (),
    )


def test_keys_and_headers_are_refused_with_the_batch_format(
    publisher: LiftbridgePublisher, make: Make
) -> None:
    consumer = FeedConsumer("http://localhost/feed", store=make())
    with pytest.raises(ValueError, match="events"):
        Relay(consumer, publisher, key=lambda event: b"")


def test_batches_that_would_not_fit_into_a_message_are_refused_before_the_first(
    publisher: LiftbridgePublisher, make: Make
) -> None:
    with pytest.raises(ValueError, match="max_batch_bytes=524288"):
        Relay(FeedConsumer("http://localhost/feed", store=make()), publisher)
    Relay(FeedConsumer("http://localhost/feed", store=make(format="events")), publisher)


def test_the_events_go_where_the_positions_are(publisher: LiftbridgePublisher, make: Make) -> None:
    consumer = FeedConsumer("http://localhost/feed", store=make(), limits=SMALL)
    assert Relay(consumer, publisher, "s").exactly_once
    with pytest.raises(ValueError, match="not to other"):
        Relay(consumer, publisher, "other")


async def test_start_last_is_kept_before_the_first_event_is_relayed(
    feedapi_publisher: Publisher,
    make: Make,
    publisher: LiftbridgePublisher,
    api: LiftbridgeApi,
    broker: LiftbridgeBroker,
) -> None:
    feedapi_publisher.extend(0, events(10))
    async with FeedConsumer(feedapi_publisher.url or "", store=make(), start="last"):
        pass
    feedapi_publisher.extend(0, events(10, 10))
    async with FeedConsumer(
        feedapi_publisher.url or "", store=make(), start="last", follow=False, limits=SMALL
    ) as consumer:
        await Relay(consumer, publisher).run()
    assert await read(api, broker) == list(range(10, 20))


async def test_a_batch_that_does_not_fit_into_a_message_is_an_error_with_advice(
    feedapi_publisher: Publisher,
    nats_server: NatsServer,
    api: LiftbridgeApi,
    broker: LiftbridgeBroker,
) -> None:
    feedapi_publisher.extend(0, [{"entity": "a", "text": "x" * 900}] * 10)
    async with (
        LiftbridgePublisher(nats_server.url, max_message_bytes=3000) as publisher,
        FeedConsumer(
            feedapi_publisher.url or "",
            store=StreamCursorStore(publisher, api, "s"),
            follow=False,
            limits=Limits(max_batch_bytes=2000),
            fetch=FetchOptions(page_size_hint=10),
        ) as consumer,
    ):
        relay = Relay(consumer, publisher)
        with pytest.raises(MessageTooLargeError, match=r"10 events.*max_batch_bytes.*'events'"):
            await relay.run()


@pytest.mark.parametrize("format", FORMATS)
async def test_a_broker_that_loses_doubles_and_garbles_changes_nothing(
    feedapi_publisher_factory: Feeds,
    make: Make,
    publisher: LiftbridgePublisher,
    api: LiftbridgeApi,
    broker: LiftbridgeBroker,
    faults: Faults,
    format: str,
) -> None:
    feed = feedapi_publisher_factory(1, page_size=40, vary=True)
    feed.extend(0, events(400))
    random, often = Random(7), 0.4 if format == "batch" else 0.04
    faults.decide = lambda message: (
        random.choice(list(BrokerFault)) if random.random() < often else None
    )
    for _ in range(50):
        try:
            await relay(feed, publisher, make(format=format))
        except FeedError:
            continue  # A supervisor would start it again, too.
        break
    faults.clear()
    assert sorted(await read(api, broker)) == list(range(400))


@pytest.mark.parametrize("format", FORMATS)
async def test_a_broker_that_restarts_in_the_middle_changes_nothing(
    feedapi_publisher_factory: Feeds,
    nats_server: NatsServer,
    api: LiftbridgeApi,
    broker: LiftbridgeBroker,
    format: str,
) -> None:
    feed = feedapi_publisher_factory(1, page_size=20)
    feed.extend(0, events(1000))

    async def restart() -> None:
        for received in (5, 15):
            await eventually(lambda received=received: broker.received > received)  # type: ignore[misc]
            await broker.restart()

    # A short ack timeout, because messages are lost while the broker is down; many attempts,
    # because acks may take longer than that.
    async with (
        LiftbridgePublisher(nats_server.url, ack_timeout=0.3) as publisher,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(restart)
        store = StreamCursorStore(publisher, api, "s", format=format, give_up_after=SAFETY_NET)
        await relay(feed, publisher, store)
    assert await read(api, broker) == list(range(1000))


async def test_an_idle_relay_ends_when_a_snapshot_shows_that_it_is_fenced(
    feedapi_publisher_factory: Feeds,
    publisher: LiftbridgePublisher,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("feedapi_client.liftbridge.relay._LOOK_SECONDS", 0.05)
    feed = feedapi_publisher_factory(1)
    feed.extend(0, events(3))
    idle = make(format="events", snapshot_every=1)
    monkeypatch.setattr(idle, "keep", partial(idle.keep, idle_seconds=0))
    async with (
        FeedConsumer(feed.url or "", store=idle) as consumer,
        anyio.create_task_group() as tasks,
    ):
        idler = Relay(consumer, publisher)

        async def fence() -> None:
            await eventually(lambda: idler.progress.events == 3)
            successor = make(format="events")
            [(partition, position)] = (await successor.load(consumer.key)).items()
            moved = {partition: position.advance("d")}
            await successor.save(consumer.key, moved, transaction=outgoing(4))

        tasks.start_soon(fence)
        with anyio.fail_after(SAFETY_NET), pytest.raises(RelayFencedError, match="another relay"):
            await idler.run()
