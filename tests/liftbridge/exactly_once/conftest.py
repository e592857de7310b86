"""A stream with optimistic concurrency control on the stand-in, and stores in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from feedapi_client.liftbridge import LiftbridgeApi, LiftbridgePublisher, StreamCursorStore
from feedapi_client.testing.liftbridge import LiftbridgeBroker, NatsServer
from tests.liftbridge.helpers import SAFETY_NET, Faults


@pytest.fixture
async def broker(api_broker: LiftbridgeBroker) -> LiftbridgeBroker:
    """The broker with the gRPC API."""
    await api_broker.create_stream("s", concurrency_control=True)
    return api_broker


@pytest.fixture
async def publisher(
    nats_server: NatsServer, broker: LiftbridgeBroker
) -> AsyncIterator[LiftbridgePublisher]:
    async with LiftbridgePublisher(nats_server.url, ack_timeout=SAFETY_NET) as publisher:
        yield publisher


@pytest.fixture
async def faults(broker: LiftbridgeBroker, publisher: LiftbridgePublisher) -> AsyncIterator[Faults]:
    async with Faults(broker, publisher) as faults:
        yield faults


@pytest.fixture
def make(publisher: LiftbridgePublisher, api: LiftbridgeApi) -> Callable[..., StreamCursorStore]:
    return lambda **options: StreamCursorStore(publisher, api, "s", **options)
