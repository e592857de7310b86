"""Exactly once: the stream holds events and positions together, and no other store exists."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import anyio
import orjson
import pytest

from feedapi_client import FeedConsumer, FeedError, FencedError, Limits, StoreError
from feedapi_client.liftbridge import (
    BrokerUnavailableError,
    LiftbridgeApi,
    LiftbridgePublisher,
    MessageTooLargeError,
    OutgoingBatch,
    Relay,
    RelayedBatch,
    RelayFencedError,
    RelayReader,
    Stream,
    StreamCursorStore,
    StreamError,
)
from feedapi_client.model import FeedKey, Position
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import BrokerFault, LiftbridgeBroker, NatsServer
from tests.liftbridge.helpers import SAFETY_NET, Faults, eventually

pytestmark = pytest.mark.anyio

Feeds = Callable[..., Publisher]
FORMATS = ["batch", "events"]
KEY = FeedKey("http://localhost/feed")
SMALL = Limits(max_batch_bytes=2000)


@pytest.fixture
async def broker(api_broker: LiftbridgeBroker) -> LiftbridgeBroker:
    """The broker with the gRPC API."""
    await api_broker.create_stream("s", concurrency_control=True)
    return api_broker


@pytest.fixture
async def publisher(
    nats_server: NatsServer, broker: LiftbridgeBroker
) -> AsyncIterator[LiftbridgePublisher]:
    async with LiftbridgePublisher(nats_server.url, ack_timeout=SAFETY_NET) as publisher:
        yield publisher


@pytest.fixture
async def faults(broker: LiftbridgeBroker, publisher: LiftbridgePublisher) -> AsyncIterator[Faults]:
    async with Faults(broker, publisher) as faults:
        yield faults


@pytest.fixture
def make(publisher: LiftbridgePublisher, api: LiftbridgeApi) -> Callable[..., StreamCursorStore]:
    return lambda **options: StreamCursorStore(publisher, api, "s", **options)


Make = Callable[..., StreamCursorStore]


def events(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"entity": f"e{i % 7}", "n": i} for i in range(start, start + count)]


def outgoing(*numbers: int, partition: int = 0, cursor: str = "c") -> OutgoingBatch:
    return OutgoingBatch(partition, cursor, [b'{"n":%d}' % n for n in numbers])


async def relay(
    feed: Publisher, publisher: LiftbridgePublisher, store: StreamCursorStore, **options: Any
) -> Relay:
    assert feed.url
    async with FeedConsumer(feed.url, store=store, follow=False, limits=SMALL) as consumer:
        relay = Relay(consumer, publisher, **options)
        await relay.run()
    return relay


async def batches(
    api: LiftbridgeApi, broker: LiftbridgeBroker, start: Any = "earliest"
) -> list[RelayedBatch]:
    until = broker.next_offset("s") - 1
    return (
        [batch async for batch in RelayReader(api, "s", start=start, until=until)]
        if until >= 0
        else []
    )


def stored(broker: LiftbridgeBroker) -> list[int]:
    """All events in the stream, those of interrupted attempts too."""
    return [orjson.loads(message.value)["n"] for message in broker.messages("s")]


async def read(api: LiftbridgeApi, broker: LiftbridgeBroker) -> list[int]:
    return [
        orjson.loads(event)["n"] for batch in await batches(api, broker) for event in batch.events
    ]


# The relay


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
    assert sorted(await read(api, broker)) == list(range(900))
    for entity in range(7):
        mine = [n for n in await read(api, broker) if n % 7 == entity]
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
    assert message.value.split(b"\n") == list(batch.events)
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
    feedapi_publisher.append(0, {"entity": "a", "text": "x" * 3000})
    async with LiftbridgePublisher(nats_server.url, max_message_bytes=3000) as publisher:
        with pytest.raises(StoreError, match="max_batch_bytes") as caught:
            await relay(feedapi_publisher, publisher, StreamCursorStore(publisher, api, "s"))
    assert isinstance(caught.value.__cause__, MessageTooLargeError)


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
        store = StreamCursorStore(publisher, api, "s", format=format, attempts=1000)
        await relay(feed, publisher, store)
    assert await read(api, broker) == list(range(1000))


# The store


async def test_what_was_saved_is_loaded_by_another_store(make: Make) -> None:
    store = make()
    assert await store.load(KEY) == {}
    positions = {3: Position("c3"), 7: Position("äöü\n" * 2000, "superseded")}
    await store.save(KEY, positions)
    await store.save(KEY, {3: Position("c4", "drained", 2)})
    assert await make().load(KEY) == {**positions, 3: Position("c4", "drained", 2)}


async def test_events_and_position_are_written_together(
    make: Make, api: LiftbridgeApi, broker: LiftbridgeBroker
) -> None:
    for format in FORMATS:
        store = make(format=format)
        revision = len(await store.load(KEY)) + 1
        await store.save(KEY, {0: Position("c", revision=revision)}, transaction=outgoing(1, 2, 3))
    assert await read(api, broker) == [1, 2, 3] * 2


async def test_a_save_with_another_revision_than_the_next_is_fenced(make: Make) -> None:
    store = make()
    await store.load(KEY)
    await store.save(KEY, {0: Position("c")})
    for revision in (1, 3):
        with pytest.raises(FencedError):
            await store.save(KEY, {0: Position("d", revision=revision), 1: Position("e")})
    assert await make().load(KEY) == {0: Position("c")}


@pytest.mark.parametrize("format", FORMATS)
async def test_a_second_relay_is_fenced_by_the_first_that_writes(
    make: Make, api: LiftbridgeApi, broker: LiftbridgeBroker, format: str
) -> None:
    first, second = make(format=format), make(format=format)
    await first.load(KEY)
    await second.load(KEY)
    await second.save(KEY, {0: Position("c")}, transaction=outgoing(1, 2))
    with pytest.raises(RelayFencedError, match="another relay"):
        await first.save(KEY, {0: Position("c")}, transaction=outgoing(1, 2, 3))
    await second.save(KEY, {0: Position("d", revision=2)}, transaction=outgoing(3, 4))
    assert await read(api, broker) == [1, 2, 3, 4]


class StoreThatWaits(StreamCursorStore):
    """Lets all relays load the stream before one of them writes."""

    def __init__(self, *arguments: Any, loaded: anyio.Semaphore, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._loaded = loaded

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        positions = await super().load(feed)
        if self._loaded.value:
            self._loaded.acquire_nowait()
            await eventually(lambda: not self._loaded.value)
        return positions


@pytest.mark.parametrize("format", FORMATS)
async def test_relays_at_once_write_each_batch_once(
    feedapi_publisher_factory: Feeds,
    nats_server: NatsServer,
    api: LiftbridgeApi,
    broker: LiftbridgeBroker,
    format: str,
) -> None:
    feed = feedapi_publisher_factory(1, page_size=50, vary=True)
    feed.extend(0, events(1000))
    fenced = 0
    loaded = anyio.Semaphore(3)

    async def one() -> None:
        nonlocal fenced
        async with LiftbridgePublisher(nats_server.url, ack_timeout=SAFETY_NET) as publisher:
            while True:
                store = StoreThatWaits(publisher, api, "s", format=format, loaded=loaded)
                try:
                    await relay(feed, publisher, store)
                except (FencedError, StoreError):
                    fenced += 1
                else:
                    return

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(one)
    assert sorted(await read(api, broker)) == list(range(1000))
    assert fenced >= 2


@pytest.mark.parametrize("format", FORMATS)
async def test_a_lost_ack_does_not_write_twice(
    make: Make, api: LiftbridgeApi, broker: LiftbridgeBroker, faults: Faults, format: str
) -> None:
    store = make(format=format)
    await store.load(KEY)
    faults.script(BrokerFault.DROP_ACK, BrokerFault.DROP_ACK, BrokerFault.DROP_ACK)
    await store.save(KEY, {0: Position("c")}, transaction=outgoing(1, 2))
    await store.save(KEY, {0: Position("d", revision=2)}, transaction=outgoing(3))
    assert await read(api, broker) == [1, 2, 3]
    assert (await make().load(KEY))[0].cursor == "d"


async def test_a_message_lost_in_the_middle_voids_the_attempt_and_the_next_one_counts(
    make: Make, api: LiftbridgeApi, broker: LiftbridgeBroker, faults: Faults
) -> None:
    store = make(format="events")
    await store.load(KEY)
    faults.script(None, None, BrokerFault.LOSE)
    await store.save(KEY, {0: Position("c")}, transaction=outgoing(*range(6)))
    assert await read(api, broker) == list(range(6))
    assert stored(broker) == [0, 1, *range(6)]


async def test_a_plain_reader_sees_an_interrupted_attempt_and_a_relay_reader_does_not(
    make: Make, api: LiftbridgeApi, broker: LiftbridgeBroker, faults: Faults
) -> None:
    crashed = make(format="events", attempts=1)
    await crashed.load(KEY)
    faults.script(None, None, *[BrokerFault.LOSE] * 10)
    with pytest.raises(StoreError):
        await crashed.save(KEY, {0: Position("c")}, transaction=outgoing(0, 1, 2, 3))
    faults.clear()
    restarted = make(format="events")
    assert await restarted.load(KEY) == {}
    await restarted.save(KEY, {0: Position("b")}, transaction=outgoing(0, 1, 2))
    await restarted.save(KEY, {0: Position("c", revision=2)}, transaction=outgoing(3))
    assert await read(api, broker) == [0, 1, 2, 3]
    assert stored(broker) == [0, 1, 0, 1, 2, 3]


async def test_messages_of_a_crashed_relay_that_arrive_late_do_not_confuse_the_next(
    make: Make, api: LiftbridgeApi, broker: LiftbridgeBroker, faults: Faults
) -> None:
    crashed, restarted = make(format="events", attempts=1), make(format="events")
    await crashed.load(KEY)
    await restarted.load(KEY)
    faults.script(None, BrokerFault.LOSE)
    with pytest.raises(StoreError):
        await crashed.save(KEY, {0: Position("c")}, transaction=outgoing(0, 1))
    await restarted.save(KEY, {0: Position("b")}, transaction=outgoing(0, 1, 2))
    assert await read(api, broker) == [0, 1, 2]


async def test_after_a_failed_save_the_store_has_to_be_loaded_again(
    make: Make, api: LiftbridgeApi, broker: LiftbridgeBroker, faults: Faults
) -> None:
    store = make(attempts=1)
    await store.load(KEY)
    faults.script(BrokerFault.DROP_ACK)
    with pytest.raises(StoreError, match="could not be written"):
        await store.save(KEY, {0: Position("c")}, transaction=outgoing(1))
    with pytest.raises(StoreError, match="loaded"):
        await store.save(KEY, {0: Position("c")}, transaction=outgoing(1))
    assert await store.load(KEY) == {0: Position("c")}
    assert await read(api, broker) == [1]


async def test_a_broker_that_stays_away_is_an_error_and_a_later_load_finds_what_was_written(
    nats_server: NatsServer, make: Make, broker: LiftbridgeBroker
) -> None:
    assert await make().load(KEY) == {}
    async with (
        LiftbridgePublisher(nats_server.url, ack_timeout=SAFETY_NET) as publisher,
        LiftbridgeApi(broker.address, timeout=SAFETY_NET) as api,
    ):
        store = StreamCursorStore(publisher, api, "s", attempts=2)
        await store.load(KEY)
        await broker.stop()
        publisher.ack_timeout, api.timeout = 0.2, 0.2
        with pytest.raises(StoreError):
            await store.save(KEY, {0: Position("c")}, transaction=outgoing(1))
        with pytest.raises(BrokerUnavailableError):
            await store.load(KEY)
        with pytest.raises(StoreError, match="loaded"):
            await store.save(KEY, {0: Position("c")}, transaction=outgoing(1))
        await broker.start()
    assert await make().load(KEY) == {}


@pytest.mark.parametrize("format", FORMATS)
async def test_a_start_reads_no_more_than_the_last_snapshot_and_what_follows(
    make: Make, broker: LiftbridgeBroker, format: str
) -> None:
    store = make(format=format, snapshot_every=20)
    await store.load(KEY)
    positions = {partition: Position("c0") for partition in range(5)}
    await store.save(KEY, positions)
    for revision in range(2, 60):
        positions[revision % 5] = positions[revision % 5].advance(f"c{revision}")
        await store.save(
            KEY, {revision % 5: positions[revision % 5]}, transaction=outgoing(revision)
        )
    last = int(broker.messages("s")[-1].headers["feedapi-snapshot"])
    assert last > 20
    broker.expire("s", 0, last)
    assert await make(format=format).load(KEY) == positions


async def test_positions_that_retention_dropped_are_an_error_and_never_a_fresh_start(
    make: Make, broker: LiftbridgeBroker
) -> None:
    store = make()
    await store.load(KEY)
    for revision in range(1, 10):
        await store.save(KEY, {0: Position("c", revision=revision)}, transaction=outgoing(revision))
    broker.expire("s", 0, 5)
    with pytest.raises(StreamError, match="retention"):
        await make().load(KEY)


async def test_thousands_of_positions_are_saved_as_one(
    make: Make, broker: LiftbridgeBroker
) -> None:
    store = make()
    await store.load(KEY)
    positions = {partition: Position(f"cursor-{partition}" * 5) for partition in range(32_768)}
    await store.save(KEY, positions)
    assert len(broker.messages("s")) == 33
    assert await make().load(KEY) == positions


async def test_positions_of_an_interrupted_save_do_not_count(make: Make, faults: Faults) -> None:
    store = make(attempts=1)
    await store.load(KEY)
    faults.script(None, None, BrokerFault.LOSE)
    with pytest.raises(StoreError):
        await store.save(KEY, {partition: Position("c") for partition in range(3000)})
    assert await make().load(KEY) == {}


async def test_a_stream_without_concurrency_control_is_refused(
    publisher: LiftbridgePublisher, api: LiftbridgeApi, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("plain")
    with pytest.raises(StreamError, match="concurrency control"):
        await StreamCursorStore(publisher, api, "plain").load(KEY)


async def test_a_stream_of_another_feed_is_refused(make: Make) -> None:
    store = make()
    await store.load(KEY)
    await store.save(KEY, {0: Position("c")})
    with pytest.raises(StreamError, match="another feed"):
        await make().load(FeedKey("http://localhost/other"))


async def test_messages_of_other_publishers_in_the_stream_are_ignored(
    make: Make, publisher: LiftbridgePublisher, api: LiftbridgeApi, broker: LiftbridgeBroker
) -> None:
    await publisher.publish_many("s", [b"older"] * 100)
    store = make()
    await store.load(KEY)
    await store.save(KEY, {0: Position("c")}, transaction=outgoing(1))
    await publisher.publish_many("s", [b"newer"] * 100)
    await publisher.publish(
        "s",
        b"",
        headers={"feedapi-attempt": b"x", "feedapi-index": b"-1", "feedapi-count": "²".encode()},
    )
    assert await make().load(KEY) == {0: Position("c")}
    assert await read(api, broker) == [1]


async def test_the_chosen_partition_holds_everything(
    publisher: LiftbridgePublisher, api: LiftbridgeApi, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("p", partitions=3, concurrency_control=True)
    store = StreamCursorStore(publisher, api, Stream("p", partitions=3), partition=2)
    await store.load(KEY)
    await store.save(KEY, {0: Position("c")}, transaction=outgoing(1))
    assert [len(broker.messages("p", partition)) for partition in range(3)] == [0, 0, 1]
    [batch] = [batch async for batch in RelayReader(api, "p", partition=2, until=0)]
    assert batch.events == (b'{"n":1}',)


async def test_a_foreign_transaction_is_refused(make: Make) -> None:
    store = make()
    await store.load(KEY)
    with pytest.raises(StoreError, match="OutgoingBatch"):
        await store.save(KEY, {0: Position("c")}, transaction=object())


def test_options_out_of_range_are_refused(make: Make) -> None:
    for options in ({"format": "other"}, {"attempts": 0}, {"snapshot_every": 0}):
        with pytest.raises(ValueError, match=r"format|positive"):
            make(**options)


# The reader


async def test_a_reader_resumes_after_any_batch(
    make: Make, api: LiftbridgeApi, broker: LiftbridgeBroker
) -> None:
    store = make(format="events")
    await store.load(KEY)
    for revision in range(1, 6):
        await store.save(
            KEY,
            {0: Position(f"c{revision}", revision=revision)},
            transaction=outgoing(revision, 10 * revision, cursor=f"c{revision}"),
        )
    every = await batches(api, broker)
    assert [batch.cursor for batch in every] == ["c1", "c2", "c3", "c4", "c5"]
    for i, batch in enumerate(every[:-1]):
        assert await batches(api, broker, batch.next_offset) == every[i + 1 :]


async def test_a_reader_follows_and_returns_a_batch_when_its_last_message_is_there(
    make: Make, api: LiftbridgeApi, broker: LiftbridgeBroker
) -> None:
    store = make(format="events")
    await store.load(KEY)
    seen: list[RelayedBatch] = []

    async def follow() -> None:
        async for batch in RelayReader(api, "s"):
            seen.append(batch)
            if len(seen) == 2:
                return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        for revision in (1, 2):
            await store.save(
                KEY, {0: Position("c", revision=revision)}, transaction=outgoing(revision, revision)
            )
    assert [len(batch.events) for batch in seen] == [2, 2]
