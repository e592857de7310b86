"""The servers that tests run."""

from __future__ import annotations

import random
import signal
import socket
import sys

import pytest

from feedapi_client.liftbridge import LiftbridgeApi, LiftbridgePublisher
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer, free_port
from tests.liftbridge.broker import SETTINGS, require_liftbridge
from tests.liftbridge.helpers import SAFETY_NET, eventually


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
        modules = "feedapi_client.testing.liftbridge"
        monkeypatch.setattr(f"{modules}._FIRST_PORT", taken)
        monkeypatch.setattr(f"{modules}._first_outgoing_port", lambda: taken + 1)
        assert free_port() != taken


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_broker_that_crashes_is_started_again_with_its_data(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    require_liftbridge()
    with LiftbridgeServer(nats_server.url, settings=SETTINGS) as server:
        async with (
            LiftbridgeApi(server.address, timeout=SAFETY_NET) as api,
            LiftbridgePublisher(nats_server.url, ack_timeout=SAFETY_NET) as publisher,
        ):
            await api.create_stream("s")
            for crashes in (1, 2):
                await publisher.publish("s", b"%d" % crashes)
                server.crash()
                await eventually(lambda count=crashes: len(server.crashes) == count)
                # It answers again, and has what it had.
                assert (await api.partition_metadata("s")).newest_offset == crashes - 1
    started_again = "node 0 ended by itself (2), and is started again:"
    assert any(started_again in message for message in caplog.messages)


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_broker_that_was_stopped_stays_so(nats_server: NatsServer) -> None:
    require_liftbridge()
    with LiftbridgeServer(nats_server.url) as server:
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            server.kill(number=number)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", int(server.address.split(":")[1])))
            server.start()
    assert not server.crashes
