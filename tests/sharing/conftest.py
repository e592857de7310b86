from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from feedapi_client import CursorStore, MemoryCursorStore, SQLiteCursorStore
from feedapi_client.testing import Publisher


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Callable[..., Publisher]:
    """Makes publishers on loopback ports; without sockets on virtual time."""
    if request.node.get_closest_marker("virtual_time"):
        return Publisher
    factory: Callable[..., Publisher] = request.getfixturevalue("feedapi_publisher_factory")
    return factory


@pytest.fixture(params=["memory", "sqlite"])
async def shared_store(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[CursorStore]:
    if request.param == "memory":
        yield MemoryCursorStore()
        return
    async with SQLiteCursorStore(tmp_path / "cursors.db") as store:
        yield store
