"""The broker of each test: the stand-in, and the real one."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from feedapi_client.liftbridge import LiftbridgeApi, LiftbridgePublisher
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeBroker, LiftbridgeServer, NatsServer
from tests.liftbridge.clusters import SETTINGS, Cluster, Real, StandIn, require_liftbridge
from tests.liftbridge.helpers import SAFETY_NET, calls_end

_numbers = itertools.count()


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
async def one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """One event loop for all tests of a file."""
    yield
    await calls_end()


@pytest.fixture(scope="package")
def real_server(nats_server: NatsServer) -> Iterator[LiftbridgeServer]:
    require_liftbridge()
    with LiftbridgeServer(nats_server.url, settings=SETTINGS) as server:
        yield server


@pytest.fixture(params=["stand-in", "real"])
async def cluster(
    request: pytest.FixtureRequest, nats_server: NatsServer, anyio_backend: str
) -> AsyncIterator[Cluster]:
    if request.param == "real":
        yield Real(request.getfixturevalue("real_server"), nats_server.url)
        return
    async with LiftbridgeBroker(nats_server.url, grpc=True, member_timeout=2) as broker:
        yield StandIn(broker, nats_server.url)


@pytest.fixture
async def api(cluster: Cluster) -> AsyncIterator[LiftbridgeApi]:
    async with LiftbridgeApi(cluster.address, timeout=SAFETY_NET) as api:
        yield api


@pytest.fixture
async def publisher(cluster: Cluster) -> AsyncIterator[LiftbridgePublisher]:
    # A short ack timeout, because messages are lost while the broker is down.
    async with LiftbridgePublisher(cluster.nats_url, ack_timeout=1.0) as publisher:
        yield publisher


@pytest.fixture
def name() -> str:
    """A name for a stream that no other test has."""
    return f"contract-{next(_numbers)}"


@pytest.fixture
def feed(feedapi_publisher: Publisher) -> Publisher:
    feedapi_publisher.extend(0, [{"n": n} for n in range(20)])
    return feedapi_publisher
