"""Relays on the stand-in, and what they wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from feedapi_client import FeedConsumer, Limits
from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgePublisher,
    OutgoingBatch,
    Relay,
    RelayedBatch,
    RelayReader,
    StreamCursorStore,
)
from feedapi_client.model import FeedKey
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeBroker

Feeds = Callable[..., Publisher]
Make = Callable[..., StreamCursorStore]
FORMATS = ["batch", "events"]
KEY = FeedKey("http://localhost/feed")
SMALL = Limits(max_batch_bytes=2000, settle_time=0.3)


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


def own_headers(broker: LiftbridgeBroker) -> dict[str, bytes]:
    """The headers that the relay gave to the first message."""
    headers = broker.messages("s")[0].headers
    return {name: headers[name] for name in headers if name.startswith("feedapi-")}


async def read(api: LiftbridgeApi, broker: LiftbridgeBroker) -> list[int]:
    return [event.json()["n"] for batch in await batches(api, broker) for event in batch.events]
