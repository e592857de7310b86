"""The publisher on a port: uvicorn in a thread with an event loop of its own.

That way it serves asyncio, trio and plain code alike. Needs the extra ``testing``.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from typing import Any, Protocol

from feedapi_client.testing.publisher.asgi import CONNECTION

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState
except ImportError as missing:
    raise ImportError(
        "serving a Publisher on a port needs uvicorn: pip install 'feedapi-client[testing]'"
    ) from missing

_KEEP_ALIVE_SECONDS = 600
# Requests end by themselves once their connection is gone; this is only a safety net.
_CLOSE_GRACE_SECONDS = 10.0


class _FeedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which also passes its transport to the application."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio sets this only on sockets that were made with an explicit protocol number.
        # Without it each response waits 40 ms for an ACK.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        app = self.app

        async def with_connection(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, CONNECTION: transport}, receive, send)

        self.app = with_connection


class Served(Protocol):
    """A feed as an ASGI application, which is told its URL while it is served."""

    url: str | None
    path: str

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...


class Serving:
    """A publisher being served, as `Publisher.serve` returns it.

    It is a context manager, plain and async, that returns the feed's URL. Leaving the block closes
    every connection, held-open streams included, and ends the thread. Entering and leaving block
    the caller for a few milliseconds, also in async code.
    """

    def __init__(self, publisher: Served, host: str, port: int) -> None:
        self.url = ""
        self._publisher = publisher
        self._address = (host, port)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def start(self) -> str:
        """Listen, and return the URL. Raises OSError when the port is taken."""
        listener = socket.create_server(self._address, backlog=2048)
        host, port = listener.getsockname()[:2]
        self.url = self._publisher.url = f"http://{host}:{port}{self._publisher.path}"
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        # The socket listens already, so there is no need to wait for the thread.
        name = f"feedapi publisher {port}"
        self._thread = threading.Thread(target=self._run, args=(listener,), name=name, daemon=True)
        self._thread.start()
        return self.url

    def stop(self) -> None:
        """Close all connections and the port, and end the thread. May be called twice."""
        if self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._thread = None
        if self._publisher.url == self.url:
            self._publisher.url = None

    def __enter__(self) -> str:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def __aenter__(self) -> str:
        return self.start()

    async def __aexit__(self, *exc: object) -> None:
        self.stop()

    def _run(self, listener: socket.socket) -> None:
        try:
            self._loop.run_until_complete(self._serve(listener))
        finally:
            self._loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        config = uvicorn.Config(
            self._publisher,
            http=_FeedProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        config.load()
        loop, state = self._loop, ServerState()
        server = await loop.create_server(
            lambda: _FeedProtocol(config, state, {}, loop), sock=listener
        )
        await self._stop.wait()
        with suppress(NotImplementedError):
            # asyncio leaves a connection unclosed that is being accepted while its server closes:
            # accept no more, and close then.
            loop.remove_reader(listener.fileno())
        await _close_connections(state)
        server.close()
        await _close_connections(state)
        await server.wait_closed()


async def _close_connections(state: ServerState) -> None:
    """Close every connection, and wait until their requests have ended.

    This includes connections that were just being accepted.
    """
    this = asyncio.current_task()
    deadline = asyncio.get_running_loop().time() + _CLOSE_GRACE_SECONDS
    while (tasks := asyncio.all_tasks() - {this}) or state.connections:
        for protocol in tuple(state.connections):
            protocol.transport.abort()
        if asyncio.get_running_loop().time() > deadline:
            for task in tasks:
                task.cancel()
        # Requests are not cancelled before the deadline: uvicorn logs a cancelled one as an error.
        await asyncio.sleep(0)
