"""The servers that tests run."""

from __future__ import annotations

import random
import socket
import sys
from contextlib import AsyncExitStack

import pytest

from feedapi_client.liftbridge import LiftbridgeApi
from feedapi_client.testing.liftbridge import (
    LiftbridgeBroker,
    LiftbridgeServer,
    NatsServer,
    free_port,
)


def test_no_two_nodes_of_a_cluster_have_the_same_port() -> None:
    nodes = 500
    assert len(set(LiftbridgeServer("nats://localhost", nodes=nodes).addresses)) == nodes


@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't tell their ports")
def test_no_outgoing_connection_takes_the_port_of_a_server_that_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        outgoing = [socket.create_connection(server.getsockname()) for _ in range(50)]
        lowest = min(connection.getsockname()[1] for connection in outgoing)
        for connection in outgoing:
            connection.close()
    assert all(free_port() < lowest for _ in range(50))


def test_processes_with_the_same_seed_find_different_ports() -> None:
    found = set()
    for _ in range(5):
        random.seed(1)
        found.add(free_port())
    assert len(found) > 1


def test_a_port_that_is_taken_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        taken: int = server.getsockname()[1]
        modules = "feedapi_client.testing.liftbridge.nats_server"
        monkeypatch.setattr(f"{modules}._FIRST_PORT", taken)
        monkeypatch.setattr(f"{modules}._first_outgoing_port", lambda: taken + 1)
        assert free_port() != taken


@pytest.mark.anyio
async def test_a_broker_that_ends_before_its_clients_writes_nothing_to_their_stderr(
    nats_server: NatsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    # Three in ten wrote something before.
    for _ in range(30):
        async with (
            AsyncExitStack() as stack,
            LiftbridgeBroker(nats_server.url, grpc=True) as broker,
        ):
            api = await stack.enter_async_context(LiftbridgeApi(broker.address))
            await api.cluster()
    assert capfd.readouterr().err == ""
