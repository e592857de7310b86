"""The publisher as an ASGI application.

It runs on any ASGI server, under asyncio and trio, and in `httpx.ASGITransport`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import anyio

from feedapi_client.testing.publisher.handler import handle
from feedapi_client.testing.publisher.requests import Request, parse_request
from feedapi_client.testing.publisher.responses import EventStream, Response

if TYPE_CHECKING:
    from feedapi_client.testing.publisher.traffic import RecordedFeed

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CONNECTION = "feedapi.connection"
"""Key of the ASGI scope under which the server of `Publisher.serve` puts its `Connection`.

Faults need it for what ASGI can't express.
"""


class Connection:
    """The socket under a request."""

    def write(self, data: bytes) -> None:
        """Write bytes past the HTTP framing."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection once all is written."""
        raise NotImplementedError

    def reset(self) -> None:
        """Reset the connection."""
        raise NotImplementedError


class FeedApp:
    """The ASGI application of one publisher."""

    def __init__(self, publisher: RecordedFeed) -> None:
        self.publisher = publisher

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        publisher = self.publisher
        request = parse_request(publisher.path, scope, time.monotonic())
        publisher.count_in_flight(1)
        try:
            response = self._respond(request)
            if response.is_plain:
                await _send_head(response, send)
                await send(
                    {"type": "http.response.body", "body": response.body, "more_body": False}
                )
                publisher.bytes_sent += len(response.body)
            else:
                connection = scope.get(CONNECTION)
                await _ResponseSender(publisher, response, receive, send, connection).run()
        finally:
            publisher.count_in_flight(-1)

    def _respond(self, request: Request) -> Response:
        publisher = self.publisher
        with publisher.lock:
            rule = publisher.record_request(request)
            response = handle(publisher, request)
            if rule is not None:
                response = rule.fault(response, request, publisher)
            request.status = response.status
            publisher.counters[f"{request.kind} {response.status}"] += 1
        return response


async def _send_head(response: Response, send: Send) -> None:
    headers = [(name.encode(), value.encode()) for name, value in response.headers.items()]
    length = len(response.body) if response.is_plain else response.content_length
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})


class _ResponseSender:
    """Sends a response that takes time or ends badly. Stops as soon as the client is gone."""

    def __init__(
        self,
        publisher: RecordedFeed,
        response: Response,
        receive: Receive,
        send: Send,
        connection: Connection | None,
    ) -> None:
        self.publisher = publisher
        self.response = response
        self.receive = receive
        self.send = send
        self._connection = connection

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._cancel_on_disconnect, tasks.cancel_scope)
            await self._send_response()
            tasks.cancel_scope.cancel()

    async def _cancel_on_disconnect(self, scope: anyio.CancelScope) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def _send_response(self) -> None:
        response = self.response
        await anyio.sleep(response.delay)
        if response.raw is not None:
            self._require_connection().write(response.raw)
            await self._end("close")
            return
        if response.send_head:
            await _send_head(response, self.send)
            await self._send_pieces(response.body)
        if response.stream is not None:
            await self._send_stream(response.stream)
        if response.endless is not None:
            for piece in response.endless():
                await self._send_piece(piece)
        await self._end(response.ending)

    async def _send_pieces(self, body: bytes) -> None:
        size = self.response.piece_size or max(len(body), 1)
        for at in range(0, len(body), size):
            await self._send_piece(body[at : at + size])
            if self.response.piece_size:
                await anyio.sleep(self.response.interval)

    async def _send_piece(self, piece: bytes) -> None:
        await self.send({"type": "http.response.body", "body": piece, "more_body": True})
        self.publisher.bytes_sent += len(piece)
        await anyio.lowlevel.checkpoint()

    async def _end(self, ending: str) -> None:
        if ending == "complete":
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        if ending == "reset":
            # A reset overtakes what was sent before it, so let the client read that first.
            await anyio.sleep(0.01)
            self._require_connection().reset()
        elif ending == "close":
            self._require_connection().close()
        # The end of the connection ends this task.
        await anyio.sleep_forever()

    def _require_connection(self) -> Connection:
        if self._connection is None:
            raise RuntimeError(
                "this fault breaks the connection, which needs one: use Publisher.serve()"
            )
        return self._connection

    async def _send_stream(self, stream: EventStream) -> None:
        until = float("inf") if stream.seconds is None else anyio.current_time() + stream.seconds
        wakeup = _Wakeup()
        with self.publisher.changes.subscribe(stream.partition, wakeup):
            while True:
                wakeup.clear()
                lines, ended = stream.next_lines()
                for transform in self.response.transforms:
                    lines = transform(lines)
                if lines:
                    await self._send_pieces(lines)
                    continue
                if ended or not await wakeup.wait(until):
                    return


class _Wakeup:
    """Wakes one task from any thread. Several calls before the task runs count as one."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._pending = False
        self._call_soon = _call_soon_threadsafe()

    def __call__(self) -> None:
        if not self._pending:
            self._pending = True
            with suppress(RuntimeError):  # the event loop is gone, and the task with it
                self._call_soon(self._set)

    def clear(self) -> None:
        self._pending = False
        self._event = anyio.Event()

    async def wait(self, until: float) -> bool:
        """Wait for a call. Return False when the clock of the event loop reaches `until`."""
        with anyio.CancelScope(deadline=until):
            await self._event.wait()
            return True
        return False

    def _set(self) -> None:
        self._event.set()


def _call_soon_threadsafe() -> Callable[[Callable[[], None]], object]:
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        import trio

        return cast(
            "Callable[[Callable[[], None]], object]",
            trio.lowlevel.current_trio_token().run_sync_soon,
        )
