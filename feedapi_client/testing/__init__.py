"""What tests of consumers and cursor stores need; ships with the library. See `Publisher`, `faults` and `CursorStoreContract`.

::

    from feedapi_client.testing import Publisher

    publisher = Publisher(partitions=2)
    publisher.append(0, {"entity": "a", "n": 1})
    with publisher.serve() as url:
        publisher.fail(503, times=2)
        my_consumer(url)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feedapi_client.testing import faults
    from feedapi_client.testing.exchange import Request, Response
    from feedapi_client.testing.faults import Fault, FaultRule
    from feedapi_client.testing.liftbridge import BrokerFault as BrokerFault
    from feedapi_client.testing.liftbridge import LiftbridgeBroker as LiftbridgeBroker
    from feedapi_client.testing.liftbridge import NatsServer as NatsServer
    from feedapi_client.testing.publisher import Publisher
    from feedapi_client.testing.server import Serving
    from feedapi_client.testing.store_contract import (
        AdministrableStoreContract,
        CursorStoreContract,
    )
    from feedapi_client.testing.wire import Quirks

__all__ = [
    "AdministrableStoreContract",
    "CursorStoreContract",
    "Fault",
    "FaultRule",
    "Publisher",
    "Quirks",
    "Request",
    "Response",
    "Serving",
    "faults",
]

# BrokerFault, LiftbridgeBroker and NatsServer are public as well; not in __all__, since a star import must not ask for the extra.
_HOMES = {
    "AdministrableStoreContract": "store_contract",
    "BrokerFault": "liftbridge",
    "CursorStoreContract": "store_contract",
    "Fault": "faults",
    "FaultRule": "faults",
    "LiftbridgeBroker": "liftbridge",
    "NatsServer": "liftbridge",
    "Publisher": "publisher",
    "Quirks": "wire",
    "Request": "exchange",
    "Response": "exchange",
    "Serving": "server",
}


def __getattr__(name: str) -> Any:
    # Lazily: the pytest plugin lives in this package and must cost nothing, the contract needs pytest, the server needs uvicorn.
    if name == "faults":
        return import_module("feedapi_client.testing.faults")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
