"""What the consumer makes of a store's errors."""

from __future__ import annotations

from typing import Any

import pytest

from feedapi_client import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.runtime.positions import Positions
from feedapi_client.runtime.waiting import Waits
from feedapi_client.stores.sqlite import MemoryCursorStore
from feedapi_client.testing import Quirks
from tests.consumer.helpers import Gate, LocalFeed, RecordingStore, wait_until

pytestmark = pytest.mark.anyio


KEY = FeedKey("http://localhost/feed")


class StoreThatRaises(MemoryCursorStore):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def save(self, *_: object, **__: object) -> None:
        raise self.error


async def test_errors_that_cause_each_other_end_a_save_like_any_other() -> None:
    first, second = StoreError("one"), StoreError("two")
    first.__cause__, second.__cause__ = second, first
    positions = Positions(StoreThatRaises(first), KEY, Waits(), timeout=1)
    with pytest.raises(StoreError, match="one"):
        await positions.save({0: Position("c")})


class WaitingSaves(RecordingStore):
    gate: Gate | None = None

    async def save(self, *args: Any, **options: Any) -> None:
        if self.gate is not None:
            await self.gate.wait()
        await super().save(*args, **options)


@pytest.mark.virtual_time
async def test_status_shows_no_cursor_that_the_store_has_not() -> None:
    """Also not where a second save, which compares the first one's, waits behind it (R17)."""
    feed = LocalFeed(1, quirks=Quirks(last_cursor="always"))
    feed.store = store = WaitingSaves()
    feed.numbers(0, 1)
    async with feed.running() as reader:
        status = reader.consumer.status
        await wait_until(lambda: status()[0].caught_up)
        [child] = feed.split(0, into=1, method="starts-after")
        children = feed.split(child, into=2, method="cursor-from")
        store.gate = Gate()
        await store.gate.reached.wait()
        assert [status()[id].cursor for id in children] == [None, None]
        store.gate.opened.set()
        await wait_until(lambda: all(status()[id].cursor is not None for id in children))
