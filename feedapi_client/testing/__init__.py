"""Test tools for consumers and cursor stores, shipped with the library.

`Publisher` is a FeedAPI publisher in memory, `faults` is what can go wrong at it, and
`CursorStoreContract` is the test suite of cursor stores.

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
    from feedapi_client.testing.contracts import (
        AdministrableStoreContract,
        CursorStoreContract,
        DoneStoreContract,
        LeaseStoreContract,
    )
    from feedapi_client.testing.liftbridge import LiftbridgeServer as LiftbridgeServer
    from feedapi_client.testing.liftbridge import NatsServer as NatsServer
    from feedapi_client.testing.publisher import (
        Fault,
        FaultRule,
        Publisher,
        Quirks,
        Request,
        Response,
        faults,
    )
    from feedapi_client.testing.publisher.server import Serving

__all__ = [
    "AdministrableStoreContract",
    "CursorStoreContract",
    "DoneStoreContract",
    "Fault",
    "FaultRule",
    "LeaseStoreContract",
    "Publisher",
    "Quirks",
    "Request",
    "Response",
    "Serving",
    "faults",
]

# LiftbridgeServer and NatsServer are public too. They are not in __all__, because a star import
# must not ask for the extra ``liftbridge``.
_MODULES = {
    "AdministrableStoreContract": "contracts",
    "CursorStoreContract": "contracts",
    "DoneStoreContract": "contracts",
    "LeaseStoreContract": "contracts",
    "Fault": "publisher",
    "FaultRule": "publisher",
    "LiftbridgeServer": "liftbridge",
    "NatsServer": "liftbridge",
    "Publisher": "publisher",
    "Quirks": "publisher",
    "Request": "publisher",
    "Response": "publisher",
    "Serving": "publisher.server",
    "faults": "publisher",
}


if not TYPE_CHECKING:  # a type checker knows the names from above, and no others

    def __getattr__(name: str) -> Any:
        # Names are loaded at their first use. The pytest plugin is in this package and must cost
        # nothing, the contracts need pytest, and the server needs uvicorn.
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
