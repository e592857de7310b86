"""The stream as a store of positions."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from feedapi_client import FencedError, StoreError
from feedapi_client.liftbridge import (
    BrokerUnavailableError,
    LiftbridgeApi,
    LiftbridgePublisher,
    OutgoingBatch,
    RelayFencedError,
    RelayReader,
    Stream,
    StreamCursorStore,
    StreamError,
)
from feedapi_client.liftbridge.ledger import SnapshotPolicy, StreamState
from feedapi_client.model import FeedKey, Position
from feedapi_client.testing.liftbridge import BrokerFault, LiftbridgeBroker, NatsServer
from tests.liftbridge.exactly_once.streams import (
    FORMATS,
    KEY,
    Feeds,
    Make,
    events,
    outgoing,
    own_headers,
    read,
    relay,
    stored,
)
from tests.liftbridge.helpers import SAFETY_NET, Faults, eventually
from tests.positions import counted

pytestmark = pytest.mark.anyio


async def test_what_was_saved_is_loaded_by_another_store(make: Make) -> None:
    store = make()
    assert await store.load(KEY) == {}
    positions = {3: Position("c3"), 7: Position("äöü\n" * 2000, "superseded")}
    await store.save(KEY, positions)
    await store.save(KEY, {3: counted("c4", 2, "drained")})
    assert await make().load(KEY) == {**positions, 3: counted("c4", 2, "drained")}


async def test_events_and_position_are_written_together(
    make: Make, api: LiftbridgeApi, broker: LiftbridgeBroker
) -> None:
    for format in FORMATS:
        store = make(format=format)
        revision = len(await store.load(KEY)) + 1
        await store.save(KEY, {0: counted("c", revision)}, transaction=outgoing(1, 2, 3))
    assert await read(api, broker) == [1, 2, 3] * 2


async def test_a_save_that_replaces_another_revision_is_fenced(
    make: Make,
) -> None:
    store = make()
    await store.load(KEY)
    await store.save(KEY, {0: Position("c")})
    for revision in (1, 3):
        with pytest.raises(FencedError):
            await store.save(KEY, {0: counted("d", revision), 1: Position("e")})
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
    await second.save(KEY, {0: counted("d", 2)}, transaction=outgoing(3, 4))
    assert await read(api, broker) == [1, 2, 3, 4]


@pytest.mark.parametrize("format", FORMATS)
async def test_an_idle_relay_that_was_fenced_does_not_write_its_old_positions(
    make: Make, api: LiftbridgeApi, broker: LiftbridgeBroker, format: str
) -> None:
    idle = make(format=format, snapshot_every=1)
    await idle.load(KEY)
    await idle.save(KEY, {0: Position("c")}, transaction=outgoing(1, 2))
    successor = make(format=format)
    await successor.load(KEY)
    await successor.save(KEY, {0: counted("d", 2)}, transaction=outgoing(3, 4))
    for _ in range(3):
        with pytest.raises(RelayFencedError, match="another relay"):
            await idle.keep(idle_seconds=0)
    with pytest.raises(RelayFencedError, match="another relay"):
        await idle.save(KEY, {0: counted("d", 2)}, transaction=outgoing(3, 4, 5))
    await successor.save(KEY, {0: counted("e", 3)}, transaction=outgoing(5))
    assert await make(format=format).load(KEY) == {0: counted("e", 3)}
    assert await read(api, broker) == [1, 2, 3, 4, 5]


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
    await store.save(KEY, {0: counted("d", 2)}, transaction=outgoing(3))
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
    crashed = make(format="events", give_up_after=0)
    await crashed.load(KEY)
    faults.script(None, None, *[BrokerFault.LOSE] * 10)
    with pytest.raises(StoreError):
        await crashed.save(KEY, {0: Position("c")}, transaction=outgoing(0, 1, 2, 3))
    faults.clear()
    restarted = make(format="events")
    assert await restarted.load(KEY) == {}
    await restarted.save(KEY, {0: Position("b")}, transaction=outgoing(0, 1, 2))
    await restarted.save(KEY, {0: counted("c", 2)}, transaction=outgoing(3))
    assert await read(api, broker) == [0, 1, 2, 3]
    assert stored(broker) == [0, 1, 0, 1, 2, 3]


async def test_messages_of_a_crashed_relay_that_arrive_late_do_not_confuse_the_next(
    make: Make, api: LiftbridgeApi, broker: LiftbridgeBroker, faults: Faults
) -> None:
    crashed, restarted = make(format="events", give_up_after=0), make(format="events")
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
    store = make(give_up_after=0)
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
        store = StreamCursorStore(publisher, api, "s", give_up_after=0.2)
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
        await store.save(KEY, {0: counted("c", revision)}, transaction=outgoing(revision))
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
    assert 2 < len(broker.messages("s")) < 10
    assert await make().load(KEY) == positions


async def test_what_earlier_relays_wrote_counts_for_the_bytes_until_a_snapshot(
    make: Make, broker: LiftbridgeBroker
) -> None:
    for revision in range(1, 5):
        store = make(snapshot_bytes=10_000)
        await store.load(KEY)
        events = OutgoingBatch(0, "c", [b"x" * 4000])
        await store.save(KEY, {0: counted("c", revision)}, transaction=events)
    snapshots = {int(message.headers["feedapi-snapshot"]) for message in broker.messages("s")}
    assert snapshots == {0, 3}


def test_a_snapshot_is_due_within_the_retention_however_many_positions_there_are() -> None:
    policy = SnapshotPolicy(every=10_000, bytes=2**26, seconds=3600)
    state = StreamState(9_999, positions=dict.fromkeys(range(32_768), Position("c")))
    assert not policy.is_due(state)
    state.next_offset = 10_000
    assert policy.is_due(state)


async def test_positions_of_an_interrupted_save_do_not_count(make: Make, faults: Faults) -> None:
    store = make(give_up_after=0)
    await store.load(KEY)
    faults.script(None, None, BrokerFault.LOSE)
    with pytest.raises(StoreError):
        await store.save(KEY, {partition: Position("c" * 1000) for partition in range(3000)})
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
    with pytest.raises(StreamError, match=r"default @ .*/feed, not of .*cursors move"):
        await make().load(FeedKey("http://localhost/other"))


async def test_a_stream_of_a_named_feed_says_which_name_continues_it(make: Make) -> None:
    named, store = FeedKey.named("payments"), make()
    await store.load(named)
    await store.save(named, {0: Position("c")})
    with pytest.raises(StreamError, match=r"feed_name='payments', or --feed-name payments"):
        await make().load(KEY)
    assert await make().load(named) == {0: Position("c")}


async def test_messages_of_other_publishers_in_the_stream_are_ignored(
    make: Make, publisher: LiftbridgePublisher, api: LiftbridgeApi, broker: LiftbridgeBroker
) -> None:
    store = make()
    await store.load(KEY)
    await store.save(KEY, {0: Position("b")})
    await publisher.publish_many("s", [b"older"] * 100)
    store = make()
    await store.load(KEY)
    await store.save(KEY, {0: counted("c", 2)}, transaction=outgoing(1))
    await publisher.publish_many("s", [b"newer"] * 100)
    await publisher.publish(
        "s",
        b"",
        headers={"feedapi-attempt": b"x", "feedapi-index": b"-1", "feedapi-count": "²".encode()},
    )
    assert await make().load(KEY) == {0: counted("c", 2)}
    assert await read(api, broker) == [1]


@pytest.mark.parametrize(
    "snapshot", [b"0", b"%d", b"1000000", b"9223372036854775807", b"9" * 19], ids=str
)
@pytest.mark.parametrize("part", [{}, {"feedapi-index": b"0", "feedapi-count": b"2"}], ids=str)
async def test_positions_are_where_a_relay_says_and_nobody_else(
    make: Make,
    publisher: LiftbridgePublisher,
    api: LiftbridgeApi,
    broker: LiftbridgeBroker,
    snapshot: bytes,
    part: dict[str, bytes],
) -> None:
    store = make(format="events")
    await store.load(KEY)
    await store.save(KEY, {0: Position("b")}, transaction=outgoing(1, 2))
    at = snapshot.replace(b"%d", b"%d" % broker.next_offset("s"))
    await publisher.publish(
        "s",
        b"x",
        headers={
            "feedapi-snapshot": at,
            "feedapi-attempt": b"x",
            "feedapi-format": b"events",
            **part,
        },
    )
    store = make()
    assert await store.load(KEY) == {0: Position("b")}
    await store.save(KEY, {0: counted("c", 2)}, transaction=outgoing(3))
    assert await make().load(KEY) == {0: counted("c", 2)}
    assert await read(api, broker) == [1, 2, 3]


async def test_an_attempt_behind_its_own_snapshot_is_of_no_relay(
    make: Make, publisher: LiftbridgePublisher, api: LiftbridgeApi, broker: LiftbridgeBroker
) -> None:
    store = make()
    await store.load(KEY)
    await store.save(KEY, {0: Position("b")}, transaction=outgoing(1))
    own = own_headers(broker)
    for snapshot in (b"2", b"1000000", b"9" * 19):
        await publisher.publish(
            "s",
            b'{"n":2}',
            headers={**own, "feedapi-attempt": b"x", "feedapi-snapshot": snapshot},
        )
        assert await make().load(KEY) == {0: Position("b")}
    assert await read(api, broker) == [1]


async def test_a_relay_that_crashed_in_its_first_attempt_starts_beside_messages_of_others(
    make: Make, publisher: LiftbridgePublisher, faults: Faults
) -> None:
    crashed = make(format="events", give_up_after=0)
    await crashed.load(KEY)
    faults.script(None, BrokerFault.LOSE)
    with pytest.raises(StoreError):
        await crashed.save(KEY, {0: Position("c")}, transaction=outgoing(0, 1))
    faults.clear()
    await publisher.publish("s", b"x")
    assert await make().load(KEY) == {}


async def test_more_than_readers_keep_of_an_attempt_is_not_written(
    make: Make,
    api: LiftbridgeApi,
    broker: LiftbridgeBroker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("feedapi_client.liftbridge.ledger.MOST_BYTES", 8000)
    store = make(format="events")
    await store.load(KEY)
    await store.save(KEY, {0: Position("b")}, transaction=outgoing(*range(4)))
    with pytest.raises(StreamError, match=r"a batch of 7 messages.*readers keep 8000 bytes"):
        await store.save(KEY, {0: counted("c", 2)}, transaction=outgoing(*range(4, 11)))
    assert await make().load(KEY) == {0: Position("b")}
    assert await read(api, broker) == stored(broker) == [0, 1, 2, 3]


async def test_the_chosen_partition_holds_everything(
    publisher: LiftbridgePublisher, api: LiftbridgeApi, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("p", partitions=3, concurrency_control=True)
    store = StreamCursorStore(publisher, api, Stream("p", partitions=3), partition=2)
    await store.load(KEY)
    await store.save(KEY, {0: Position("c")}, transaction=outgoing(1))
    assert [len(broker.messages("p", partition)) for partition in range(3)] == [0, 0, 1]
    [batch] = [batch async for batch in RelayReader(api, "p", partition=2, until=0)]
    assert [event.raw for event in batch.events] == [b'{"n":1}']


async def test_a_foreign_transaction_is_refused(make: Make) -> None:
    store = make()
    await store.load(KEY)
    with pytest.raises(StoreError, match="OutgoingBatch"):
        await store.save(KEY, {0: Position("c")}, transaction=object())


def test_options_out_of_range_are_refused(make: Make) -> None:
    for options in ({"format": "other"}, {"snapshot_every": 0}):
        with pytest.raises(ValueError, match=r"format|positive"):
            make(**options)


async def test_a_stream_of_others_is_refused_and_nothing_is_appended(
    publisher: LiftbridgePublisher, api: LiftbridgeApi, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("orders")
    for count in range(1, 30):
        await publisher.publish("orders", b"order", headers={"feedapi-partition": b"0"})
        if count not in (1, 2, 16, 17, 18, 29):  # the last 1 are read, the last 17, and so on
            continue
        store = StreamCursorStore(publisher, api, "orders")
        for look in (store.feeds(), store.load(KEY), store.replace(KEY, {0: Position("c")})):
            with pytest.raises(StreamError, match="no relay wrote any of them exactly once"):
                await look
        assert [message.value for message in broker.messages("orders")] == [b"order"] * count


async def test_an_operator_who_looks_appends_nothing(
    make: Make, broker: LiftbridgeBroker, api: LiftbridgeApi, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("plain")
    plain = StreamCursorStore(publisher, api, "plain", look_only=True)
    assert await plain.feeds() == []
    assert await plain.load(KEY) == {}
    with pytest.raises(StreamError, match="concurrency control"):
        await plain.replace(KEY, {0: Position("c")})
    relay = make()
    await relay.load(KEY)
    await relay.save(KEY, {0: Position("c1")}, transaction=outgoing(1))
    await api.set_readonly("s")
    operator = make(look_only=True)
    assert await operator.feeds() == [KEY]
    assert await operator.load(KEY) == {0: Position("c1")}
    assert len(broker.messages("s")) == 1
