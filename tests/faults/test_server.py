"""What the raw server and its gate leave behind."""

from __future__ import annotations

import gc
import socket
import threading
import time
from contextlib import suppress

from tests.faults.server import Gate, RawServer

CLIENTS = 3
TIMES = 20


def test_no_connection_stays_open_that_is_accepted_while_a_gate_closes(server: RawServer) -> None:
    ended = threading.Event()

    def connect() -> None:
        while not ended.is_set():
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", gate.port), timeout=1),
            ):
                pass

    with Gate(server.port) as gate:
        clients = [threading.Thread(target=connect) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            for _ in range(TIMES):
                gate.open()
                time.sleep(0.01)
                gate.close()
        finally:
            ended.set()
            for client in clients:
                client.join()
    gc.collect()  # an unclosed connection warns when it is collected, and that fails the test
