"""The contract of a store of leases, for every store but those of SQL servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from feedapi_client.stores.redis import RedisCursorStore
from feedapi_client.stores.sqlite import MemoryCursorStore, SQLiteCursorStore
from feedapi_client.testing.contracts import LeaseStoreContract
from tests.servers import Redis


class TestMemory(LeaseStoreContract):
    supports_second_handle = False

    @pytest.fixture
    def store(self) -> MemoryCursorStore:
        return MemoryCursorStore()


class TestSQLite(LeaseStoreContract):
    supports_second_handle = True

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[SQLiteCursorStore]:
        async with SQLiteCursorStore(tmp_path / "cursors.db") as store:
            yield store

    @asynccontextmanager
    async def second_handle(self, store: SQLiteCursorStore) -> AsyncIterator[SQLiteCursorStore]:
        async with SQLiteCursorStore(store.path) as second:
            yield second


class TestRedis(LeaseStoreContract):
    supports_second_handle = True

    @pytest.fixture(params=["asyncio"])
    def anyio_backend(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    async def store(self, redis_server: Redis) -> AsyncIterator[RedisCursorStore]:
        with redis.Redis.from_url(redis_server.url) as client:
            client.flushall()
        self.url = redis_server.url
        async with RedisCursorStore(redis_server.url) as store:
            yield store

    @asynccontextmanager
    async def second_handle(self, store: RedisCursorStore) -> AsyncIterator[RedisCursorStore]:
        async with RedisCursorStore(self.url) as second:
            yield second
