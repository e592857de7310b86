"""A NATS server and a real broker for all tests, a stream and clients for each test.

nats-py runs on asyncio only, and so do these tests.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import pytest

from feedapi_client.liftbridge import LiftbridgePublisher
from feedapi_client.liftbridge import message_publisher as publisher_module
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from tests.conftest import BROKER_CRASH
from tests.liftbridge.broker import SETTINGS, Broker, open_broker, require_liftbridge
from tests.liftbridge.helpers import SAFETY_NET, calls_end
from tests.liftbridge.middle import Middle, expire_withheld, man_in_the_middle

_numbers = itertools.count()
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


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
async def one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """One event loop for all tests of a file, which outlives the calls over gRPC."""
    yield
    await calls_end()


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def real_server(nats_server: NatsServer) -> Iterator[LiftbridgeServer]:
    require_liftbridge()
    with LiftbridgeServer(nats_server.url, settings=SETTINGS) as server:
        yield server


@pytest.fixture
def name() -> str:
    """A name for a stream that no other test has."""
    return f"stream-{next(_numbers)}"


@pytest.fixture
async def broker(
    real_server: LiftbridgeServer, anyio_backend: str, name: str
) -> AsyncIterator[Broker]:
    async with open_broker(real_server, name) as broker:
        yield broker


@pytest.fixture
def impatient(broker: Broker) -> None:
    """Repeat soon what is lost while the broker is down."""
    broker.publisher.ack_timeout = 1.0


@pytest.fixture
async def middle(broker: Broker) -> AsyncIterator[Middle]:
    """A man in the middle between the broker and its publisher."""
    async with (
        man_in_the_middle(broker.nats_url) as middle,
        LiftbridgePublisher(middle.url, ack_timeout=SAFETY_NET) as broker.publisher,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(expire_withheld, middle, broker.publisher)
        yield middle
        tasks.cancel_scope.cancel()


@pytest.fixture(params=["fast path", "documented calls"])
def way_through_nats_py(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with the fast path, and with documented calls of nats-py only."""
    if request.param == "documented calls":
        monkeypatch.setattr(publisher_module, "install_fast_path", lambda *_: None)


@pytest.fixture
def feed(feedapi_publisher: Publisher) -> Publisher:
    """A feed of twenty events."""
    feedapi_publisher.extend(0, [{"n": n} for n in range(20)])
    return feedapi_publisher
