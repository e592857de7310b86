"""What is checked before a publisher over gRPC asks a broker."""

from __future__ import annotations

from typing import Any

import pytest

from feedapi_client.liftbridge import (
    LiftbridgeError,
    LiftbridgeGrpcPublisher,
)
from feedapi_client.testing.liftbridge import LiftbridgeBroker

pytestmark = pytest.mark.anyio


def test_addresses_and_limits_are_needed() -> None:
    wrong: list[dict[str, Any]] = [{"addresses": []}, {"max_in_flight": 0}, {"ack_timeout": 0}]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"needs the address|must be positive"):
            LiftbridgeGrpcPublisher(**arguments)


async def test_it_has_to_be_open(api_broker: LiftbridgeBroker) -> None:
    with pytest.raises(LiftbridgeError, match="async with"):
        await LiftbridgeGrpcPublisher(api_broker.address).publish("s", b"x")


async def test_a_header_that_the_broker_overwrites_is_refused(api_broker: LiftbridgeBroker) -> None:
    async with LiftbridgeGrpcPublisher(api_broker.address) as publisher:
        with pytest.raises(ValueError, match="subject"):
            await publisher.publish("s", b"x", headers={"subject": b"x"})


async def test_keys_are_as_many_as_values(api_broker: LiftbridgeBroker) -> None:
    async with LiftbridgeGrpcPublisher(api_broker.address) as publisher:
        with pytest.raises(ValueError, match="not 3 values, 2 keys"):
            await publisher.publish_many("s", [b"1", b"2", b"3"], keys=[b"k"] * 2)
