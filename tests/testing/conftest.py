from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from feedapi_client.testing import Publisher
from tests.testing.feed import Feed


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=10, verify=False) as client:
        yield client


@pytest.fixture
def feed(
    feedapi_publisher_factory: Callable[..., Publisher], http: httpx.Client
) -> Callable[..., Feed]:
    """Makes a served publisher and a plain client for it."""
    return lambda *args, **settings: Feed(feedapi_publisher_factory(*args, **settings), http)
