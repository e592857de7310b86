"""Writing as a relay does, and reading back."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from feedapi_client.liftbridge import (
    LiftbridgeApi,
    Message,
    OutgoingBatch,
    RelayReader,
    StreamCursorStore,
    StreamPublisher,
)
from feedapi_client.model import FeedKey
from tests.positions import counted

FORMATS = ["batch", "events"]
KEY = FeedKey("http://localhost/feed")


def store_of(
    publisher: StreamPublisher,
    api: LiftbridgeApi,
    name: str,
    format: str,
    give_up_after: float = 300.0,
) -> StreamCursorStore:
    return StreamCursorStore(publisher, api, name, format=format, give_up_after=give_up_after)


async def save(store: StreamCursorStore, revision: int, *numbers: int) -> None:
    """Save position `revision` with events of these numbers."""
    batch = OutgoingBatch(0, f"c{revision}", [b'{"n":%d}' % n for n in numbers])
    await store.save(KEY, {0: counted(f"c{revision}", revision)}, transaction=batch)


async def read(messages: AsyncGenerator[Message, None], count: int) -> list[int]:
    """Return the offsets of the first messages."""
    offsets: list[int] = []
    async with aclosing(messages) as open_messages:
        async for message in open_messages:
            offsets.append(message.offset)
            if len(offsets) == count:
                break
    return offsets


async def relayed(api: LiftbridgeApi, name: str, count: int, **options: Any) -> list[int]:
    """Return the numbers of the first relayed events."""
    found: list[int] = []
    async with aclosing(RelayReader(api, name, **options).batches()) as batches:
        async for batch in batches:
            found += [event.json()["n"] for event in batch.events]
            if len(found) >= count:
                break
    return found


def look_often(patch: pytest.MonkeyPatch) -> None:
    """Let relays look at the end of their streams often, and soon after a save."""
    patch.setattr("feedapi_client.liftbridge.relay._LOOK_SECONDS", 0.1)
    patch.setitem(StreamCursorStore.keep.__kwdefaults__, "idle_seconds", 0.2)
