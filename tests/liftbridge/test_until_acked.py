"""Publishing until everything is acked: what is stored more than once meanwhile.

Every test runs with the fast path, and with documented calls of nats-py only.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from feedapi_client.liftbridge import (
    AckTimeoutError,
    LiftbridgePublisher,
    NoStreamError,
    Stream,
)
from feedapi_client.liftbridge.message_publisher import publish_until_acked
from feedapi_client.testing.liftbridge import NatsServer
from tests.liftbridge.acker import Acker
from tests.liftbridge.broker import Broker
from tests.liftbridge.helpers import SAFETY_NET, eventually
from tests.liftbridge.middle import Fault, Middle, expire_withheld, man_in_the_middle

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.usefixtures("way_through_nats_py"),
]

# By the number of a partition of four, a key of it.
KEYS = {Stream("s", partitions=4).partition_of(key): key for key in (b"%d" % n for n in range(50))}


def four(broker: Broker) -> Stream:
    """The stream of the test with four partitions, which it may lack."""
    return Stream(broker.name, partitions=4)


async def publish(broker: Broker, partitions: list[int], **given: Any) -> None:
    """Publish a message to each of these partitions; its value is its place in the list."""
    sent = [b"%d" % n for n in range(len(partitions))]
    keys = [KEYS[partition] for partition in partitions]
    await publish_until_acked(broker.publisher, four(broker), sent, keys, **given)


async def stored(broker: Broker) -> Counter[bytes]:
    return Counter([*await broker.values(), *await broker.values(partition=1)])


async def test_acks_of_messages_beside_one_that_nobody_listens_to_are_waited_for(
    broker: Broker, middle: Middle
) -> None:
    await broker.create(partitions=2)
    middle.acks = anyio.Event()
    keys = [KEYS[partition] for partition in (0, 3, 1)]

    async def let_acks_through() -> None:
        await eventually(lambda: middle.unheard)
        middle.acks.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(let_acks_through)
        with pytest.raises(NoStreamError, match=r"subject .*\.3.* fewer partitions") as caught:
            await broker.publisher.publish_many(four(broker), [b"0", b"1", b"2"], keys=keys)
    assert (caught.value.index, len(caught.value.acks)) == (1, 1)
    assert broker.publisher.stats.acked == 2


@pytest.mark.parametrize("missing_at", [0, 1, 3])
async def test_a_stream_with_fewer_partitions_gets_no_message_twice(
    broker: Broker, missing_at: int
) -> None:
    await broker.create(partitions=2)
    await broker.publisher.publish(broker.name, b"before")
    partitions = [0, 1, 0, 1]
    partitions[missing_at] = 3
    with pytest.raises(NoStreamError, match="fewer partitions"):
        await publish(broker, partitions, attempts=3)
    found = await stored(broker)
    assert set(found.values()) == {1}
    assert len(found) == 4


async def test_only_the_first_of_the_messages_is_sent_until_an_ack_has_come(
    broker: Broker, middle: Middle
) -> None:
    await broker.create(partitions=4)
    middle.always = Fault.DROP_ACK
    with pytest.raises(AckTimeoutError, match=r"allowed to publish to _INBOX\.>"):
        await publish(broker, [0] * 5, attempts=3)
    assert await broker.values() == [b"0"] * 3
    middle.clear()
    await publish(broker, [0] * 5)
    assert await broker.values() == [b"0"] * 3 + [b"0", b"1", b"2", b"3", b"4"]


async def test_a_repeated_attempt_begins_with_one_message(broker: Broker, middle: Middle) -> None:
    await broker.create(partitions=4)
    await publish(broker, [1])
    middle.always = Fault.DROP_ACK
    with pytest.raises(AckTimeoutError) as caught:
        await publish(broker, [0] * 5, attempts=3)
    assert "_INBOX" not in str(caught.value)
    assert await broker.values() == [b"0", b"1", b"2", b"3", b"4", b"0", b"0"]


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
            Acker(own, "s") as acker,
            man_in_the_middle(app) as middle,
            LiftbridgePublisher(
                middle.url, ack_timeout=SAFETY_NET, options={"inbox_prefix": "acks"}
            ) as publisher,
            anyio.create_task_group() as tasks,
        ):
            middle.always = Fault.DROP_ACK  # none comes: each expires
            tasks.start_soon(expire_withheld, middle, publisher)
            with pytest.raises(AckTimeoutError, match=r"broker's own user .* acks\.>"):
                await publish_until_acked(publisher, Stream("s"), [b"0", b"1"] * 10, attempts=4)
            await eventually(lambda: len(acker.messages["s"]) == 4)
            assert set(acker.values("s")) == {b"0"}
            tasks.cancel_scope.cancel()
