"""Writing to a stream as a relay does that is exactly once, and reading back."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from feedapi_client import FeedConsumer, Limits, MemoryCursorStore
from feedapi_client.liftbridge import (
    Message,
    OutgoingBatch,
    Relay,
    RelayedBatch,
    RelayReader,
    StreamCursorStore,
)
from feedapi_client.model import FeedKey
from feedapi_client.stores.base import CursorStore
from feedapi_client.testing import Publisher
from tests.liftbridge.broker import Broker
from tests.positions import counted

FORMATS = ["batch", "events"]
MODES = ["at least once", *FORMATS]
KEY = FeedKey("http://localhost/feed")
SMALL = Limits(max_batch_bytes=2000, settle_time=0.3)


def events(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"entity": f"e{n % 7}", "n": n} for n in range(start, start + count)]


def outgoing(*numbers: int, cursor: str = "c") -> OutgoingBatch:
    return OutgoingBatch(0, cursor, [b'{"n":%d}' % n for n in numbers])


def store_of(broker: Broker, format: str = "batch", **options: Any) -> StreamCursorStore:
    return StreamCursorStore(broker.publisher, broker.api, broker.name, format=format, **options)


def store_for(mode: str, broker: Broker) -> CursorStore:
    return MemoryCursorStore() if mode == MODES[0] else store_of(broker, mode)


async def open_ledger(broker: Broker, format: str = "batch", **options: Any) -> StreamCursorStore:
    """Create the test's stream, and load a store in it."""
    await broker.create(once=True)
    return await loaded(broker, format, **options)


async def loaded(broker: Broker, format: str = "batch", **options: Any) -> StreamCursorStore:
    store = store_of(broker, format, **options)
    await store.load(KEY)
    return store


async def save(store: StreamCursorStore, revision: int, *numbers: int) -> None:
    """Save position `revision` with events of these numbers."""
    batch = outgoing(*numbers, cursor=f"c{revision}")
    await store.save(KEY, {0: counted(f"c{revision}", revision)}, transaction=batch)


async def relay(feed: Publisher, broker: Broker, store: StreamCursorStore, **options: Any) -> Relay:
    """Relay a feed to its end, exactly once."""
    async with FeedConsumer(feed.url or "", store=store, follow=False, limits=SMALL) as consumer:
        relay = Relay(consumer, broker.publisher, **options)
        await relay.run()
    return relay


async def batches(broker: Broker, start: Any = "earliest") -> list[RelayedBatch]:
    """Return what a reader gets, from a start to the present end."""
    until = await broker.newest()
    found = RelayReader(broker.api, broker.name, start=start, until=until)
    return [batch async for batch in found] if until >= 0 else []


async def relayed(broker: Broker) -> list[int]:
    """Return the numbers of all events that a reader gets now."""
    return [event.json()["n"] for batch in await batches(broker) for event in batch.events]


async def read_relayed(broker: Broker, count: int, **options: Any) -> list[int]:
    """Follow the stream, and return the numbers of the first relayed events."""
    found: list[int] = []
    async with aclosing(RelayReader(broker.api, broker.name, **options).batches()) as read:
        async for batch in read:
            found += [event.json()["n"] for event in batch.events]
            if len(found) >= count:
                break
    return found


async def read(messages: AsyncGenerator[Message, None], count: int) -> list[Message]:
    """Follow a subscription, and return its first messages."""
    found: list[Message] = []
    async with aclosing(messages) as open_messages:
        async for message in open_messages:
            found.append(message)
            if len(found) == count:
                break
    return found


async def offsets(messages: AsyncGenerator[Message, None], count: int) -> list[int]:
    """Follow a subscription, and return the offsets of its first messages."""
    return [message.offset for message in await read(messages, count)]


async def own_headers(broker: Broker) -> dict[str, bytes]:
    """The headers that the relay gave to the first message."""
    headers = (await broker.messages())[0].headers
    return {name: headers[name] for name in headers if name.startswith("feedapi-")}


def look_often(patch: pytest.MonkeyPatch) -> None:
    """Let relays look at the end of their streams often, and soon after a save."""
    patch.setattr("feedapi_client.liftbridge.relay._LOOK_SECONDS", 0.1)
    patch.setitem(StreamCursorStore.keep.__kwdefaults__, "idle_seconds", 0.2)
