"""The publisher as an ASGI application: on any ASGI server, under asyncio and trio, and in `httpx.ASGITransport`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, cast

import anyio

from feedapi_client.testing.answer import answer
from feedapi_client.testing.exchange import Follow, Request, Response, read_request
from feedapi_client.testing.feed import PublishedFeed

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CONNECTION = "feedapi.connection"
"""Scope key under which the server of `Publisher.serve` offers its `Connection`, for faults that HTTP has no words for."""


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

    def __init__(self, publisher: PublishedFeed) -> None:
        self.publisher = publisher

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        publisher = self.publisher
        request = read_request(publisher.path, scope, time.monotonic())
        publisher.under_way(1)
        try:
            response = self._answer(request)
            if response.plain:
                await _send_head(response, send)
                await send(
                    {"type": "http.response.body", "body": response.body, "more_body": False}
                )
                publisher.bytes_sent += len(response.body)
            else:
                await _Delivery(publisher, response, receive, send, scope.get(CONNECTION)).run()
        finally:
            publisher.under_way(-1)

    def _answer(self, request: Request) -> Response:
        publisher = self.publisher
        with publisher.lock:
            rule = publisher.arrived(request)
            response = answer(publisher, request)
            if rule is not None:
                response = rule.fault(response, request, publisher)
            request.status = response.status
            publisher.counters[f"{request.kind} {response.status}"] += 1
        return response


async def _send_head(response: Response, send: Send) -> None:
    headers = [(name.encode(), value.encode()) for name, value in response.headers.items()]
    if response.plain:
        headers.append((b"content-length", str(len(response.body)).encode()))
    elif response.declared is not None:
        headers.append((b"content-length", str(response.declared).encode()))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})


class _Delivery:
    """A response that takes time or ends badly. It is given up as soon as the client is gone."""

    def __init__(
        self,
        publisher: PublishedFeed,
        response: Response,
        receive: Receive,
        send: Send,
        connection: Connection | None,
    ) -> None:
        self.publisher = publisher
        self.response = response
        self.receive = receive
        self.send = send
        self.connection = connection

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, tasks.cancel_scope)
            await self._deliver()
            tasks.cancel_scope.cancel()

    async def _watch(self, scope: anyio.CancelScope) -> None:
        await self._gone()
        scope.cancel()

    async def _gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _deliver(self) -> None:
        response = self.response
        await anyio.sleep(response.delay)
        if response.raw is not None:
            self._socket().write(response.raw)
            await self._end("close")
            return
        if response.send_head:
            await _send_head(response, self.send)
            await self._pieces(response.body)
        if response.follow is not None:
            await self._follow(response.follow)
        if response.endless is not None:
            for piece in response.endless():
                await self._body(piece)
        await self._end(response.ending)

    async def _pieces(self, body: bytes) -> None:
        size = self.response.piece or max(len(body), 1)
        for at in range(0, len(body), size):
            await self._body(body[at : at + size])
            if self.response.piece:
                await anyio.sleep(self.response.interval)

    async def _body(self, piece: bytes) -> None:
        await self.send({"type": "http.response.body", "body": piece, "more_body": True})
        self.publisher.bytes_sent += len(piece)
        await anyio.lowlevel.checkpoint()

    async def _end(self, ending: str) -> None:
        if ending == "complete":
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        elif ending == "hang":
            await anyio.sleep_forever()
        else:
            socket = self._socket()
            if ending == "reset":
                await anyio.sleep(
                    0.01
                )  # let the client read what came before: a reset overtakes it otherwise
                socket.reset()
            else:
                socket.close()
            await anyio.sleep_forever()  # the end of the connection ends this

    def _socket(self) -> Connection:
        if self.connection is None:
            raise RuntimeError(
                "this fault breaks the connection, which needs one: use Publisher.serve()"
            )
        return self.connection

    async def _follow(self, follow: Follow) -> None:
        wakeup = _Wakeup()
        with self.publisher.watching(follow.watched, wakeup):
            while True:
                wakeup.clear()
                lines, ended = follow.next_chunk()
                for transform in self.response.transforms:
                    lines = transform(lines)
                if lines:
                    await self._pieces(lines)
                    continue
                if ended or not await self._wait(wakeup, follow.until):
                    return

    async def _wait(self, wakeup: _Wakeup, until: float | None) -> bool:
        """Wait for events; False at the end of the stream's time."""
        left = float("inf") if until is None else until - time.monotonic()
        with anyio.move_on_after(left):
            await wakeup.wait()
            return True
        return False


class _Wakeup:
    """Wakes one task from any thread; many calls before it runs are one."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._pending = False
        self._soon = _call_soon_from_anywhere()

    def __call__(self) -> None:
        if not self._pending:
            self._pending = True
            with suppress(RuntimeError):  # the loop is gone, and the task with it
                self._soon(self._fire)

    def clear(self) -> None:
        self._pending = False
        self._event = anyio.Event()

    async def wait(self) -> None:
        await self._event.wait()

    def _fire(self) -> None:
        self._event.set()


def _call_soon_from_anywhere() -> Callable[[Callable[[], None]], object]:
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        import trio

        return cast(
            "Callable[[Callable[[], None]], object]",
            trio.lowlevel.current_trio_token().run_sync_soon,
        )
