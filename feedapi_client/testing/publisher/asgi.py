"""Responses as an ASGI application sends them, on any server, under asyncio and trio."""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from itertools import repeat
from typing import TYPE_CHECKING, Any

import anyio

from feedapi_client.testing.publisher.messages import EventStream, Response

if TYPE_CHECKING:
    import asyncio

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CONNECTION = "feedapi.connection"
"""Key of the ASGI scope under which the server of `Publisher.serve` puts its transport.

Faults need it for what ASGI can't express.
"""
LOOK_SECONDS = 0.01
"""How often a stream looks for new lines."""


async def send_response(
    response: Response, receive: Receive, send: Send, connection: asyncio.Transport | None
) -> None:
    """Send a response until its end, or until the client is gone."""
    sender = _Sender(response, send, connection)
    if response.is_plain:
        await sender.head(len(response.body))
        await sender.piece(response.body, more=False)
        return
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_on_disconnect, receive, tasks.cancel_scope)
        await sender.run()
        tasks.cancel_scope.cancel()


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


class _Sender:
    def __init__(
        self, response: Response, send: Send, connection: asyncio.Transport | None
    ) -> None:
        self.response = response
        self._send = send
        self._connection = connection

    async def head(self, length: int | None) -> None:
        headers = [(name.encode(), text.encode()) for name, text in self.response.headers.items()]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        status = self.response.status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def piece(self, piece: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})

    async def run(self) -> None:
        response = self.response
        await anyio.sleep(response.delay)
        if response.send_head:
            await self.head(response.content_length)
            await self._body(response.body)
        if response.stream is not None:
            await self._follow(response.stream)
        for piece in repeat(response.endless) if response.endless else ():
            await self.piece(piece)
            await anyio.lowlevel.checkpoint()
        await self._end()

    async def _follow(self, stream: EventStream) -> None:
        until = float("inf") if stream.seconds is None else anyio.current_time() + stream.seconds
        while True:
            lines, ended = stream.next_lines()
            if lines:
                await self._body(lines)
            elif ended or (left := until - anyio.current_time()) <= 0:
                return
            else:
                await anyio.sleep(min(LOOK_SECONDS, left))

    async def _body(self, lines: bytes) -> None:
        size = self.response.piece_size or max(len(lines), 1)
        for at in range(0, len(lines), size):
            await self.piece(lines[at : at + size])
            await anyio.sleep(self.response.interval)

    async def _end(self) -> None:
        ending = self.response.ending
        if ending == "complete":
            await self.piece(b"", more=False)
            return
        if ending != "hang":
            if self._connection is None:
                raise RuntimeError(
                    "this fault breaks the connection, which needs one: use Publisher.serve()"
                )
            if ending == "garbage":
                self._connection.write(b"this is no chunk size\r\n")
            if ending == "reset":
                # A reset overtakes what was sent before it, so let the client read that first.
                await anyio.sleep(0.01)
                # Lingering for zero seconds makes the kernel send RST in place of FIN.
                linger = struct.pack("ii", 1, 0)
                connected = self._connection.get_extra_info("socket")
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self._connection.abort()
            else:
                self._connection.close()
        # The end of the connection ends this task.
        await anyio.sleep_forever()
