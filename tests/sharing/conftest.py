from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from feedapi_client import CursorStore, MemoryCursorStore, SQLiteCursorStore
from feedapi_client.testing import Publisher
from tests.consumer.conftest import _one_tls_context
from tests.servers import mariadb, postgres, redis_server

__all__ = ["_one_tls_context", "mariadb", "postgres", "redis_server"]


@pytest.fixture
def serve(feedapi_publisher_factory: Callable[..., Publisher]) -> Callable[..., Publisher]:
    """Makes publishers on loopback ports."""
    return feedapi_publisher_factory


@pytest.fixture(params=["memory", "sqlite"])
async def shared_store(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[CursorStore]:
    if request.param == "memory":
        yield MemoryCursorStore()
        return
    async with SQLiteCursorStore(tmp_path / "cursors.db") as store:
        yield store
