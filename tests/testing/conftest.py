from __future__ import annotations

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
    """The `clock` of a publisher: it stands still until a test moves it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now
