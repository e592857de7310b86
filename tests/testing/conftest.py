from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import httpx
import pytest

from feedapi_client.testing import Publisher
from tests.testing.served_feed import TIMEOUT, ServedFeed


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=TIMEOUT, verify=False) as client:
        yield client


@pytest.fixture
def make_feed(
    feedapi_publisher_factory: Callable[..., Publisher], http: httpx.Client
) -> Callable[..., ServedFeed]:
    """Make a served publisher with a plain client; takes the arguments of `Publisher`."""
    return lambda *args, **settings: ServedFeed(feedapi_publisher_factory(*args, **settings), http)


class Clock:
    """The seconds that publishers read as the present time."""

    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock of all publishers that stands still until a test moves it."""
    clock = Clock()
    for name, module in [*sys.modules.items()]:
        if name.startswith("feedapi_client.testing.publisher") and hasattr(module, "monotonic"):
            monkeypatch.setattr(module, "monotonic", lambda: clock.now)
    return clock
