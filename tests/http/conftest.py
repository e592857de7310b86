"""Everything here runs over both faces: coroutines on a loop, and the same ones in a thread.

On a loop they have connections of our own, and those of httpx where somebody has patched that.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.http.helpers import made


@pytest.fixture(params=[False, None, True], ids=["wire", "httpx", "sync"])
def sync(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param is None:
        monkeypatch.setattr(httpx.AsyncClient, "patched", lambda: None, raising=False)
    return bool(request.param)


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
