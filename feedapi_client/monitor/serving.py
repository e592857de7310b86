"""A monitor on a port of its own: uvicorn in a thread with an event loop of its own.

That way it serves consumers on asyncio and on trio, and it answers while their event loop is
blocked.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Collection, Sequence
from ipaddress import ip_address
from typing import Any, Self

import anyio
import anyio.to_thread
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from feedapi_client.consumer import FeedConsumer
from feedapi_client.monitor.monitor_app import Monitor
from feedapi_client.monitor.snapshots import Snapshots
from feedapi_client.quarantine.quarantine_store import QuarantineStore

_BACKLOG = 128
_SHUTDOWN_SECONDS = 1
_MOST_CONNECTIONS = 64
"""Connections at once. A probe, Prometheus and some pages take a few; each takes a descriptor."""
_SILENT_SECONDS = 5
"""Time in which a connection has to bring a request or read its answer, or it is closed."""
_RECORD_SECONDS = 60.0
"""The event loop of the monitor logs at most one error in this time."""

log = logging.getLogger(__name__)
# uvicorn's own logger, which the application may use too, has a record of each invalid request.
connection_log = logging.getLogger(f"{__name__}.connections")
connection_log.setLevel(logging.ERROR)


class _BoundedConnection(H11Protocol):
    """A connection of uvicorn, whose own timeout counts only behind an answer (0.32 to 0.38)."""

    connections: set[_BoundedConnection]  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give it the place of the oldest one where there is none left.

        Whoever keeps all places, silent or not, keeps no probe out.
        """
        self.logger = connection_log
        super().connection_made(transport)
        self._made, self._answered = self.loop.time(), self.cycle
        self.loop.call_later(_SILENT_SECONDS, self._look)
        if len(self.connections) > _MOST_CONNECTIONS:
            min(self.connections, key=lambda each: each._made)._abort()

    def _look(self) -> None:
        """Close it if since the last look it brought no request, or did not read the answer."""
        cycle = self.cycle
        is_silent = cycle is None or cycle.response_complete
        if self not in self.connections:
            return
        if cycle is self._answered and (is_silent or self.transport.get_write_buffer_size()):
            self._abort()  # also what is closing, and has an answer that is not read
        else:
            self._answered = cycle
            self.loop.call_later(_SILENT_SECONDS, self._look)

    def _abort(self) -> None:
        self.connections.discard(self)  # which the event loop does after those that wait
        self.transport.abort()


def serve(
    *consumers: FeedConsumer,
    host: str = "127.0.0.1",
    port: int = 9464,
    quarantine: QuarantineStore | None = None,
    hosts: Collection[str] | None = None,
) -> MonitorServer:
    """Serve a `Monitor` of the consumers for as long as an ``async with`` block lasts.

    The block is to be entered in the event loop of the consumers, on asyncio or trio. The consumers
    may be opened before or within it. It gives the `MonitorServer`, whose `url` is where it
    listens. The server runs in a thread, with an event loop of its own.

    Arguments:
        consumers: one or more.
        host: the address to listen on. ``"0.0.0.0"`` makes it reachable from other machines, as
            the probes of Kubernetes need it. There is no access control.
        port: 0 for one that is free.
        quarantine: see `Monitor`.
        hosts: names of this machine, where the monitor is asked by one; None for ``localhost`` and
            the machine's own name. Addresses are always accepted.

    Raises, on entry:
        OSError: it can't listen there.
    """
    return MonitorServer(consumers, host, port, quarantine, hosts)


class MonitorServer:
    """A monitor being served; see `serve`."""

    def __init__(
        self,
        consumers: Sequence[FeedConsumer],
        host: str,
        port: int,
        quarantine: QuarantineStore | None,
        hosts: Collection[str] | None,
    ) -> None:
        self._snapshots = Snapshots(consumers, quarantine)
        self._consumers, self._address, self._hosts = consumers, (host, port), hosts
        self.url = ""
        """Where it listens, while it does."""

    async def __aenter__(self) -> Self:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        listener = socket.create_server(self._address, family=family, backlog=_BACKLOG)
        host, port = listener.getsockname()[:2]
        hosts = ("localhost",) if self._hosts is None else self._hosts
        if self._hosts is None and not ip_address(host).is_loopback:
            hosts = ("localhost", socket.gethostname())
        self.url = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._snapshots.push(self._tasks)
        self._monitor = Monitor(*self._consumers, hosts=hosts, _snapshots=self._snapshots)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._monitor,
                http=_BoundedConnection,
                ws="none",
                backlog=_BACKLOG,
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            )
        )
        self._thread = threading.Thread(
            target=asyncio.run,
            args=(_serve(self._server, listener),),
            name=f"feedapi monitor {port}",
            daemon=True,
        )
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.should_exit = True
        try:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._thread.join)
        finally:  # a native cancellation of asyncio ends the wait: the thread ends by itself
            self._monitor.close()
            self.url = ""
            self._tasks.cancel_scope.cancel()
            # Without the exception: the group would wrap it.
            await self._tasks.__aexit__(None, None, None)


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    logged_at = -_RECORD_SECONDS

    def throttled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal logged_at
        # Without a descriptor left, each connection that waits is an error, again and again.
        if loop.time() - logged_at >= _RECORD_SECONDS:
            logged_at = loop.time()
            log.error("the monitor's event loop: %s", context["message"])

    asyncio.get_running_loop().set_exception_handler(throttled)
    await server.serve([listener])
