"""Fixtures for tests of consumers, registered by the package: `feedapi_publisher` and `feedapi_publisher_factory`.

::

    def test_my_consumer(feedapi_publisher):
        feedapi_publisher.append(0, {"entity": "a", "n": 1})
        my_consumer(feedapi_publisher.url)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from feedapi_client.testing.publisher import Publisher

# Nothing else is imported up here: every pytest run of every project beside this package pays for it.


@pytest.fixture
def feedapi_publisher_factory() -> Iterator[Callable[..., Publisher]]:
    """Makes publishers, each served on a loopback port until the test ends; takes what `Publisher` takes. The URL is the publisher's `url`."""
    from feedapi_client.testing.publisher import Publisher

    with ExitStack() as serving:

        def make(*args: Any, **settings: Any) -> Publisher:
            publisher = Publisher(*args, **settings)
            serving.enter_context(publisher.serve())
            return publisher

        yield make


@pytest.fixture
def feedapi_publisher(feedapi_publisher_factory: Callable[..., Publisher]) -> Publisher:
    """A publisher with one partition, dialect v2-token, served on a loopback port: `feedapi_publisher.url`."""
    return feedapi_publisher_factory()
