"""pytest fixtures for tests of consumers: `feedapi_publisher`, `feedapi_publisher_factory`, and
`simulate`.

Installing the package registers them, and the option ``--feedapi-seed``.

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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that repeats one history of the fixture `simulate`."""
    group = parser.getgroup("feedapi-client")
    group.addoption(
        "--feedapi-seed", type=int, help="run only this seed of tests that use `simulate`"
    )


@pytest.fixture
def simulate(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Run a handler and a store through simulated histories.

    Called with the arguments of `feedapi_client.testing.simulator.simulate`. A failure names the
    command that repeats it, which runs this test with ``--feedapi-seed``.
    """
    from feedapi_client.testing.simulator import simulate as run

    seed: int | None = request.config.getoption("--feedapi-seed")
    replay = f"pytest '{request.node.nodeid}' --feedapi-seed {{seed}}"

    def simulated(*args: Any, **options: Any) -> None:
        __tracebackhide__ = True
        if seed is not None:
            options |= {"first": seed, "seeds": 1}
        run(*args, **{"replay": replay, **options})

    return simulated
