"""A monitor beside a consumer, requests to it, and a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
import pytest

from feedapi_client.testing import Publisher
from tests import components
from tests.monitor.browser import Browser, browser


@pytest.fixture
def publisher(feedapi_publisher_factory: Callable[..., Publisher]) -> Publisher:
    """One partition, pages of 10 events, a checkpoint behind each 5."""
    return feedapi_publisher_factory(page_size=10, checkpoint_every=5)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser. Where none is installed tests are skipped, but not in CI."""
    components.require("chromium")
    profile = tmp_path_factory.mktemp("profile")
    with browser(Path(profile)) as page:
        yield page


async def get(url: str, path: str = "", **options: Any) -> httpx.Response:
    """Ask a monitor, in a thread: its consumer runs in this event loop."""
    return await anyio.to_thread.run_sync(lambda: httpx.request("GET", url + path, **options))
