"""Stores that break the contract. `test_contract` runs the contract's tests on them.

Pytest does not collect this module by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio.lowlevel
import pytest

from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import check_replaces
from feedapi_client.stores.sqlite import MemoryCursorStore
from feedapi_client.testing import CursorStoreContract

Positions = Mapping[int, Position]


class _Bare(CursorStoreContract):
    supports_transactions = supports_second_handle = supports_failure_injection = False
    make: type[MemoryCursorStore] = MemoryCursorStore

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture
    def store(self) -> MemoryCursorStore:
        return self.make()


class TestGood(_Bare):
    pass


class TestUndeclared(CursorStoreContract):
    anyio_backend = _Bare.anyio_backend
    store = _Bare.store
    make = MemoryCursorStore


class TestWithoutHooks(_Bare):
    supports_transactions = supports_second_handle = supports_failure_injection = True


class TestAnyRevision(_Bare):
    class make(MemoryCursorStore):  # noqa: N801
        async def save(self, feed: FeedKey, positions: Positions, **more: Any) -> None:
            await self.replace(feed, positions)


class TestOneByOne(_Bare):
    class make(MemoryCursorStore):  # noqa: N801
        async def save(self, feed: FeedKey, positions: Positions, **more: Any) -> None:
            for partition, position in positions.items():
                await super().save(feed, {partition: position}, **more)


class TestIgnoresTheTransaction(_Bare):
    class make(MemoryCursorStore):  # noqa: N801
        async def save(self, feed: FeedKey, positions: Positions, **more: Any) -> None:
            await super().save(feed, positions)


class TestMixesFeeds(_Bare):
    class make(MemoryCursorStore):  # noqa: N801
        async def load(self, feed: FeedKey) -> dict[int, Position]:
            positions: dict[int, Position] = {}
            for each in await self.feeds():
                positions |= await super().load(each)
            return positions


class TestLosesTheStatus(_Bare):
    class make(MemoryCursorStore):  # noqa: N801
        async def load(self, feed: FeedKey) -> dict[int, Position]:
            return {
                p: Position(found.cursor, "open", found.revision)
                for p, found in (await super().load(feed)).items()
            }


class TestStripsCursors(_Bare):
    class make(MemoryCursorStore):  # noqa: N801
        async def load(self, feed: FeedKey) -> dict[int, Position]:
            return {
                p: Position(found.cursor.strip(), found.status, found.revision)
                for p, found in (await super().load(feed)).items()
            }


class TestEncodesCursors(_Bare):
    class make(MemoryCursorStore):  # noqa: N801
        async def save(self, feed: FeedKey, positions: Positions, **more: Any) -> None:
            for position in positions.values():
                position.cursor.encode()
            await super().save(feed, positions, **more)


class TestChecksAndSavesSeparately(_Bare):
    class make(MemoryCursorStore):  # noqa: N801
        async def save(self, feed: FeedKey, positions: Positions, **more: Any) -> None:
            stored = await self.load(feed)
            for partition, position in positions.items():
                check_replaces(feed, partition, position.replaces, stored.get(partition))
            await anyio.lowlevel.checkpoint()
            await self.replace(feed, positions)


class TestCancelledHalfway(_Bare):
    class make(MemoryCursorStore):  # noqa: N801
        async def save(self, feed: FeedKey, positions: Positions, **more: Any) -> None:
            for odd in (1, 0):
                half = {p: each for p, each in positions.items() if p % 2 == odd}
                await super().save(feed, half, **more)
                await anyio.lowlevel.checkpoint()
