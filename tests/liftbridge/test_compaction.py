"""Compaction."""

from __future__ import annotations

from functools import partial

import pytest

from feedapi_client.liftbridge import (
    StreamGapError,
    StreamOptions,
)
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from tests.liftbridge.broker import CLEANS_OFTEN, Broker, open_broker, require_liftbridge
from tests.liftbridge.helpers import eventually_is
from tests.liftbridge.ledgers import read_relayed

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


COUNT = 60
COMPACTED = StreamOptions(compact=True, cleaner_seconds=0.2, segment_bytes=1024)


async def write_with_keys(broker: Broker) -> None:
    """Write events of one key as a relay does, one a batch."""
    for n in range(COUNT):
        headers = {"attempt": b"a%d" % n, "index": b"0", "count": b"1", "format": b"events"}
        headers |= {"snapshot": b"0", "partition": b"0", "cursor": b"c%d" % n}
        await broker.publisher.publish(
            broker.name,
            b'{"n":%d}' % n,
            key=b"k",
            expected_offset=n,
            headers={f"feedapi-{name}": value for name, value in headers.items()},
        )


async def compacted(broker: Broker) -> list[int]:
    """Wait until messages in the middle are gone, and return the offsets of the others."""
    found = await eventually_is(broker.messages, lambda messages: len(messages) < COUNT)
    return [message.offset for message in found]


async def test_a_reader_refuses_a_stream_that_was_compacted(broker: Broker) -> None:
    await broker.api.create_stream(broker.name, options=COMPACTED)
    await write_with_keys(broker)
    await compacted(broker)
    with pytest.raises(StreamGapError, match="compaction"):
        await read_relayed(broker, COUNT, start=0)


async def test_the_end_of_a_subscription_is_not_overshot_when_its_message_is_gone(
    broker: Broker,
) -> None:
    await broker.api.create_stream(broker.name, options=COMPACTED)
    values = [b"%d" % n for n in range(COUNT)]
    await broker.publisher.publish_many(broker.name, values, keys=[b"k"] * COUNT)
    left = await compacted(broker)
    until = left[0] - 1 if left[0] else next(n for n in range(COUNT) if n not in left)
    found = [message.offset async for message in broker.api.subscribe(broker.name, 0, until=until)]
    # The broker may compact once more meanwhile.
    left_now = [message.offset for message in await broker.messages()]
    assert {offset for offset in left_now if offset <= until} <= set(found)
    assert set(found) <= {offset for offset in left if offset <= until}


async def test_a_ledger_is_not_compacted_or_paused_where_the_broker_does_that_by_default(
    nats_server: NatsServer, name: str
) -> None:
    require_liftbridge()
    settings = {
        **CLEANS_OFTEN,
        "streams.segment.max.bytes": 1024,
        "streams.compact.enabled": True,
        "streams.auto.pause.time": "200ms",
    }
    with LiftbridgeServer(nats_server.url, settings=settings) as server:
        async with open_broker(server, name) as broker:
            await broker.create(once=True)
            other = f"{name}-other"
            await broker.api.create_stream(other, options=StreamOptions(cleaner_seconds=0.2))
            await write_with_keys(broker)
            # The other stream shows that the broker has done both to whom it does it.
            other_state = partial(broker.api.metadata, other)
            await eventually_is(other_state, lambda found: found.partitions[0].paused)
            assert not (await broker.api.metadata(name)).partitions[0].paused
            assert await read_relayed(broker, COUNT, start=0) == list(range(COUNT))
