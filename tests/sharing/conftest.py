from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from feedapi_client import CursorStore, MemoryCursorStore, SQLiteCursorStore
from feedapi_client.testing import Publisher
from tests.testing.virtual_time import virtual_backend


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str | tuple[str, dict[str, Any]]:
    """The backend, on virtual time where the test is marked so."""
    name = str(request.param)
    return virtual_backend(name) if request.node.get_closest_marker("virtual_time") else name


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
