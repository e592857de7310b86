"""The stream as a store of positions."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from feedapi_client import FencedError, StoreError
from feedapi_client.liftbridge import (
    BrokerUnavailableError,
    OutgoingBatch,
    RelayFencedError,
    StreamCursorStore,
    StreamError,
)
from feedapi_client.model import FeedKey, Position
from feedapi_client.testing import Publisher
from tests.liftbridge.broker import Broker, open_broker
from tests.liftbridge.helpers import eventually
from tests.liftbridge.ledgers import (
    FORMATS,
    KEY,
    events,
    loaded,
    open_ledger,
    outgoing,
    own_headers,
    relay,
    relayed,
    store_of,
)
from tests.liftbridge.middle import Fault, Middle
from tests.positions import counted

pytestmark = pytest.mark.anyio


async def positions(broker: Broker, key: FeedKey = KEY) -> dict[int, Position]:
    """What another store loads."""
    return await store_of(broker).load(key)


async def test_what_was_saved_is_loaded_by_another_store(broker: Broker) -> None:
    store = await open_ledger(broker)
    assert await positions(broker) == {}
    saved = {3: Position("c3"), 7: Position("äöü\n" * 2000, "superseded")}
    await store.save(KEY, saved)
    await store.save(KEY, {3: counted("c4", 2, "drained")})
    assert await positions(broker) == {**saved, 3: counted("c4", 2, "drained")}


async def test_the_chosen_partition_holds_events_and_position_together(broker: Broker) -> None:
    stream = await broker.create(partitions=3, once=True)
    for revision, format in enumerate(FORMATS, 1):
        store = StreamCursorStore(broker.publisher, broker.api, stream, partition=2, format=format)
        assert len(await store.load(KEY)) == min(revision - 1, 1)
        await store.save(KEY, {0: counted("c", revision)}, transaction=outgoing(1, 2, 3))
    assert await broker.newest() == await broker.newest(partition=1) == -1
    assert await broker.numbers(partition=2) == [1, 2, 3] * 2


async def test_thousands_of_positions_are_saved_as_one(broker: Broker) -> None:
    store = await open_ledger(broker)
    saved = {partition: Position(f"cursor-{partition}" * 5) for partition in range(32_768)}
    await store.save(KEY, saved)
    assert 2 < await broker.newest() + 1 < 10
    assert await positions(broker) == saved


# Fencing


async def test_a_save_that_replaces_another_revision_is_fenced(broker: Broker) -> None:
    store = await open_ledger(broker)
    await store.save(KEY, {0: Position("c")})
    for revision in (1, 3):
        with pytest.raises(FencedError):
            await store.save(KEY, {0: counted("d", revision), 1: Position("e")})
    assert await positions(broker) == {0: Position("c")}


@pytest.mark.parametrize("format", FORMATS)
async def test_a_second_relay_is_fenced_by_the_first_that_writes(
    broker: Broker, format: str
) -> None:
    first, second = await open_ledger(broker, format), await loaded(broker, format)
    await second.save(KEY, {0: Position("c")}, transaction=outgoing(1, 2))
    with pytest.raises(RelayFencedError, match="another relay"):
        await first.save(KEY, {0: Position("c")}, transaction=outgoing(1, 2, 3))
    await second.save(KEY, {0: counted("d", 2)}, transaction=outgoing(3, 4))
    assert await relayed(broker) == [1, 2, 3, 4]


@pytest.mark.parametrize("format", FORMATS)
async def test_an_idle_relay_that_was_fenced_does_not_write_its_old_positions(
    broker: Broker, format: str
) -> None:
    idle = await open_ledger(broker, format, snapshot_every=1)
    await idle.save(KEY, {0: Position("c")}, transaction=outgoing(1, 2))
    successor = await loaded(broker, format)
    await successor.save(KEY, {0: counted("d", 2)}, transaction=outgoing(3, 4))
    for _ in range(3):
        with pytest.raises(RelayFencedError, match="another relay"):
            await idle.keep(idle_seconds=0)
    with pytest.raises(RelayFencedError, match="another relay"):
        await idle.save(KEY, {0: counted("d", 2)}, transaction=outgoing(3, 4, 5))
    await successor.save(KEY, {0: counted("e", 3)}, transaction=outgoing(5))
    assert await positions(broker) == {0: counted("e", 3)}
    assert await relayed(broker) == [1, 2, 3, 4, 5]


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
    feedapi_publisher_factory: Any, broker: Broker, format: str
) -> None:
    feed: Publisher = feedapi_publisher_factory(1, page_size=50, vary=True)
    feed.extend(0, events(1000))
    await broker.create(once=True)
    fenced = 0
    loaded = anyio.Semaphore(3)

    async def one() -> None:
        nonlocal fenced
        async with open_broker(broker.server, broker.name) as mine:
            while True:
                store = StoreThatWaits(
                    mine.publisher, mine.api, mine.name, format=format, loaded=loaded
                )
                try:
                    await relay(feed, mine, store)
                except (FencedError, StoreError):
                    fenced += 1
                else:
                    return

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(one)
    assert sorted(await relayed(broker)) == list(range(1000))
    assert fenced >= 2


# Attempts of which something is lost


@pytest.mark.parametrize("format", FORMATS)
async def test_a_lost_ack_does_not_write_twice(broker: Broker, middle: Middle, format: str) -> None:
    store = await open_ledger(broker, format)
    middle.script(Fault.DROP_ACK, Fault.DROP_ACK, Fault.DROP_ACK)
    await store.save(KEY, {0: Position("c")}, transaction=outgoing(1, 2))
    await store.save(KEY, {0: counted("d", 2)}, transaction=outgoing(3))
    assert await relayed(broker) == [1, 2, 3]
    assert (await positions(broker))[0].cursor == "d"


async def test_a_message_lost_in_the_middle_voids_the_attempt_and_the_next_one_counts(
    broker: Broker, middle: Middle
) -> None:
    store = await open_ledger(broker, "events")
    middle.script(None, None, Fault.LOSE)
    await store.save(KEY, {0: Position("c")}, transaction=outgoing(*range(6)))
    assert await relayed(broker) == list(range(6))
    assert await broker.numbers() == [0, 1, *range(6)]


async def interrupted(broker: Broker, middle: Middle, *arrive: None) -> None:
    """Let a relay crash in its first attempt of four events, of which some messages arrive."""
    crashed = await open_ledger(broker, "events", give_up_after=0)
    middle.script(*arrive, *[Fault.LOSE] * 10)
    with pytest.raises(StoreError):
        await crashed.save(KEY, {0: Position("c")}, transaction=outgoing(0, 1, 2, 3))
    middle.clear()


async def test_a_plain_reader_sees_an_interrupted_attempt_and_a_relay_reader_does_not(
    broker: Broker, middle: Middle
) -> None:
    await interrupted(broker, middle, None, None)
    restarted = store_of(broker, "events")
    assert await restarted.load(KEY) == {}
    await restarted.save(KEY, {0: Position("b")}, transaction=outgoing(0, 1, 2))
    await restarted.save(KEY, {0: counted("c", 2)}, transaction=outgoing(3))
    assert await relayed(broker) == [0, 1, 2, 3]
    assert await broker.numbers() == [0, 1, 0, 1, 2, 3]


async def test_messages_of_a_crashed_relay_that_arrive_late_do_not_confuse_the_next(
    broker: Broker, middle: Middle
) -> None:
    restarted = await open_ledger(broker, "events")
    await interrupted(broker, middle, None)
    await restarted.save(KEY, {0: Position("b")}, transaction=outgoing(0, 1, 2))
    assert await relayed(broker) == [0, 1, 2]


async def test_a_relay_that_crashed_in_its_first_attempt_starts_beside_messages_of_others(
    broker: Broker, middle: Middle
) -> None:
    await interrupted(broker, middle, None)
    await broker.publisher.publish(broker.name, b"x")
    assert await positions(broker) == {}


async def test_after_a_failed_save_the_store_has_to_be_loaded_again(
    broker: Broker, middle: Middle
) -> None:
    store = await open_ledger(broker, give_up_after=0)
    middle.script(Fault.DROP_ACK)
    with pytest.raises(StoreError, match="could not be written"):
        await store.save(KEY, {0: Position("c")}, transaction=outgoing(1))
    with pytest.raises(StoreError, match="loaded"):
        await store.save(KEY, {0: Position("c")}, transaction=outgoing(1))
    assert await store.load(KEY) == {0: Position("c")}
    assert await relayed(broker) == [1]


async def test_positions_of_an_interrupted_save_do_not_count(
    broker: Broker, middle: Middle
) -> None:
    store = await open_ledger(broker, give_up_after=0)
    middle.script(None, None, Fault.LOSE)
    with pytest.raises(StoreError):
        await store.save(KEY, {partition: Position("c" * 1000) for partition in range(3000)})
    assert await positions(broker) == {}


async def test_a_broker_that_stays_away_is_an_error_and_a_later_load_finds_what_was_written(
    broker: Broker,
) -> None:
    store = await open_ledger(broker, give_up_after=0.2)
    await broker.stop()
    broker.publisher.ack_timeout, broker.api.timeout = 0.2, 0.2
    try:
        with pytest.raises(StoreError):
            await store.save(KEY, {0: Position("c")}, transaction=outgoing(1))
        with pytest.raises(BrokerUnavailableError):
            await store.load(KEY)
        with pytest.raises(StoreError, match="loaded"):
            await store.save(KEY, {0: Position("c")}, transaction=outgoing(1))
    finally:
        await broker.start()
    async with open_broker(broker.server, broker.name) as later:
        assert await positions(later) == {}


# Snapshots


@pytest.mark.parametrize("format", FORMATS)
async def test_a_start_reads_no_more_than_the_last_snapshot_and_what_follows(
    broker: Broker, format: str
) -> None:
    store = await open_ledger(broker, format, snapshot_every=20)
    saved = {partition: Position("c0") for partition in range(5)}
    await store.save(KEY, saved)
    for revision in range(2, 60):
        saved[revision % 5] = saved[revision % 5].advance(f"c{revision}")
        await store.save(KEY, {revision % 5: saved[revision % 5]}, transaction=outgoing(revision))
    last = int((await broker.messages())[-1].headers["feedapi-snapshot"])
    assert last > 20
    await broker.expire(last)
    assert await store_of(broker, format).load(KEY) == saved


async def test_what_earlier_relays_wrote_counts_for_the_bytes_until_a_snapshot(
    broker: Broker,
) -> None:
    await broker.create(once=True)
    for revision in range(1, 5):
        store = await loaded(broker, snapshot_bytes=10_000)
        large = OutgoingBatch(0, "c", [b"x" * 4000])
        await store.save(KEY, {0: counted("c", revision)}, transaction=large)
    snapshots = {int(message.headers["feedapi-snapshot"]) for message in await broker.messages()}
    assert snapshots == {0, 3}


async def test_a_snapshot_is_due_within_the_retention_however_many_positions_there_are(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedapi_client.liftbridge.stream_store.SNAPSHOT_MESSAGES", 4)
    store = await open_ledger(broker, snapshot_every=1)
    await store.save(KEY, {partition: counted("c", 1) for partition in range(20)})
    for revision in range(2, 7):
        await store.save(KEY, {0: counted("c", revision)}, transaction=outgoing(revision))
    snapshots = [int(each.headers["feedapi-snapshot"]) for each in await broker.messages()]
    assert snapshots == [0, 0, 0, 0, 4, 4, 4]


# Streams of others, and messages of others


async def test_a_stream_without_concurrency_control_is_refused(broker: Broker) -> None:
    await broker.create()
    with pytest.raises(StreamError, match="concurrency control"):
        await positions(broker)


async def test_a_stream_of_another_feed_is_refused_and_says_what_continues_it(
    broker: Broker,
) -> None:
    store = await open_ledger(broker)
    await store.save(KEY, {0: Position("c")})
    with pytest.raises(StreamError, match=r"default @ .*/feed, not of .*cursors move"):
        await positions(broker, FeedKey("http://localhost/other"))
    broker.name += "-named"
    await broker.create(once=True)
    named, store = FeedKey.named("payments"), store_of(broker)
    await store.load(named)
    await store.save(named, {0: Position("c")})
    with pytest.raises(StreamError, match=r"payments.* not of .*feed_name="):
        await positions(broker)
    assert await positions(broker, named) == {0: Position("c")}


async def test_messages_of_other_publishers_in_the_stream_are_ignored(broker: Broker) -> None:
    store = await open_ledger(broker)
    await store.save(KEY, {0: Position("b")})
    await broker.publisher.publish_many(broker.name, [b"older"] * 100)
    store = await loaded(broker)
    await store.save(KEY, {0: counted("c", 2)}, transaction=outgoing(1))
    await broker.publisher.publish_many(broker.name, [b"newer"] * 100)
    no_numbers = {"feedapi-index": b"-1", "feedapi-count": "²".encode()}
    await broker.publisher.publish(
        broker.name, b"", headers={"feedapi-attempt": b"x", **no_numbers}
    )
    assert await positions(broker) == {0: counted("c", 2)}
    assert await relayed(broker) == [1]


_PART: dict[str, bytes | None] = {"count": b"2", "positions": None}


@pytest.mark.parametrize(
    "changes",
    [
        # One message of two, or one that belongs to no attempt.
        *({"snapshot": at, **_PART} for at in (b"0", b"1", b"1000000", b"%d" % (2**63 - 1))),
        *({"snapshot": at, **_PART, "count": None} for at in (b"0", b"1", b"9" * 19)),
        # Complete, and behind its own snapshot.
        *({"snapshot": at} for at in (b"2", b"1000000", b"9" * 19)),
        # Complete, and of no partition.
        *(
            {"format": format.encode(), "partition": partition, "positions": None}
            for format in FORMATS
            for partition in (None, b"", b"x", b"-1", b"9" * 19, b"9" * 5000)
        ),
    ],
    ids=str,
)
async def test_what_looks_like_a_relays_message_and_is_none_changes_nothing(
    broker: Broker, changes: dict[str, bytes | None]
) -> None:
    store = await open_ledger(broker)
    await store.save(KEY, {0: Position("b")}, transaction=outgoing(1))
    changed = {f"feedapi-{name}": value for name, value in changes.items()}
    headers = {**await own_headers(broker), "feedapi-attempt": b"x", **changed}
    forged = {name: value for name, value in headers.items() if value is not None}
    await broker.publisher.publish(broker.name, b'{"n":2}', headers=forged)
    store = store_of(broker)
    assert await store.load(KEY) == {0: Position("b")}
    await store.save(KEY, {0: counted("c", 2)}, transaction=outgoing(3))
    assert await positions(broker) == {0: counted("c", 2)}
    assert await relayed(broker) == [1, 3]


async def test_a_stream_of_others_is_refused_and_nothing_is_appended(broker: Broker) -> None:
    await broker.create()
    store = store_of(broker)
    for count in range(1, 30):
        headers = {"feedapi-partition": b"0"}
        await broker.publisher.publish(broker.name, b"order", headers=headers)
        if count not in (1, 2, 16, 17, 18, 29):  # the last 1 are read, the last 17, and so on
            continue
        for look in (store.feeds(), store.load(KEY), store.replace(KEY, {0: Position("c")})):
            with pytest.raises(StreamError, match="no relay wrote any of them exactly once"):
                await look
        assert await broker.values() == [b"order"] * count


async def test_an_operator_who_looks_appends_nothing(broker: Broker) -> None:
    await broker.create(f"{broker.name}-plain")
    plain = StreamCursorStore(broker.publisher, broker.api, f"{broker.name}-plain", look_only=True)
    assert await plain.feeds() == []
    assert await plain.load(KEY) == {}
    with pytest.raises(StreamError, match="concurrency control"):
        await plain.replace(KEY, {0: Position("c")})
    relay = await open_ledger(broker)
    await relay.save(KEY, {0: Position("c1")}, transaction=outgoing(1))
    await broker.api.set_readonly(broker.name)
    operator = store_of(broker, look_only=True)
    assert await operator.feeds() == [KEY]
    assert await operator.load(KEY) == {0: Position("c1")}
    assert await broker.newest() == 0


# What is refused before anything is written


async def test_more_than_readers_keep_of_an_attempt_is_not_written(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedapi_client.liftbridge.stream_store.MOST_BYTES", 8000)
    store = await open_ledger(broker, "events")
    await store.save(KEY, {0: Position("b")}, transaction=outgoing(*range(4)))
    with pytest.raises(StreamError, match=r"a batch of 7 messages.*readers keep 8000 bytes"):
        await store.save(KEY, {0: counted("c", 2)}, transaction=outgoing(*range(4, 11)))
    assert await positions(broker) == {0: Position("b")}
    assert await relayed(broker) == await broker.numbers() == [0, 1, 2, 3]


async def test_a_foreign_transaction_and_options_out_of_range_are_refused(broker: Broker) -> None:
    store = await open_ledger(broker)
    with pytest.raises(StoreError, match="OutgoingBatch"):
        await store.save(KEY, {0: Position("c")}, transaction=object())
    for options in ({"format": "other"}, {"snapshot_every": 0}):
        with pytest.raises(ValueError, match=r"format|positive"):
            store_of(broker, **options)
