"""What becomes of the answers of a broker."""

from __future__ import annotations

import grpc
import grpc.aio

from feedapi_client.liftbridge import BrokerUnavailableError
from feedapi_client.liftbridge.brokers import Brokers


def test_a_broker_that_can_not_read_what_it_lost_is_asked_again() -> None:
    text = "failed to read message headers: segment not found"
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, metadata, metadata, details=text)
    assert isinstance(Brokers(["localhost:1"], 1).translate("s", error), BrokerUnavailableError)
