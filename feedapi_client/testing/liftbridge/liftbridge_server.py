"""A real Liftbridge, as processes on loopback.

It is a Go program without wheels. `liftbridge_path` says where it is looked for; one way to build
it is ``go install github.com/liftbridge-io/liftbridge@v1.9.0``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
from gufo.liftbridge import api_pb2
from gufo.liftbridge.api_pb2_grpc import APIStub

from feedapi_client.testing.liftbridge.nats_server import free_ports

LIFTBRIDGE_VERSION = "v1.9.0"
LIFTBRIDGE_FOLDER = "FEEDAPI_LIFTBRIDGE"
"""The environment variable that names the folder of the program."""
_START_SECONDS = 60.0  # a safety net: it starts within two seconds on an idle machine
_STOP_SECONDS = 20.0
# Liftbridge 1.9.0 panics at times where it starts and led a replicated partition before: it begins
# to replicate before its API is set up, which replication uses (partition.go, startReplicating).
_START_ATTEMPTS = 5
_PANIC = 2  # the exit code of a Go program
_RESTARTS = 20
"""A broker that crashes more often is not started again: then it is no rare defect."""
_SHOWN = 4000  # characters of a log's end
_CRASH = re.compile(r"^(panic: |fatal error: |unexpected fault address |SIG[A-Z]+: )", re.MULTILINE)
"""The first line of what the Go runtime writes when a program crashes."""

log = logging.getLogger(__name__)


def crash_of(text: str) -> str:
    """Return the beginning of the last Go crash in a log, "" where there is none.

    The end of such a log is a list of goroutines, and does not say what happened.
    """
    began, last = 0, -_SHOWN
    for found in _CRASH.finditer(text):
        if found.start() - last >= _SHOWN:  # else a further line of the same crash
            began = found.start()
        last = found.start()
    return text[began : began + _SHOWN] if last >= 0 else ""


class LiftbridgeServer:
    """One or several liftbridge processes that form a cluster. Use it in `with`.

    Nodes are numbered from 0. They keep their ports and data when they are stopped and started
    again. All data is removed at the end. `nats_url` is the argument. A node that panics while it
    starts is started again; `panics` says how often that happened.

    A node that ends by itself later is started again, too, as by the supervisor of a deployment:
    Liftbridge 1.9.0 crashes at times where two of its threads end a segment at once. `crashes` has
    the beginning of what each of these wrote. One that was stopped stays so until `start`.

    Arguments:
        nats_url: where NATS listens, as `NatsServer.url`.
        nodes: the number of brokers.
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
        self._ports = free_ports(nodes)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = ""
        self._lock = threading.RLock()
        """Held while a node is started or stopped."""
        self.panics = 0
        self.crashes: list[str] = []

    def __enter__(self) -> LiftbridgeServer:
        self._folder = tempfile.mkdtemp(prefix="feedapi-liftbridge-")
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
                words = self._last_words(node, code)
                log.error("liftbridge ended by itself (%d):\n%s", code, words)
            self.kill(node)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def address(self) -> str:
        """The gRPC API of the first node as ``host:port``."""
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        """The gRPC APIs of all nodes."""
        return [f"127.0.0.1:{port}" for port in self._ports]

    def log(self, node: int = 0) -> str:
        """Return what a node has written to its log."""
        return self._file(node, "log").read_text(errors="replace")

    def data(self, node: int = 0) -> Path:
        """Return the folder of a node's data. It may be changed while the node is stopped."""
        return self._file(node, "data")

    def node_of(self, server_id: str) -> int:
        """Return the number of the node with that id, as in a partition's metadata."""
        return int(server_id.removeprefix("node-"))

    def start(self, node: int | None = None) -> None:
        """Start one node, or all that don't run, and wait until they answer.

        Raises:
            RuntimeError: the program is missing, or ended, or did not answer in time.
        """
        with self._lock:
            nodes = range(len(self._ports)) if node is None else [node]
            started = [n for n in nodes if n not in self._processes]
            for n in started:
                self._processes[n] = self._launch(n)
            for n in started:
                self._finish_start(n)
                self._supervise(n)

    def crash(self, node: int = 0) -> None:
        """Let a node end by itself, with the list of its goroutines, as its own defects do."""
        self._processes[node].send_signal(signal.SIGQUIT)

    def interrupt(self, node: int = 0) -> None:
        """Stop a node with SIGINT, the signal on which it shuts down in order, and wait for it."""
        self._stop(node, signal.SIGINT)

    def terminate(self, node: int = 0) -> None:
        """Stop a node with SIGTERM, which it does not handle, and wait for it."""
        self._stop(node, signal.SIGTERM)

    def kill(self, node: int = 0) -> None:
        """Kill a node, as in a crash."""
        self._stop(node, signal.SIGKILL)

    def _stop(self, node: int, number: signal.Signals) -> None:
        with self._lock:
            process = self._processes.pop(node)
        process.send_signal(number)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _launch(self, node: int) -> subprocess.Popen[bytes]:
        peers = [f"node-{n}" for n in range(len(self._ports))]
        settings = {
            "listen": f"127.0.0.1:{self._ports[node]}",
            "data.dir": str(self.data(node)),
            "nats.servers": [self.nats_url],
            "clustering.server.id": peers[node],
            "clustering.namespace": Path(self._folder).name,
            "clustering.raft.bootstrap.peers": peers,
            "logging.level": "info",
            **self._settings,
        }
        configuration = self._file(node, "yaml")
        configuration.write_text(json.dumps(settings))
        with self._file(node, "log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603
                [liftbridge_path(), "--config", str(configuration)],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _supervise(self, node: int) -> None:
        """Start a node again when it ends by itself, in a thread that waits for that."""
        process = self._processes[node]
        threading.Thread(target=self._await_end, args=(node, process), daemon=True).start()

    def _await_end(self, node: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._lock:
            if self._processes.get(node) is not process:
                return  # it was stopped
            self.crashes.append(self._last_words(node, code))
            again = len(self.crashes) <= _RESTARTS
            what = f"node {node} ended by itself ({code}), and is {'' if again else 'not '}started"
            log.error("liftbridge %s again:\n%s", what, self.crashes[-1])
            if again:
                self._restart(node)

    def _restart(self, node: int) -> None:
        self._processes[node] = self._launch(node)
        try:
            self._finish_start(node)
        except RuntimeError:
            log.exception("liftbridge node %d did not start again", node)
        else:
            self._supervise(node)

    def _last_words(self, node: int, code: int | None) -> str:
        text = self.log(node)
        return (crash_of(text) if code == _PANIC else "") or text[-_SHOWN:]

    def _file(self, node: int, suffix: str) -> Path:
        return Path(self._folder) / f"node-{node}.{suffix}"

    def _channel(self, node: int) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(self.addresses[node])
        return grpc.secure_channel(self.addresses[node], self._credentials)

    def _finish_start(self, node: int) -> None:
        for left in reversed(range(_START_ATTEMPTS)):
            try:
                self._wait_until_it_answers(node)
            except RuntimeError:
                if not left or self._processes[node].poll() != _PANIC:
                    raise
            else:
                return
            self.panics += 1
            self._processes[node] = self._launch(node)

    def _wait_for_cursors(self) -> None:
        """Wait for the stream of cursors, which a new cluster creates after its first answers."""
        if not self._settings.get("cursors.stream.partitions"):
            return
        deadline = time.monotonic() + _START_SECONDS
        with self._channel(0) as channel:
            stub = APIStub(channel)  # type: ignore[no-untyped-call]
            request = api_pb2.FetchMetadataRequest(streams=["__cursors"])
            while time.monotonic() < deadline:
                streams = stub.FetchMetadata(request, timeout=_START_SECONDS).streamMetadata
                if any(stream.partitions for stream in streams):
                    return
                time.sleep(0.05)
        raise RuntimeError(f"liftbridge has no stream of cursors after {_START_SECONDS:g} s")

    def _wait_until_it_answers(self, node: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        with self._channel(node) as channel:
            stub = APIStub(channel)  # type: ignore[no-untyped-call]
            while time.monotonic() < deadline and self._processes[node].poll() is None:
                try:
                    stub.FetchMetadata(api_pb2.FetchMetadataRequest(), timeout=1)
                except grpc.RpcError:
                    time.sleep(0.05)
                else:
                    if self._processes[node].poll() is None:
                        return
        code = self._processes[node].poll()
        what = f"did not start within {_START_SECONDS:g} s" if code is None else f"ended ({code})"
        raise RuntimeError(f"liftbridge {what}:\n{self._last_words(node, code)}")


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
