"""Publishing until everything is acked: what is stored more than once meanwhile.

Every test runs with the fast path, and with documented calls of nats-py only.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from feedapi_client import FeedConsumer, RetryPolicy
from feedapi_client.liftbridge import (
    AckTimeoutError,
    LiftbridgePublisher,
    NoStreamError,
    Relay,
    Stream,
)
from feedapi_client.liftbridge.until_acked import publish_until_acked
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import BrokerFault, LiftbridgeBroker, NatsServer
from tests.liftbridge.helpers import SAFETY_NET, Faults, eventually, expire_acks, values

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.usefixtures("way_through_nats_py"),
]

FOUR = Stream("s", partitions=4)
KEYS = {FOUR.partition_of(key): key for key in (b"%d" % n for n in range(50))}


async def publish(publisher: LiftbridgePublisher, partitions: list[int], **given: Any) -> None:
    """Publish a message to each of these partitions; its value is its place in the list."""
    sent = [b"%d" % n for n in range(len(partitions))]
    keys = [KEYS[partition] for partition in partitions]
    await publish_until_acked(publisher, FOUR, sent, keys, **given)


async def test_acks_of_messages_beside_one_that_nobody_listens_to_are_waited_for(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s", partitions=2)
    broker.ack_delay = 0.1  # behind NATS's own answer
    keys = [KEYS[partition] for partition in (0, 3, 1)]
    with pytest.raises(NoStreamError, match=r"subject s\.3.* fewer partitions") as caught:
        await publisher.publish_many(FOUR, [b"0", b"1", b"2"], keys=keys)
    assert (caught.value.index, len(caught.value.acks)) == (1, 1)
    assert publisher.stats.acked == 2


@pytest.mark.parametrize("missing_at", [0, 1, 3])
async def test_a_stream_with_fewer_partitions_gets_no_message_twice(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher, missing_at: int
) -> None:
    await broker.create_stream("s", partitions=2)
    await publisher.publish("s", b"before")
    partitions = [0, 1, 0, 1]
    partitions[missing_at] = 3
    with pytest.raises(NoStreamError, match="fewer partitions"):
        await publish(publisher, partitions, attempts=3)
    stored = Counter([*values(broker), *values(broker, partition=1)])
    assert set(stored.values()) == {1}
    assert len(stored) == 4


async def test_a_relay_to_a_stream_with_fewer_partitions_stores_no_message_twice(
    feedapi_publisher: Publisher, broker: LiftbridgeBroker, publisher: LiftbridgePublisher
) -> None:
    await broker.create_stream("s", partitions=2)
    feedapi_publisher.extend(0, [{"n": n} for n in range(20)])
    retry = RetryPolicy(give_up_after=0.5)
    async with FeedConsumer(feedapi_publisher.url or "", follow=False, retry=retry) as consumer:
        relay = Relay(consumer, publisher, FOUR, key=lambda event: str(event.json()["n"]).encode())
        with pytest.raises(NoStreamError, match="fewer partitions"):
            await relay.run()
    stored = Counter([*values(broker), *values(broker, partition=1)])
    assert set(stored.values()) <= {1}


async def test_only_the_first_of_the_messages_is_sent_until_an_ack_has_come(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher, faults: Faults
) -> None:
    await broker.create_stream("s", partitions=4)
    faults.decide = lambda _: BrokerFault.DROP_ACK
    with pytest.raises(AckTimeoutError, match=r"allowed to publish to _INBOX\.>"):
        await publish(publisher, [0] * 5, attempts=3)
    assert values(broker) == [b"0"] * 3
    faults.clear()
    await publish(publisher, [0] * 5)
    assert values(broker) == [b"0"] * 3 + [b"0", b"1", b"2", b"3", b"4"]


async def test_a_repeated_attempt_begins_with_one_message(
    broker: LiftbridgeBroker, publisher: LiftbridgePublisher, faults: Faults
) -> None:
    await broker.create_stream("s", partitions=4)
    await publish(publisher, [1])
    faults.decide = lambda _: BrokerFault.DROP_ACK
    with pytest.raises(AckTimeoutError) as caught:
        await publish(publisher, [0] * 5, attempts=3)
    assert "_INBOX" not in str(caught.value)
    assert values(broker) == [b"0", b"1", b"2", b"3", b"4", b"0", b"0"]


async def test_a_broker_that_may_not_publish_to_inboxes_stores_one_message_again_and_again(
    tmp_path: Path,
) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(
        "authorization { users = [ {user: app, password: pw}, {user: broker, password: pw, "
        'permissions: {publish: {deny: ["acks.>"]}}} ] }'
    )
    with NatsServer("-c", str(config)) as server:
        app, own = (server.url.replace("//", f"//{user}:pw@") for user in ("app", "broker"))
        async with (
            LiftbridgeBroker(own) as broker,
            LiftbridgePublisher(
                app, ack_timeout=SAFETY_NET, options={"inbox_prefix": "acks"}
            ) as publisher,
        ):
            await broker.create_stream("s", partitions=4)

            def stored(*_: object) -> None:
                expire_acks(publisher)

            broker.decide = stored
            with pytest.raises(AckTimeoutError, match=r"broker's own user .* acks\.>"):
                await publish(publisher, [0] * 20, attempts=4)
            await eventually(lambda: broker.received == 4)
            assert set(values(broker)) == {b"0"}
