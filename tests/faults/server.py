"""A raw TCP server that sends scripted bytes, in a thread of its own.

It speaks just enough HTTP to read a request. What it sends is a list of steps: bytes, pauses, and
ways to end the connection. So it can send what no HTTP library would.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from tests.client.wire import Request

_MAX_HEAD = 1 << 20


@dataclass(frozen=True)
class Reset:
    """End the connection with a TCP reset. Bytes sent before arrive first."""


@dataclass(frozen=True)
class Close:
    """End the connection in good order."""


@dataclass(frozen=True)
class Hold:
    """Send nothing more, until the client closes the connection."""


@dataclass(frozen=True)
class Repeat:
    """Send the bytes again and again, until the client closes the connection.

    `pause` is in seconds.
    """

    data: bytes
    pause: float = 0.0


@dataclass(frozen=True)
class Slowly:
    """Send the bytes in small pieces, with a pause after each."""

    data: bytes
    piece: int = 16
    pause: float = 0.001


Step = bytes | Reset | Close | Hold | Repeat | Slowly
Script = Sequence[Step]


Reply = Callable[[Request], Script]


@dataclass
class Site:
    """What answers below one path, and the requests that came to it."""

    reply: Reply
    path: str
    url: str
    requests: list[Request] = field(default_factory=list)


class Connections:
    """The connections of a server, each served by a task. `end` leaves none of them open."""

    def __init__(
        self, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    ) -> None:
        self._serve = serve
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not a coroutine: a task that is cancelled before it began could not close the connection.
        task = asyncio.create_task(self._served(reader, writer))
        self._open[task] = writer

    async def end(self, server: asyncio.Server) -> None:
        """Close the server, and cut its connections, also those that were accepted a moment ago."""
        # asyncio leaves a connection unclosed that is being accepted while its server closes:
        # accept no more, cut those, and close then.
        for listener in server.sockets:
            asyncio.get_running_loop().remove_reader(listener.fileno())
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others & self._open.keys():
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        for writer in self._open.values():
            writer.transport.abort()
        server.close()
        await asyncio.sleep(0)  # a transport closes its socket in the next turn of the loop

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        finally:
            writer.transport.abort()


class RawServer:
    """The server. A context manager; `add` may be called while it runs, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._sites: dict[str, Site] = {}
        self._numbers = itertools.count()
        self._socket = _bound()
        self._listening = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="raw server", daemon=True)
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        self._thread.start()
        self._listening.wait(30)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def add(self, reply: Reply) -> Site:
        """Answer requests below a new path with `reply`."""
        path = f"/{next(self._numbers)}/feed"
        site = self._sites[path] = Site(reply, path, f"http://127.0.0.1:{self.port}{path}")
        return site

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        connections = Connections(self._connection)
        server = await asyncio.start_server(
            connections.accept, sock=self._socket, limit=_MAX_HEAD, backlog=1024
        )
        self._listening.set()
        await self._stop.wait()
        await connections.end(server)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                request = _parsed(await reader.readuntil(b"\r\n\r\n"))
                site = self._site(request)
                site.requests.append(request)
                for step in site.reply(request):
                    await _send(step, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, _EndedError):
            pass

    def _site(self, request: Request) -> Site:
        number, _, _ = request.path.lstrip("/").partition("/")
        return self._sites[f"/{number}/feed"]


class _EndedError(Exception):
    """The script ended the connection."""


def _bound(port: int = 0) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _parsed(head: bytes) -> Request:
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return Request(first.split(" ")[1], {name.lower(): value.strip() for name, _, value in pairs})


async def _send(step: Step, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    match step:
        case bytes():
            writer.write(step)
            await writer.drain()
        case Slowly(data, piece, pause):
            for start in range(0, len(data), piece):
                writer.write(data[start : start + piece])
                await writer.drain()
                await asyncio.sleep(pause)
        case Repeat(data, pause):
            while not reader.at_eof():
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(pause)
            raise _EndedError
        case Hold():
            await reader.read()
            raise _EndedError
        case Close():
            writer.close()
            raise _EndedError
        case Reset():
            await _reset(writer)
            raise _EndedError


async def _reset(writer: asyncio.StreamWriter) -> None:
    # Let the client read what was sent: a reset discards what it has not received yet.
    while writer.transport.get_write_buffer_size():  # noqa: ASYNC110 - a transport has no event
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    if writer.is_closing():
        return  # the client was first
    # Lingering for zero seconds makes the kernel send RST in place of FIN.
    writer.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    writer.transport.abort()


class Gate:
    """A port that forwards connections to another one while it is open, and refuses them else.

    A context manager; closed at first.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._socket = _bound()  # bound, but not listening: the kernel refuses connections
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread: threading.Thread | None = None
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self._socket.close()
        self._loop.close()

    def open(self) -> None:
        """Forward connections from now on. May be called twice."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._forward, name="gate", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Cut the connections, and refuse new ones. May be called twice."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._thread = None
            self._socket = _bound(self.port)

    def _forward(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        connections = Connections(self._connection)
        server = await asyncio.start_server(connections.accept, sock=self._socket)
        await self._stop.wait()
        await connections.end(server)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        finally:
            far_writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()
