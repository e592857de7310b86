"""`Publisher`, and the ASGI application that it is.

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
from feedapi_client.testing.publisher.traffic import RecordedFeed

if TYPE_CHECKING:
    from feedapi_client.testing.publisher.server import Serving
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CONNECTION = "feedapi.connection"
"""Key of the ASGI scope under which the server of `Publisher.serve` puts its `ServerConnection`.

Faults need it for what ASGI can't express.
"""


class ServerConnection:
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
            limit = publisher.rate_limit
            refusal = None if limit is None else limit.refusal(request.time)
            rule = publisher.record_request(request, refused=refusal is not None)
            response = refusal or handle(publisher, request)
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
        connection: ServerConnection | None,
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
        held_back = self.publisher.quirks.stream_buffer if response.stream is not None else 0
        if response.send_head and not held_back:
            await _send_head(response, self.send)
            await self._send_pieces(response.body)
        if response.stream is not None:
            if held_back:
                await self._send_held_back(response.stream, held_back)
            else:
                await self._send_stream(response.stream, self._send_pieces)
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

    def _require_connection(self) -> ServerConnection:
        if self._connection is None:
            raise RuntimeError(
                "this fault breaks the connection, which needs one: use Publisher.serve()"
            )
        return self._connection

    async def _send_held_back(self, stream: EventStream, size: int) -> None:
        """Send a stream as a proxy does that waits for so many bytes, or for the end."""
        held, begun = [self.response.body], False

        async def hold(lines: bytes) -> None:
            held.append(lines)
            if sum(map(len, held)) >= size:
                await pass_on()

        async def pass_on() -> None:
            nonlocal begun
            if not begun:
                await _send_head(self.response, self.send)
            begun, lines = True, b"".join(held)
            held.clear()
            await self._send_pieces(lines)

        await self._send_stream(stream, hold)
        await pass_on()

    async def _send_stream(
        self, stream: EventStream, send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        until = float("inf") if stream.seconds is None else anyio.current_time() + stream.seconds
        wakeup = _Wakeup()
        with self.publisher.changes.subscribe(stream.partition, wakeup):
            while True:
                wakeup.clear()
                lines, ended = stream.next_lines()
                for transform in self.response.transforms:
                    lines = transform(lines)
                if lines:
                    await send(lines)
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


class Publisher(RecordedFeed):
    """A feed in memory, in any of the three dialects.

    The page of `feedapi_client.testing.publisher` shows the whole interface on one screen.

    Arguments:
        partitions: The number of partitions, or their ids.
        dialect: ``v1``, ``v2-draft`` or ``v2-token``.
        page_size: Maximum number of events in a response, unless the request has a hint.
        checkpoint_every: Number of events between two checkpoints.
        vary: Let two requests from one cursor differ: page size, checkpoints, and how entities are
            interleaved. The order within an entity is kept.
        seed: Make `vary` reproducible. Implies `vary`.
        stream: Offer streamed responses.
        exactly_once: What discovery says about it.
        filters: Filters of dialect v2-draft: names of payload fields, or functions by name.
        key: Finds the entity of a payload. By default the field ``entity``, else ``id``. Payloads
            without either all count as one entity.
        quirks: Deviations of real publishers.
        bearer: Bearer token that requests need.

    Concurrency: all methods may be called from any thread, and from the event loop that serves the
    publisher. None of them blocks on I/O.
    """

    _asgi: FeedApp | None = None

    @property
    def asgi(self) -> FeedApp:
        """The feed as an ASGI application, at path ``/feed``."""
        if self._asgi is None:
            self._asgi = FeedApp(self)
        return self._asgi

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one ASGI request: the publisher itself is an application too."""
        await self.asgi(scope, receive, send)

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> Serving:
        """Serve on a port, in a thread of its own.

        ``with publisher.serve() as url`` or ``async with publisher.serve() as url``, on asyncio
        and trio. The server is gone, with all its connections, when the block ends. Needs the
        extra ``testing``.
        """
        from feedapi_client.testing.publisher.server import Serving

        return Serving(self, self.asgi, host, port)

    serving = serve

    def __repr__(self) -> str:
        with self.lock:
            states = ", ".join(
                f"{log.id}{' closed' if log.closed else ''}: {len(log.seqs)} events"
                for log in self._logs.values()
                if log.listed
            )
        return f"<Publisher {self.dialect} {self.url or 'not served'} [{states}]>"
