"""The publisher against a real NATS server and a simulated broker.

Every test runs with the fast path, and with documented calls of nats-py only.
"""

from __future__ import annotations

import asyncio
import zlib
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
from feedapi_client.testing.liftbridge import BrokerFault, LiftbridgeBroker, NatsServer
from tests.liftbridge.helpers import SAFETY_NET, Faults, eventually, expire_acks, values

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("way_through_nats_py")]

HEADERS: Mapping[str, bytes] = {"source": b"test"}


async def test_a_publish_is_stored_and_returns_its_ack(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    ack = await publisher.publish("s", b"hello", key=b"k", headers=HEADERS)
    assert ack is not None
    assert (ack.stream, ack.offset, ack.msgSubject) == ("s", 0, "s")
    [stored] = broker.messages("s")
    assert (stored.value, stored.key, stored.headers["source"]) == (b"hello", b"k", b"test")
    assert publisher.in_flight == 0


async def test_many_are_stored_in_order_and_acked_in_order(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    sent = [b"%d" % i for i in range(5000)]
    acks = await publisher.publish_many("s", sent)
    assert [ack.offset for ack in acks if ack] == list(range(5000))
    assert values(broker) == sent


async def test_no_more_than_the_bound_are_in_flight(
    nats_server: NatsServer, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("s")
    seen = 0

    def watch(message: object) -> None:
        nonlocal seen
        seen = max(seen, publisher.in_flight)

    broker.decide = watch
    async with LiftbridgePublisher(nats_server.url, max_in_flight=7) as publisher:
        await publisher.publish_many("s", [b"x"] * 100)
    assert 0 < seen <= 7


async def test_concurrent_publishes_get_their_own_acks(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    offsets: dict[bytes, int] = {}

    async def one(value: bytes) -> None:
        ack = await publisher.publish("s", value)
        assert ack is not None
        offsets[value] = ack.offset

    async with anyio.create_task_group() as tasks:
        for i in range(50):
            tasks.start_soon(one, b"%d" % i)
    assert [value for value, _ in sorted(offsets.items(), key=lambda item: item[1])] == values(
        broker
    )


async def test_all_acks_of_a_publisher_use_one_inbox(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    inboxes = set()
    broker.decide = lambda message: inboxes.add(message.ackInbox)
    await publisher.publish_many("s", [b"x"] * 10)
    await publisher.publish("s", b"y")
    assert len(inboxes) == 1


async def test_policy_all_is_acked_and_policy_none_has_no_ack(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    ack = await publisher.publish("s", b"all", ack_policy=AckPolicy.ALL)
    assert ack is not None
    assert int(ack.ackPolicy) == AckPolicy.ALL
    assert await publisher.publish("s", b"none", ack_policy=AckPolicy.NONE) is None
    await publisher.publish("s", b"after")
    assert values(broker) == [b"all", b"none", b"after"]


async def test_the_expected_offset_is_sent_and_is_minus_one_by_default(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    offsets: list[int] = []
    broker.decide = lambda message: offsets.append(message.offset)
    await publisher.publish("s", b"any")
    await publisher.publish_many("s", [b"a", b"b"], expected_offset=1)
    assert offsets == [-1, 1, 2]


async def test_an_incorrect_offset_is_refused_and_names_stream_and_correlation_id(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s", concurrency_control=True)
    await publisher.publish_many("s", [b"a", b"b"], expected_offset=0)
    with pytest.raises(IncorrectOffsetError) as caught:
        await publisher.publish("s", b"c", expected_offset=1)
    assert caught.value.stream == "s"
    assert caught.value.correlation_id in str(caught.value)
    await publisher.publish("s", b"c", expected_offset=2)
    await publisher.publish("s", b"d")
    assert values(broker) == [b"a", b"b", b"c", b"d"]


async def test_a_message_over_the_known_limit_is_not_sent(
    nats_server: NatsServer, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("s")
    async with LiftbridgePublisher(nats_server.url, max_message_bytes=1000) as publisher:
        with pytest.raises(MessageTooLargeError, match="not sent") as caught:
            await publisher.publish_many("s", [b"fits", b"x" * 1000, b"behind it"])
        assert caught.value.index == 1
        assert publisher.in_flight == 0
    assert values(broker) == [b"fits"]


async def test_a_message_over_what_nats_carries_is_not_sent_when_the_brokers_limit_is_unknown(
    nats_server: NatsServer, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("s")
    async with LiftbridgePublisher(nats_server.url, max_message_bytes=None) as publisher:
        with pytest.raises(MessageTooLargeError, match="not sent"):
            await publisher.publish("s", b"x" * 1_048_576)
    assert broker.received == 0


async def test_the_brokers_own_size_limit_is_an_error(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s", max_message_bytes=500)
    with pytest.raises(MessageTooLargeError, match="replicate"):
        await publisher.publish("s", b"x" * 500)


@pytest.mark.parametrize(
    ("fault", "error"),
    [(BrokerFault.REFUSE, PublishRefusedError), (BrokerFault.ENCRYPTION, EncryptionError)],
)
async def test_a_refusal_of_the_broker_is_its_own_error(
    broker: LiftbridgeBroker,
    publisher: LiftbridgePublisher,
    fault: BrokerFault,
    error: type[PublishError],
) -> None:
    await broker.create_stream("s")
    broker.script(fault)
    with pytest.raises(error):
        await publisher.publish("s", b"x")
    assert await publisher.publish("s", b"y")


async def test_a_broker_that_never_acks_ends_in_a_timeout(
    nats_server: NatsServer, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("s")
    broker.always = BrokerFault.DROP_ACK
    async with LiftbridgePublisher(nats_server.url, ack_timeout=0.2) as publisher:
        with pytest.raises(AckTimeoutError) as caught:
            await publisher.publish_many("s", [b"x", b"y"])
        assert caught.value.stream == "s"
        assert caught.value.index == 0
        assert publisher.in_flight == 0
        assert publisher.stats.failed == 2


async def test_publishing_to_a_missing_stream_says_so_at_once(
    publisher: LiftbridgePublisher,
) -> None:
    for count in (1, 100):
        with anyio.fail_after(SAFETY_NET / 2), pytest.raises(NoStreamError, match="missing") as no:
            await publisher.publish_many("nobody", [b"x"] * count, timeout=SAFETY_NET)
        assert no.value.index == 0
    assert publisher.in_flight == 0


async def publish_for_ever(publisher: LiftbridgePublisher) -> None:
    while True:
        publisher._asked.clear()  # as after some seconds
        with suppress(AckTimeoutError):
            await publisher.publish("late", b"y", timeout=0.2)


async def test_a_stream_that_is_created_later_is_found(
    publisher: LiftbridgePublisher, broker: LiftbridgeBroker
) -> None:
    with pytest.raises(NoStreamError):
        await publisher.publish("late", b"x")
    await broker.create_stream("late")
    await publisher.publish_many("late", [b"x"] * 3)
    await broker.stop()
    with anyio.fail_after(SAFETY_NET), pytest.raises(NoStreamError):
        await publish_for_ever(publisher)  # NATS learns a moment later that nobody listens
    await broker.start()
    await publisher.publish("late", b"z")
    assert [message.value for message in broker.messages("late")] == [b"x", b"x", b"x", b"z"]


async def test_each_publish_has_its_own_deadline(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    broker.always = BrokerFault.DROP_ACK
    long = asyncio.create_task(publisher.publish("s", b"x", timeout=SAFETY_NET))
    with pytest.raises(AckTimeoutError):
        await publisher.publish("s", b"x", timeout=0.1)
    assert not long.done()
    assert publisher.in_flight == 1
    expire_acks(publisher)
    with pytest.raises(AckTimeoutError):
        await long


async def test_one_lost_message_among_many_fails_the_call_with_its_index(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher, faults: Faults
) -> None:
    await broker.create_stream("s")
    faults.script(None, None, BrokerFault.LOSE)
    with pytest.raises(AckTimeoutError) as caught:
        await publisher.publish_many("s", [b"%d" % i for i in range(6)])
    assert caught.value.index == 2
    assert values(broker) == [b"0", b"1", b"3", b"4", b"5"]


async def test_many_messages_are_acked_once_each_among_unrelated_acks(
    nats_server: NatsServer, broker: LiftbridgeBroker
) -> None:
    await broker.create_stream("s")
    broker.script(None, BrokerFault.DOUBLE_ACK, BrokerFault.GARBAGE, BrokerFault.FOREIGN_ACK)
    async with LiftbridgePublisher(
        nats_server.url, max_in_flight=10, ack_timeout=SAFETY_NET
    ) as publisher:
        acks = await publisher.publish_many("s", [b"%d" % i for i in range(500)])
        assert [ack.offset for ack in acks if ack] == list(range(500))
        assert publisher.stats.garbage == 3
        assert publisher.stats.acked == 500
    assert values(broker) == [b"%d" % i for i in range(500)]


async def test_a_second_ack_is_not_counted(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    broker.always = BrokerFault.DOUBLE_ACK
    await publisher.publish_many("s", [b"x"] * 10)
    await publisher.publish("s", b"y")
    assert publisher.stats.acked == 11
    assert publisher.stats.unmatched >= 10


async def test_an_ack_of_another_stream_or_message_is_ignored(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    broker.script(BrokerFault.FOREIGN_ACK, BrokerFault.UNKNOWN_ACK)
    for offset in range(2):
        ack = await publisher.publish("s", b"x")
        assert ack is not None
        assert (ack.stream, ack.offset) == ("s", offset)
    assert publisher.stats.unmatched == 2


async def test_two_streams_on_one_subject_each_ack_and_ours_counts(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("other", "shared")
    await broker.create_stream("mine", "shared")
    acks = await publisher.publish_many(Stream("mine", "shared"), [b"x"] * 5)
    assert {ack.stream for ack in acks if ack} == {"mine"}
    assert len(values(broker, "other")) == len(values(broker, "mine")) == 5


async def test_garbage_in_the_ack_inbox_is_ignored(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    broker.script(BrokerFault.GARBAGE)
    assert await publisher.publish("s", b"x")
    assert publisher.stats.garbage == 3


async def test_late_acks_are_not_counted(nats_server: NatsServer, broker: LiftbridgeBroker) -> None:
    await broker.create_stream("s")
    broker.ack_delay = 0.3
    async with LiftbridgePublisher(nats_server.url, ack_timeout=SAFETY_NET) as publisher:
        with pytest.raises(AckTimeoutError):
            await publisher.publish("s", b"x", timeout=0.1)
        broker.ack_delay = 0
        assert await publisher.publish("s", b"y")
        await eventually(lambda: publisher.stats.unmatched)
        assert publisher.stats.acked == 1


async def test_a_checksum_is_sent_unless_switched_off(nats_server: NatsServer) -> None:
    client = await nats.connect(nats_server.url)
    seen = await client.subscribe("raw")
    for crc in (True, False):
        async with LiftbridgePublisher(nats_server.url, crc=crc) as publisher:
            await publisher.publish("raw", b"x", ack_policy=AckPolicy.NONE)
            await publisher.publish_plain("other", b"")
        assert decode((await seen.next_msg(5)).data).crc is crc
    await client.close()


async def test_partitions_have_their_own_subject_and_keys_choose_the_partition(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s", "subject", 4)
    stream = Stream("s", "subject", 4)
    keys = [b"key-%d" % i for i in range(20)]
    acks = await publisher.publish_many(stream, keys, keys=keys)
    assert [ack.msgSubject for ack in acks if ack] == [
        stream.subject_of(zlib.crc32(key) % 4) for key in keys
    ]
    assert await publisher.publish(stream, b"x", partition=3)
    assert values(broker, "s", 3)[-1] == b"x"
    assert {stream.subject_of(i) for i in range(4)} == {
        "subject",
        "subject.1",
        "subject.2",
        "subject.3",
    }
    assert key_partition(b"123456789", 1000) == 0xCBF43926 % 1000


async def test_an_unknown_partition_is_refused(
    publisher: LiftbridgePublisher,
) -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        await publisher.publish(Stream("s", partitions=2), b"x", partition=2)
    assert publisher.in_flight == 0


@pytest.mark.parametrize("name", ["subject", "reply"])
async def test_headers_that_the_broker_overwrites_are_refused(
    publisher: LiftbridgePublisher, name: str
) -> None:
    with pytest.raises(ValueError, match="overwritten"):
        await publisher.publish("s", b"x", headers={name: b""})


async def test_headers_of_each_message_are_added_to_shared_ones(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    await publisher.publish_many(
        "s", [b"a", b"b"], headers=HEADERS, headers_each=[{"n": b"0"}, {"n": b"1"}]
    )
    assert [
        (message.headers["source"], message.headers["n"]) for message in broker.messages("s")
    ] == [(b"test", b"0"), (b"test", b"1")]


async def test_a_plain_message_is_stored_as_an_opaque_value(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s")
    await publisher.publish_plain("s", b"plain")
    await publisher.publish("s", b"enveloped")
    assert [(message.value, message.opaque) for message in broker.messages("s")] == [
        (b"plain", True),
        (b"enveloped", False),
    ]


LENGTHS = [
    ({"keys": [b"k", b"l"]}, "not 3 values, 2 keys"),
    ({"keys": [b"k"] * 4}, "not 3 values, 4 keys"),
    ({"keys": [b"k"] * 3, "headers_each": [{}] * 2}, "not 3 values, 3 keys, 2 headers_each"),
    ({"headers_each": []}, "not 3 values, 0 headers_each"),
]


@pytest.mark.parametrize(("given", "said"), LENGTHS)
async def test_keys_and_headers_are_as_many_as_values(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher, given: dict[str, Any], said: str
) -> None:
    await broker.create_stream("s")
    with pytest.raises(ValueError, match=said):
        await publisher.publish_many("s", [b"1", b"2", b"3"], **given)
    assert values(broker) == [], "nothing is sent"
    await publisher.publish_many("s", [b"1"], keys=[b"k"], headers_each=[HEADERS])
    [stored] = broker.messages("s")
    assert (stored.key, stored.headers["source"]) == (b"k", b"test")


@pytest.mark.parametrize("keys", [2, 4])
async def test_generators_of_different_lengths_are_noticed_where_one_ends(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher, keys: int
) -> None:
    await broker.create_stream("s")
    with pytest.raises(ValueError, match=f"there are {min(keys, 3)} "):
        await publisher.publish_many(
            "s", (b"%d" % n for n in range(3)), keys=(b"k" for _ in range(keys))
        )
    acks = await publisher.publish_many("s", (b"%d" % n for n in range(3)), keys=[b"k"] * 3)
    assert len(acks) == 3
