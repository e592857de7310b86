"""A NATS server for all tests, a broker and a publisher for each test.

nats-py runs on asyncio only, and so do these tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from feedapi_client.liftbridge import LiftbridgeApi, LiftbridgePublisher
from feedapi_client.liftbridge import nats_publisher as publisher_module
from feedapi_client.testing.liftbridge import LiftbridgeBroker, LiftbridgeServer, NatsServer
from tests.conftest import BROKER_CRASH
from tests.liftbridge.helpers import SAFETY_NET, Faults, calls_end

_told: WeakKeyDictionary[LiftbridgeServer, int] = WeakKeyDictionary()
"""How many crashes of a server were told of."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, Any]:
    """Tell of each crash of a real broker, and show the end of its log below a test that failed."""
    report = yield
    for server in _servers(item):
        new = server.crashes[_told.get(server, 0) :]
        _told[server] = len(server.crashes)
        for crash in new:
            report.sections.append(("the broker crashed, and was started again", crash))
            report.user_properties.append((BROKER_CRASH, crash.split("\n\n")[0]))
        if report.failed:
            report.sections.append(("the end of the broker's log", server.log()[-4000:]))
    return report


def _servers(item: pytest.Item) -> Iterator[LiftbridgeServer]:
    for value in getattr(item, "funcargs", {}).values():
        found = getattr(value, "server", value)
        if isinstance(found, LiftbridgeServer):
            yield found


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture
async def broker(
    nats_server: NatsServer, anyio_backend: str, no_calls_left: None
) -> AsyncIterator[LiftbridgeBroker]:
    async with LiftbridgeBroker(nats_server.url) as broker:
        yield broker


@pytest.fixture
async def publisher(
    nats_server: NatsServer, broker: LiftbridgeBroker
) -> AsyncIterator[LiftbridgePublisher]:
    async with LiftbridgePublisher(nats_server.url, ack_timeout=SAFETY_NET) as publisher:
        yield publisher


@pytest.fixture(params=["fast path", "documented calls"])
def way_through_nats_py(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with the fast path, and with documented calls of nats-py only."""
    if request.param == "documented calls":
        monkeypatch.setattr(publisher_module, "install_fast_path", lambda *_: None)


@pytest.fixture
async def faults(broker: LiftbridgeBroker, publisher: LiftbridgePublisher) -> AsyncIterator[Faults]:
    async with Faults(broker, publisher) as faults:
        yield faults


@pytest.fixture
async def no_calls_left(anyio_backend: str) -> AsyncIterator[None]:
    """Keep the event loop until the calls over gRPC have ended.

    Brokers come after this and go before: their tasks would be taken for calls.
    """
    yield
    await calls_end()


@pytest.fixture
async def api_broker(
    nats_server: NatsServer, anyio_backend: str, no_calls_left: None
) -> AsyncIterator[LiftbridgeBroker]:
    """A broker that also answers the gRPC API."""
    async with LiftbridgeBroker(nats_server.url, grpc=True) as broker:
        yield broker


@pytest.fixture
async def api(api_broker: LiftbridgeBroker) -> AsyncIterator[LiftbridgeApi]:
    async with LiftbridgeApi(api_broker.address, timeout=SAFETY_NET) as api:
        yield api
