"""A monitor on a port of its own: uvicorn in a thread with an event loop of its own.

That way it serves consumers on asyncio and on trio, and it answers while their event loop is
blocked.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from typing import Self

import anyio
import anyio.to_thread
import uvicorn

from feedapi_client.consumer import FeedConsumer
from feedapi_client.monitor.monitor_app import Monitor
from feedapi_client.monitor.snapshots import Snapshots
from feedapi_client.quarantine.quarantine_store import QuarantineStore

_SHUTDOWN_SECONDS = 1


def serve(
    *consumers: FeedConsumer,
    host: str = "127.0.0.1",
    port: int = 9464,
    quarantine: QuarantineStore | None = None,
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

    Raises, on entry:
        OSError: it can't listen there.
    """
    return MonitorServer(consumers, host, port, quarantine)


class MonitorServer:
    """A monitor being served; see `serve`."""

    def __init__(
        self,
        consumers: Sequence[FeedConsumer],
        host: str,
        port: int,
        quarantine: QuarantineStore | None,
    ) -> None:
        self._snapshots = Snapshots(consumers, quarantine)
        self._consumers, self._address = consumers, (host, port)
        self.url = ""
        """Where it listens, while it does."""

    async def __aenter__(self) -> Self:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        listener = socket.create_server(self._address, family=family)
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._snapshots.push(self._tasks)
        self._monitor = Monitor(*self._consumers, _snapshots=self._snapshots)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._monitor,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            )
        )
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve([listener])),
            name=f"feedapi monitor {port}",
            daemon=True,
        )
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.should_exit = True
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.join)
        self._monitor.close()
        self.url = ""
        self._tasks.cancel_scope.cancel()
        # Without the exception: the group would wrap it.
        await self._tasks.__aexit__(None, None, None)
