"""What the consumer makes of a store's errors."""

from __future__ import annotations

import pytest

from feedapi_client import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.runtime.positions import Positions
from feedapi_client.runtime.waiting import Waits
from feedapi_client.stores.sqlite import MemoryCursorStore

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
