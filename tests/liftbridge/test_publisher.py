"""The publisher over NATS, on the real broker, and with a man in the middle where acks go wrong.

Every test runs with the fast path, and with documented calls of nats-py only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import anyio
import nats
import pytest

from feedapi_client.liftbridge import (
    AckPolicy,
    AckTimeoutError,
    EncryptionError,
    IncorrectOffsetError,
    LiftbridgePublisher,
    MessageTooLargeError,
    NoStreamError,
    PublishError,
    PublishRefusedError,
    Stream,
    decode,
    key_partition,
)
from feedapi_client.testing.liftbridge import NatsServer
from tests.liftbridge.broker import Broker
from tests.liftbridge.helpers import SAFETY_NET
from tests.liftbridge.middle import Fault, Middle, expire_acks

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("way_through_nats_py")]

HEADERS: Mapping[str, bytes] = {"source": b"test"}


async def test_a_publish_is_stored_and_returns_its_ack(broker: Broker) -> None:
    stream = await broker.create()
    ack = await broker.publisher.publish(stream, b"hello", key=b"k", headers=HEADERS)
    assert ack is not None
    assert (ack.stream, ack.offset, ack.msgSubject) == (broker.name, 0, broker.name)
    [stored] = await broker.messages()
    assert (stored.value, stored.key, stored.headers["source"]) == (b"hello", b"k", b"test")
    assert broker.publisher.in_flight == 0


async def test_many_are_stored_in_order_and_acked_in_order(broker: Broker) -> None:
    stream, sent = await broker.create(), [b"%d" % i for i in range(5000)]
    acks = await broker.publisher.publish_many(stream, sent)
    assert [ack.offset for ack in acks if ack] == list(range(5000))
    assert await broker.values() == sent


async def test_no_more_than_the_bound_are_in_flight(broker: Broker, middle: Middle) -> None:
    stream, seen = await broker.create(), set[int]()
    middle.decide = lambda _: seen.add(publisher.in_flight)
    async with LiftbridgePublisher(middle.url, max_in_flight=7) as publisher:
        await publisher.publish_many(stream, [b"x"] * 100)
    assert 0 < max(seen) <= 7


async def test_concurrent_publishes_get_their_own_acks_through_one_inbox(
    broker: Broker, middle: Middle
) -> None:
    stream, offsets, inboxes = await broker.create(), dict[bytes, int](), set[str]()
    middle.decide = lambda message: inboxes.add(message.ackInbox)

    async def one(value: bytes) -> None:
        ack = await broker.publisher.publish(stream, value)
        assert ack is not None
        offsets[value] = ack.offset

    async with anyio.create_task_group() as tasks:
        for i in range(50):
            tasks.start_soon(one, b"%d" % i)
    assert sorted(offsets, key=lambda value: offsets[value]) == await broker.values()
    assert len(inboxes) == 1


async def test_policy_all_is_acked_and_policy_none_has_no_ack(broker: Broker) -> None:
    stream = await broker.create()
    ack = await broker.publisher.publish(stream, b"all", ack_policy=AckPolicy.ALL)
    assert ack is not None
    assert int(ack.ackPolicy) == AckPolicy.ALL
    assert await broker.publisher.publish(stream, b"none", ack_policy=AckPolicy.NONE) is None
    await broker.publisher.publish(stream, b"after")
    assert await broker.values() == [b"all", b"none", b"after"]


async def test_the_expected_offset_is_sent_and_another_is_refused_by_name(
    broker: Broker, middle: Middle
) -> None:
    stream, offsets = await broker.create(once=True), list[int]()
    middle.decide = lambda message: offsets.append(message.offset)
    await broker.publisher.publish_many(stream, [b"a", b"b"], expected_offset=0)
    with pytest.raises(IncorrectOffsetError) as caught:
        await broker.publisher.publish(stream, b"c", expected_offset=1)
    assert caught.value.stream == broker.name
    assert caught.value.correlation_id in str(caught.value)
    await broker.publisher.publish(stream, b"c", expected_offset=2)
    await broker.publisher.publish(stream, b"d")
    assert offsets == [0, 1, 1, 2, -1]
    assert await broker.values() == [b"a", b"b", b"c", b"d"]


# Sizes


async def test_a_message_over_the_known_limit_is_not_sent(broker: Broker) -> None:
    stream = await broker.create()
    async with LiftbridgePublisher(broker.nats_url, max_message_bytes=1000) as publisher:
        with pytest.raises(MessageTooLargeError, match="not sent") as caught:
            await publisher.publish_many(stream, [b"fits", b"x" * 1000, b"behind it"])
        assert caught.value.index == 1
        assert publisher.in_flight == 0
    assert await broker.values() == [b"fits"]


async def test_a_message_over_the_limit_of_nats_is_not_sent_where_the_brokers_is_unknown(
    broker: Broker, middle: Middle
) -> None:
    stream = await broker.create()
    async with LiftbridgePublisher(middle.url, max_message_bytes=None) as publisher:
        with pytest.raises(MessageTooLargeError, match="not sent"):
            await publisher.publish(stream, b"x" * 1_048_576)
    assert middle.received == 0


# Acks that are lost, late, doubled, of others, or none


@pytest.mark.parametrize(
    ("fault", "error"),
    [(Fault.REFUSE, PublishRefusedError), (Fault.ENCRYPTION, EncryptionError)],
)
async def test_a_refusal_of_the_broker_is_its_own_error(
    broker: Broker, middle: Middle, fault: Fault, error: type[PublishError]
) -> None:
    stream = await broker.create()
    middle.script(fault)
    with pytest.raises(error):
        await broker.publisher.publish(stream, b"x")
    assert await broker.publisher.publish(stream, b"y")


async def test_a_broker_that_never_acks_ends_in_a_timeout(broker: Broker, middle: Middle) -> None:
    stream = await broker.create()
    middle.always = Fault.DROP_ACK
    async with LiftbridgePublisher(middle.url, ack_timeout=0.2) as publisher:
        with pytest.raises(AckTimeoutError) as caught:
            await publisher.publish_many(stream, [b"x", b"y"])
        assert (caught.value.stream, caught.value.index) == (broker.name, 0)
        assert (publisher.in_flight, publisher.stats.failed) == (0, 2)


async def test_each_publish_has_its_own_deadline(broker: Broker, middle: Middle) -> None:
    stream = await broker.create()
    middle.always = Fault.DROP_ACK
    async with LiftbridgePublisher(middle.url, ack_timeout=SAFETY_NET) as publisher:
        long = asyncio.create_task(publisher.publish(stream, b"x"))
        await anyio.wait_all_tasks_blocked()
        publisher.ack_timeout = 0.1
        with pytest.raises(AckTimeoutError):
            await publisher.publish(stream, b"x")
        assert not long.done()
        assert publisher.in_flight == 1
        expire_acks(publisher)
        with pytest.raises(AckTimeoutError):
            await long


async def test_one_lost_message_among_many_fails_the_call_with_its_index(
    broker: Broker, middle: Middle
) -> None:
    stream = await broker.create()
    middle.script(None, None, Fault.LOSE)
    with pytest.raises(AckTimeoutError) as caught:
        await broker.publisher.publish_many(stream, [b"%d" % i for i in range(6)])
    assert caught.value.index == 2
    assert await broker.values() == [b"0", b"1", b"3", b"4", b"5"]


@pytest.mark.parametrize(
    ("fault", "garbage", "unmatched"),
    [
        (Fault.DOUBLE_ACK, 0, 10),
        (Fault.FOREIGN_ACK, 0, 10),
        (Fault.UNKNOWN_ACK, 0, 10),
        (Fault.GARBAGE, 30, 0),
    ],
)
async def test_acks_that_are_wrong_or_double_count_for_nothing(
    broker: Broker, middle: Middle, fault: Fault, garbage: int, unmatched: int
) -> None:
    stream, publisher = await broker.create(), broker.publisher
    middle.always = fault
    acks = await publisher.publish_many(stream, [b"x"] * 10)
    assert [(ack.stream, ack.offset) for ack in acks if ack] == [
        (stream.name, n) for n in range(10)
    ]
    middle.clear()
    await publisher.publish(stream, b"y")
    assert publisher.stats.acked == 11
    assert (publisher.stats.garbage, publisher.stats.unmatched) == (garbage, unmatched)


async def test_a_late_ack_is_not_counted(broker: Broker, middle: Middle) -> None:
    stream, publisher = await broker.create(), broker.publisher
    middle.acks, publisher.ack_timeout = anyio.Event(), 0.1
    with pytest.raises(AckTimeoutError):
        await publisher.publish(stream, b"x")
    middle.acks.set()
    publisher.ack_timeout = SAFETY_NET
    assert await publisher.publish(stream, b"y")
    assert (publisher.stats.unmatched, publisher.stats.acked) == (1, 1)


async def test_two_streams_on_one_subject_each_ack_and_ours_counts(broker: Broker) -> None:
    mine, subject = broker.name, f"{broker.name}-shared"
    for name in (f"{mine}-other", mine):
        stream = await broker.create(name, subject=subject)
    acks = await broker.publisher.publish_many(stream, [b"x"] * 5)
    assert {ack.stream for ack in acks if ack} == {mine}
    assert await broker.values(f"{mine}-other") == await broker.values() == [b"x"] * 5


# Streams that are missing


async def test_publishing_to_a_missing_stream_says_so_at_once(broker: Broker) -> None:
    for count in (1, 100):
        with anyio.fail_after(SAFETY_NET / 2), pytest.raises(NoStreamError, match="missing") as no:
            await broker.publisher.publish_many(broker.name, [b"x"] * count)
        assert no.value.index == 0
    assert broker.publisher.in_flight == 0


async def test_a_stream_that_is_created_later_is_found_and_one_that_went_is_missed(
    broker: Broker,
) -> None:
    publisher = broker.publisher

    async def publish_for_ever() -> None:
        while True:
            publisher._asked.clear()  # as after some seconds
            with suppress(AckTimeoutError):
                await publisher.publish(broker.name, b"y")

    with pytest.raises(NoStreamError):
        await publisher.publish(broker.name, b"x")
    await broker.create()
    await publisher.publish_many(broker.name, [b"x"] * 3)
    await broker.api.delete_stream(broker.name)
    publisher.ack_timeout = 0.2
    with anyio.fail_after(SAFETY_NET), pytest.raises(NoStreamError):
        await publish_for_ever()  # NATS learns a moment later that nobody listens
    again = await broker.create(f"{broker.name}-again", subject=broker.name)
    publisher.ack_timeout = SAFETY_NET
    await publisher.publish(again, b"z")
    assert await broker.values(again.name) == [b"z"]


# What is in a message, and where it goes


async def test_a_checksum_is_sent(nats_server: NatsServer) -> None:
    client = await nats.connect(nats_server.url)
    seen = await client.subscribe("raw")
    async with LiftbridgePublisher(nats_server.url) as publisher:
        await publisher.publish("raw", b"x", ack_policy=AckPolicy.NONE)
    assert decode((await seen.next_msg(SAFETY_NET)).data).crc
    await client.close()


async def test_partitions_have_their_own_subject_and_keys_choose_the_partition(
    broker: Broker,
) -> None:
    assert key_partition(b"123456789", 1000) == 0xCBF43926 % 1000  # CRC-32, as go-liftbridge
    stream = await broker.create(partitions=4, subject=f"{broker.name}-subject")
    assert [stream.subject_of(n) for n in range(2)] == [stream.subject, f"{stream.subject}.1"]
    keys = [b"key-%d" % i for i in range(20)]
    acks = await broker.publisher.publish_many(stream, keys, keys=keys)
    assert [ack.msgSubject for ack in acks if ack] == [
        stream.subject_of(key_partition(key, 4)) for key in keys
    ]
    assert await broker.publisher.publish(stream, b"x", partition=3)
    assert (await broker.values(partition=3))[-1] == b"x"


async def test_headers_of_each_message_are_added_to_shared_ones(broker: Broker) -> None:
    stream = await broker.create()
    await broker.publisher.publish_many(
        stream, [b"a", b"b"], headers=HEADERS, headers_each=[{"n": b"0"}, {"n": b"1"}]
    )
    found = [(each.headers["source"], each.headers["n"]) for each in await broker.messages()]
    assert found == [(b"test", b"0"), (b"test", b"1")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"keys": [b"k"] * 4}, "as many"),
        ({"keys": [b"k"] * 3, "headers_each": [{}] * 2}, "as many"),
        ({"headers_each": []}, "as many"),
    ],
)
async def test_keys_and_headers_are_as_many_as_values(
    broker: Broker, given: dict[str, Any], said: str
) -> None:
    stream = await broker.create()
    with pytest.raises(ValueError, match=said):
        await broker.publisher.publish_many(stream, [b"1", b"2", b"3"], **given)
    assert await broker.values() == [], "nothing is sent"


async def test_a_subject_or_partition_that_is_none_is_refused_before_anything_is_sent(
    broker: Broker,
) -> None:
    unnamed = ("", "a b", "a\r\nPUB other 0\r\n", "orders.*", ">", "orders..eu", ".a", "a.")
    for stream, partition, said in (
        (Stream("s", partitions=2), 2, "0 to 1"),
        # A stream can collect what many publish.
        (Stream("s", "orders.>"), None, "no subject that can be published to"),
        (Stream("s", "*"), None, "no subject that can be published to"),
        *((name, None, "name") for name in unnamed),
    ):
        with pytest.raises(ValueError, match=said):
            await broker.publisher.publish(stream, b"x", partition=partition)
    for name in ("subject", "reply"):
        with pytest.raises(ValueError, match="overwritten"):
            await broker.publisher.publish("s", b"x", headers={name: b""})
    assert broker.publisher.stats.published == broker.publisher.in_flight == 0
