"""Whatever comes out of the caller's HTTP client is the failure of its request (R14, R19)."""

from __future__ import annotations

import asyncio
import json
import struct
import traceback
import urllib.error
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs

import anyio
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import httpcore
import httpx
import pytest
from anyio.abc import ByteStream, SocketAttribute

from feedapi_client import Batch, FeedConsumer, FeedUnavailableError, RetryPolicy
from feedapi_client.errors import (
    AuthenticationError,
    FeedError,
    RequestRefusedError,
    TornResponseError,
    TransportError,
)
from feedapi_client.options import Limits, default_decision, entry_decision
from tests.client.wire import Request, ok, wire
from tests.http.helpers import LINE, a_client, discovery_of, page_of

pytestmark = pytest.mark.anyio


class Caller(httpx.Auth):
    """The caller's auth, which fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def auth_flow(self, request: httpx.Request) -> Iterator[httpx.Request]:  # type: ignore[override]
        raise self.error
        yield request


async def failure(url: str, sync: bool, http: Any, *, discovery: bool = False) -> FeedError:
    ask: Any = discovery_of if discovery else page_of
    with pytest.raises(FeedError) as caught:
        await ask(url, sync=sync, http=http)
    return caught.value


NETWORK = [
    httpx.ReadError("x"),
    httpx.LocalProtocolError("x"),
    httpcore.ConnectionNotAvailable("x"),
    h2.exceptions.ProtocolError("x"),
    anyio.ClosedResourceError(),
    ConnectionResetError("x"),
    EOFError("x"),
    OSError("sesame"),
    TimeoutError("sesame"),
    ExceptionGroup("x", [httpx.ReadTimeout("x")]),
]
CLIENT = [
    json.JSONDecodeError("sesame", "sesame", 0),
    ValueError("sesame"),
    KeyError("access_token"),
    RuntimeError("x"),
    httpx.InvalidURL("x"),
    httpx.ResponseNotRead(),
    PermissionError(13, "x"),
    urllib.error.URLError("sesame"),
    type("HTTPError", (OSError,), {"__module__": "requests.exceptions"})("sesame"),
    type("AppError", (Exception,), {})("x"),
]
BUGS = [TypeError("x"), AttributeError("x"), AssertionError("x")]


def foreign(library: str) -> Exception:
    """An error of the caller's auth, which quotes a URL with its secret."""
    quoting = "401 Client Error: Unauthorized for url: https://tokens/new?client_secret=sesame"
    kind: type[Exception] = type("HTTPError", (OSError,), {"__module__": library})
    return kind(quoting)


OF_CLIENT = "the http client failed with {name}: look"
WAYS = [
    *((error, "no answer: {name}", "retry") for error in NETWORK),
    *((error, OF_CLIENT, "retry") for error in CLIENT),
    *((error, OF_CLIENT, "fatal") for error in BUGS),
    (foreign("requests.exceptions"), OF_CLIENT, "retry"),
    (foreign("aiohttp.client_exceptions"), "no answer: {name}", "retry"),
    (BaseExceptionGroup("x", [asyncio.CancelledError()]), "", "retry"),
    (BaseExceptionGroup("x", [asyncio.CancelledError(), ValueError("x")]), "", "retry"),
]


@pytest.mark.parametrize(("error", "says", "on_entry"), WAYS, ids=lambda each: repr(each)[:50])
async def test_r14_r19_r20_what_comes_out_of_the_client_is_classified_by_its_type(
    error: BaseException, says: str, on_entry: str, sync: bool
) -> None:
    """A bug ends the entry only, and what an error of others quotes is not shown."""
    name = type(getattr(error, "exceptions", [error])[0]).__name__
    for discovery in (False, True):
        http = a_client(sync, auth=Caller(error))
        found = await failure("http://127.0.0.1:9/feed", sync, http, discovery=discovery)
        assert isinstance(found, FeedUnavailableError)
        assert says.format(name=name) in found.message
        assert "sesame" not in str(found)
        assert "client_secret" not in "".join(traceback.format_exception(found))
        assert (entry_decision(found), default_decision(found)) == (on_entry, "retry")
        assert error not in CLIENT or found.__cause__ is error


async def test_r14_a_request_of_the_auth_that_can_not_be_sent_is_retried(sync: bool) -> None:
    http = a_client(sync, auth=AsksForToken(""))
    found = await failure("http://127.0.0.1:9/feed", sync, http)
    assert (entry_decision(found), default_decision(found)) == ("fatal", "retry")


async def test_r14_a_closed_client_is_final(sync: bool) -> None:
    http = a_client(sync)
    await http.aclose() if not sync else http.close()
    found = await failure("http://127.0.0.1:9/feed", sync, http)
    assert type(found) is TransportError
    assert "the http client is closed" in found.message


@pytest.mark.parametrize("error", [*NETWORK[:5], *CLIENT[:4]], ids=repr)
async def test_r14_an_error_within_the_body_is_a_response_that_broke_off(
    error: Exception, sync: bool
) -> None:
    class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield LINE
            raise error

        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield LINE
            raise error

    http = a_client(
        sync, transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=Body()))
    )
    for discovery in (False, True):
        found = await failure("http://127.0.0.1:9/feed", sync, http, discovery=discovery)
        assert type(found) is TornResponseError
        assert type(error).__name__ in found.message
        assert ("the http client failed" in found.message) is (error in CLIENT)


def raises_for_status(sync: bool, **settings: Any) -> Any:
    """A client with the hook of httpx's documentation."""

    async def hook(response: httpx.Response) -> None:
        response.raise_for_status()

    hooks = {"response": [httpx.Response.raise_for_status if sync else hook]}
    return a_client(sync, event_hooks=hooks, **settings)


@pytest.mark.parametrize(
    ("status", "of_fetch"),
    [
        (400, RequestRefusedError),
        (401, AuthenticationError),
        (403, AuthenticationError),
        (404, RequestRefusedError),
        (409, RequestRefusedError),
        (503, FeedUnavailableError),
    ],
)
async def test_r10_a_hook_that_raises_for_a_status_does_not_hide_it(
    status: int, of_fetch: type[FeedError], sync: bool
) -> None:
    reply = ok(b"", "Retry-After: 7", status=f"{status} No")
    async with wire(lambda _: reply) as server:
        url, http = server.url + "?apikey=sesame-1234", raises_for_status(sync)
        found = await failure(url, sync, http)
        if status in (400, 404, 409):
            assert await discovery_of(url, sync=sync, http=http) == (status, b"")
        else:
            assert type(await failure(url, sync, http, discovery=True)) is of_fetch
    assert type(found) is of_fetch
    assert f"status {status}" in found.message
    assert getattr(found, "retry_after", 7) == 7
    assert "sesame" not in "".join(traceback.format_exception(found))


async def test_r19_a_redirect_is_followed_although_a_hook_raises_for_it(sync: bool) -> None:
    def reply_to(request: Request) -> Any:
        moved = ok(b"", "Location: /new?k=1", status="307 Elsewhere")
        return ok(LINE) if request.path == "/new" else moved

    async with wire(reply_to) as server:
        assert await page_of(server.url, sync=sync, http=raises_for_status(sync)) == LINE
    async with wire(
        lambda _: ok(b"", "Location: http://a:port/", status="307 Elsewhere")
    ) as server:
        found = await failure(server.url, sync, raises_for_status(sync))
    assert "redirects to a URL that can't be read" in found.message


class AsksForToken(httpx.Auth):
    requires_response_body = True

    def __init__(self, url: str, *, checks: bool = True) -> None:
        self.url, self.checks = url, checks

    def auth_flow(self, request: httpx.Request) -> Any:
        answer = yield httpx.Request("POST", self.url)
        if self.checks:
            answer.raise_for_status()
        request.headers["Authorization"] = f"Bearer {answer.json()['token']}"
        yield request


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [
        (401, AuthenticationError, "which the http client asks, answers status 401"),
        (400, FeedUnavailableError, "failed with HTTPStatusError"),
        (503, FeedUnavailableError, "failed with HTTPStatusError"),
    ],
)
@pytest.mark.parametrize("beneath", [False, True])
async def test_r14_a_status_of_the_token_endpoint_is_not_that_of_the_feed(
    status: int, kind: type[FeedError], says: str, beneath: bool, sync: bool
) -> None:
    async with wire(lambda _: ok(b"{}", status=f"{status} No")) as tokens:
        root = f"http://127.0.0.1:{tokens.port}"
        auth = AsksForToken(f"{root}/token?secret=sesame-1234")
        url = f"{root}/" if beneath else "http://127.0.0.1:9/feed"
        found = await failure(url, sync, a_client(sync, auth=auth))
    assert type(found) is kind
    assert says in found.message
    assert root in found.message
    assert "sesame" not in "".join(traceback.format_exception(found))


async def test_r14_a_location_of_the_token_endpoint_is_not_that_of_the_feed(sync: bool) -> None:
    async with wire(lambda _: ok(b"", "Location: http://a:port/", status="302 No")) as tokens:
        auth = AsksForToken(f"http://127.0.0.1:{tokens.port}/token", checks=False)
        found = await failure("http://127.0.0.1:9/feed", sync, a_client(sync, auth=auth))
    assert isinstance(found, FeedUnavailableError)
    assert "redirect" not in found.message


def events_after(cursor: str, last: int) -> bytes:
    n = int(cursor) if cursor.isdigit() else 0
    line = f'{{"data":{{"n":{n + 1}}}}}\n{{"cursor":"{n + 1}"}}\n'
    return (line if n < last else f'{{"cursor":"{n}"}}\n').encode()


async def test_r14_a_running_consumer_waits_until_the_token_endpoint_is_back() -> None:
    html = {"left": 0}

    def tokens(_: Request) -> Any:
        html["left"] -= html["left"] > 0
        return ok(b"<html>maintenance" if html["left"] else b'{"token":"t"}')

    def feed(request: Request) -> Any:
        if "/events" not in request.path:
            return ok(b'{"token":"t","partitions":[{"id":"0"}]}')
        return ok(events_after(request.query["cursor"], 4))

    async def handle(batch: Batch) -> None:
        if batch.cursor == "2":
            html["left"] = 4
        if batch.cursor == "4":
            consumer.stop()

    async with wire(tokens) as token_server, wire(feed) as server:
        auth = AsksForToken(f"http://127.0.0.1:{token_server.port}/token")
        retry = RetryPolicy(base_delay=0.001)
        async with (
            httpx.AsyncClient(auth=auth) as http,
            FeedConsumer(
                server.url, http=http, retry=retry, limits=Limits(poll_interval=0.01)
            ) as consumer,
        ):
            with anyio.fail_after(60):
                await consumer.run(handle)
    assert html["left"] == 0


class Http2:
    """A feed over HTTP/2 without TLS: four partitions of five events.

    Arguments:
        goaway: the number of requests after which a connection ends in the regular way.
        silent: whether a connection says nothing at all after so many requests.
    """

    def __init__(self, *, goaway: int | None = None, silent: int | None = None) -> None:
        self.connections = 0
        self._goaway = goaway
        self._silent = silent

    async def serve(self, stream: ByteStream) -> None:
        self.connections += 1
        number, asked = self.connections, 0
        server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        server.initiate_connection()
        async with stream:
            await stream.send(server.data_to_send())
            while True:
                try:
                    received = server.receive_data(await stream.receive())
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    return
                for event in received:
                    if not isinstance(event, h2.events.RequestReceived):
                        continue
                    asked += 1
                    if number == 1 and self._silent is not None and asked > self._silent:
                        await anyio.sleep_forever()
                    self._answer(server, event)
                    if asked == self._goaway:
                        goaway = struct.pack(">IBI", 8 << 8 | 7, 0, 0)
                        ended = struct.pack(">II", event.stream_id or 0, 0)
                        await stream.send(server.data_to_send() + goaway + ended)
                        return
                await stream.send(server.data_to_send())

    def _answer(self, server: Any, event: Any) -> None:
        target = dict(event.headers)[b":path"].decode()
        query = parse_qs(target.partition("?")[2])
        body = b'{"token":"t","partitions":[%s]}' % b",".join(
            b'{"id":"%d"}' % id for id in range(4)
        )
        if query:
            body = events_after(query["cursor"][0], 5)
        server.send_headers(event.stream_id, [(":status", "200")])
        server.send_data(event.stream_id, body, end_stream=True)


@asynccontextmanager
async def over_http2(serve: Callable[[ByteStream], Any]) -> AsyncIterator[str]:
    listener: Any = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}/feed"
        tasks.cancel_scope.cancel()


@pytest.mark.filterwarnings(  # httpcore 1.0 leaves the socket to the garbage collector
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
@pytest.mark.parametrize(
    "server", [Http2(goaway=5), Http2(silent=6)], ids=["regular end", "falls silent"]
)
async def test_r14_an_http2_connection_that_ends_or_times_out_is_not_used_again(
    server: Http2,
) -> None:
    server.connections, read = 0, 0

    async def handle(batch: Batch) -> None:
        nonlocal read
        read += len(batch.events)
        if read == 20:
            consumer.stop()

    retry, limits = RetryPolicy(base_delay=0.001), Limits(poll_interval=0.01, request_timeout=1)
    async with (
        over_http2(server.serve) as url,
        httpx.AsyncClient(http1=False, http2=True, timeout=None) as http,
        FeedConsumer(url, http=http, limits=limits, retry=retry) as consumer,
    ):
        with anyio.fail_after(60):
            await consumer.run(handle)
    assert read == 20
    assert server.connections > 1
