"""pytest fixtures for tests of consumers: `feedapi_publisher` and `feedapi_publisher_factory`.

Installing the package registers them.

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

# Nothing else is imported at module level: every pytest run of every project that has this package
# installed would pay for it.


@pytest.fixture
def feedapi_publisher_factory() -> Iterator[Callable[..., Publisher]]:
    """Make publishers, each served on a loopback port until the test ends.

    The factory takes the arguments of `Publisher`. The URL is the publisher's `url`.
    """
    from feedapi_client.testing.publisher import Publisher

    with ExitStack() as serving:

        def make(*args: Any, **settings: Any) -> Publisher:
            publisher = Publisher(*args, **settings)
            serving.enter_context(publisher.serve())
            return publisher

        yield make


@pytest.fixture
def feedapi_publisher(feedapi_publisher_factory: Callable[..., Publisher]) -> Publisher:
    """Serve a publisher with one partition on a loopback port: `feedapi_publisher.url`.

    Its dialect is v2-token.
    """
    return feedapi_publisher_factory()
