"""The servers that tests run."""

from __future__ import annotations

from feedapi_client.testing.liftbridge import LiftbridgeServer


def test_no_two_nodes_of_a_cluster_have_the_same_port() -> None:
    nodes = 500
    assert len(set(LiftbridgeServer("nats://localhost", nodes=nodes).addresses)) == nodes
