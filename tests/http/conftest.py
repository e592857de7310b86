"""Everything here runs over both faces: coroutines on a loop, and the same ones in a thread."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.http.helpers import made


@pytest.fixture(params=[False, True], ids=["async", "sync"])
def sync(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def clients_closed(request: pytest.FixtureRequest) -> None:
    if inspect.iscoroutinefunction(request.function):
        request.getfixturevalue("closing_clients")


@pytest.fixture
async def closing_clients() -> AsyncIterator[None]:
    yield
    while made:
        closed = made.pop()
        closed.close() if isinstance(closed, httpx.Client) else await closed.aclose()
