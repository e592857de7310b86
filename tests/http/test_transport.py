"""`Transport` and `SyncTransport`, over real sockets."""

from __future__ import annotations

import gzip
from typing import Any

import anyio
import httpx
import pytest

import feedapi_client
from feedapi_client.errors import (
    AuthenticationError,
    FeedUnavailableError,
    NegotiationError,
    ProtocolError,
    RequestRefusedError,
    TornResponseError,
    TransportError,
)
from feedapi_client.http.async_transport import Transport
from feedapi_client.http.sync_transport import SyncTransport
from feedapi_client.options import Limits
from tests.client.wire import Reply, Request, Wire, chunk, ok, start, wire
from tests.http.helpers import (
    LIMIT,
    LINE,
    basic_auth,
    body_of,
    discovery_of,
    fetch_error,
    opened,
    page_of,
    sync_body_of,
)

pytestmark = pytest.mark.anyio


class TestRequests:
    async def test_the_query_of_the_feeds_url_is_sent_with_every_request(self) -> None:
        async with (
            wire(lambda _: ok(LINE)) as server,
            opened(server.url + "?tenant=a%20b&k=1") as transport,
        ):
            await transport.get("", [], max_bytes=LIMIT)
            await body_of(transport, [("cursor", "c")])
            assert [request.target for request in server.requests] == [
                "/feed?tenant=a%20b&k=1",
                "/feed/events?tenant=a%20b&k=1&cursor=c",
            ]

    @pytest.mark.parametrize("sync", [False, True])
    async def test_r14_requests_name_the_library_and_r10_discoveries_pass_caches(
        self, sync: bool
    ) -> None:
        async with wire(lambda _: ok(LINE)) as server:
            await discovery_of(server.url, sync=sync)
            await page_of(server.url, sync=sync)
            discovery, fetch = server.requests
        agent = f"feedapi-client/{feedapi_client.__version__}"
        assert [discovery.headers["user-agent"], fetch.headers["user-agent"]] == [agent, agent]
        assert discovery.headers["cache-control"] == "no-cache"
        assert "cache-control" not in fetch.headers

    async def test_r14_a_client_of_the_callers_keeps_the_name_that_it_has(self) -> None:
        async with wire(lambda _: ok(LINE)) as server:
            for headers in ({}, {"User-Agent": "billing/7"}):
                async with (
                    httpx.AsyncClient(headers=headers) as http,
                    opened(server.url, http=http) as transport,
                ):
                    await body_of(transport)
            ours, theirs = (request.headers["user-agent"] for request in server.requests)
        assert ours == f"feedapi-client/{feedapi_client.__version__}"
        assert theirs == "billing/7"

    @pytest.mark.parametrize(
        ("path", "expected"),
        [("", "/events"), ("/", "/events"), ("/a/", "/a/events"), ("/a%2Fb", "/a%2Fb/events")],
    )
    async def test_the_dialects_suffix_is_appended_to_the_path(
        self, path: str, expected: str
    ) -> None:
        async with (
            wire(lambda _: ok(LINE)) as server,
            opened(f"http://127.0.0.1:{server.port}{path}") as transport,
        ):
            await body_of(transport)
            assert server.requests[0].target == expected

    @pytest.mark.parametrize(
        "cursor", ["+ & = % / ? # %41 ;:@~*'\"<>{}|\\^`", "é", "x" * 10_000, "%", "_first"]
    )
    async def test_a_cursor_arrives_unchanged(self, cursor: str) -> None:
        async with wire(lambda _: ok(LINE)) as server, opened(server.url) as transport:
            await body_of(transport, [("cursor", cursor)])
            assert server.requests[0].query == {"cursor": cursor}

    async def test_a_cursor_too_long_for_a_url_is_an_error(self) -> None:
        async with opened("http://127.0.0.1:9/feed") as transport:
            with pytest.raises(ProtocolError, match="over 64 KiB: the cursor"):
                await body_of(transport, [("cursor", "x" * 100_000)])

    async def test_credentials_in_the_url_are_basic_auth(self) -> None:
        async with (
            wire(lambda _: ok(LINE)) as server,
            opened(server.url.replace("//", "//me:p%40ss@")) as transport,
        ):
            await body_of(transport)
            assert server.requests[0].headers["authorization"] == basic_auth("me", "p@ss")
            assert "@" not in server.requests[0].headers["host"]

    async def test_the_callers_client_is_used_as_it_is_and_stays_open(self) -> None:
        async with httpx.AsyncClient(
            headers={"x-key": "1"}, params={"p": "q r"}, auth=("a", "b"), cookies={"s": "1"}
        ) as http:
            async with wire(lambda _: ok(LINE)) as server:
                async with opened(
                    server.url.replace("//", "//me:pass@") + "?own=1", http=http
                ) as transport:
                    await body_of(transport, [("cursor", "c")])
                request = server.requests[0]
                assert request.query == {"own": "1", "p": "q r", "cursor": "c"}
                assert (request.headers["x-key"], request.headers["cookie"]) == ("1", "s=1")
                assert request.headers["authorization"] == basic_auth("a", "b")
            assert not http.is_closed

    @pytest.mark.parametrize("sync", [False, True])
    async def test_r19_our_own_client_keeps_no_cookies(self, sync: bool) -> None:
        def reply_to(request: Request) -> Reply:
            number = len(server.requests)
            headers = (f"Set-Cookie: c{number}=1", "Set-Cookie: d=1; Domain=127.0.0.1; Path=/")
            if request.path.endswith("/new"):
                return ok(LINE, *headers)
            return ok(b"", "Location: /new", *headers, status="307 On")

        async with wire(reply_to) as server:
            for _ in range(2):
                await page_of(server.url, sync=sync)
            async with opened(server.url) as transport:
                await body_of(transport)
                await body_of(transport)
        assert not any("cookie" in request.headers for request in server.requests)

    async def test_a_response_that_is_in_memory_already_is_read(self) -> None:
        def reply(_: httpx.Request) -> httpx.Response:
            encoded = gzip.compress(LINE)
            return httpx.Response(200, content=encoded, headers={"Content-Encoding": "gzip"})

        url = "http://service/feed"
        async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as http:
            transport = Transport(url, http=http)
            assert await body_of(transport) == LINE
            assert await transport.get("", [], max_bytes=LIMIT) == (200, LINE)
        with httpx.Client(transport=httpx.MockTransport(reply)) as blocking:
            sync = SyncTransport(url, http=blocking)
            assert sync_body_of(sync) == LINE
            assert sync.get("", [], max_bytes=LIMIT) == (200, LINE)

    async def test_our_own_client_is_closed(self) -> None:
        async with opened("http://127.0.0.1:9/feed") as transport:
            pass
        assert transport.client.is_closed

    async def test_compressed_bodies_are_decompressed(self) -> None:
        async with (
            wire(lambda _: ok(gzip.compress(LINE * 100), "Content-Encoding: gzip")) as server,
            opened(server.url) as transport,
        ):
            assert await body_of(transport) == LINE * 100

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "feed",
            "ftp://a/feed",
            "http://",
            "http:///feed",
            "http://a:port/feed",
            "http://[::1/feed",
            7,
        ],
    )
    async def test_an_impossible_url_is_refused_at_once(self, url: Any) -> None:
        for kind in (Transport, SyncTransport):
            with pytest.raises(NegotiationError, match="the feed's URL"):
                kind(url)

    @pytest.mark.parametrize("sync", [False, True])
    async def test_a_client_of_the_wrong_kind_is_refused_at_once(self, sync: bool) -> None:
        kind: Any = SyncTransport if sync else Transport
        with pytest.raises(TypeError, match=r"http must be an httpx\.(Async)?Client, not "):
            kind("http://a/feed", http=httpx.AsyncClient() if sync else httpx.Client())


class TestStatuses:
    @pytest.mark.parametrize("sync", [False, True])
    @pytest.mark.parametrize("status", [408, 425, 429, 500, 501, 502, 503, 504, 599])
    async def test_r14_a_temporary_status_is_unavailable(self, status: int, sync: bool) -> None:
        error = await fetch_error(
            ok(b"busy", "Retry-After: 7", status=f"{status} Later"), sync=sync
        )
        assert isinstance(error, FeedUnavailableError)
        assert (error.status, error.retry_after) == (status, 7.0)
        assert f"status {status}: 'busy'" in str(error)

    @pytest.mark.parametrize("sync", [False, True])
    @pytest.mark.parametrize("status", [401, 403])
    async def test_r01_401_and_403_are_authentication_errors(self, status: int, sync: bool) -> None:
        error = await fetch_error(ok(b"no", status=f"{status} No"), sync=sync)
        assert type(error) is AuthenticationError

    @pytest.mark.parametrize("sync", [False, True])
    @pytest.mark.parametrize("status", [400, 404, 409, 410])
    async def test_r10_a_status_that_asks_for_a_discovery_is_a_refusal(
        self, status: int, sync: bool
    ) -> None:
        error = await fetch_error(ok(b"gone " + b"x" * 1000, status=f"{status} No"), sync=sync)
        assert isinstance(error, RequestRefusedError)
        assert error.status == status
        assert "gone xxx" in str(error)
        assert len(str(error)) < 400

    @pytest.mark.parametrize(
        "status",
        [
            "300 Choices",
            "304 Not Modified",
            "405 Not Allowed",
            "418 Teapot",
        ],
    )
    async def test_any_other_status_of_a_fetch_is_an_error(self, status: str) -> None:
        error = await fetch_error(Reply(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode()))
        assert type(error) is ProtocolError
        assert status[:3] in str(error)

    @pytest.mark.parametrize("sync", [False, True])
    @pytest.mark.parametrize("status", ["201 Created", "203 Copied", "206 Partial", "299 Fine"])
    async def test_r03_any_2xx_of_a_fetch_is_a_page(self, status: str, sync: bool) -> None:
        async with wire(lambda _: ok(LINE, status=status)) as server:
            assert await page_of(server.url, sync=sync) == LINE

    @pytest.mark.parametrize("sync", [False, True])
    @pytest.mark.parametrize("status", ["204 No Content", "205 Reset Content"])
    async def test_r03_204_is_an_empty_page(self, status: str, sync: bool) -> None:
        raw = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode()
        async with wire(lambda _: Reply(raw)) as server:
            assert await page_of(server.url, sync=sync) == b""

    async def test_r21_a_body_is_escaped_once_and_cut(self) -> None:
        error = await fetch_error(ok(b"no\n\x1b[31m " + b"x" * 10_000, status="404 No"))
        assert r"status 404: 'no\n\x1b[31m xxx" in str(error)
        assert error.message.count("x") <= 201

    @pytest.mark.parametrize("status", ["200 OK", "400 Bad", "404 Gone", "204 No"])
    async def test_r01_discovery_returns_other_statuses(self, status: str) -> None:
        async with (
            wire(
                lambda _: Reply(
                    f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\nhello".encode(), close=True
                )
            ) as server,
            opened(server.url) as transport,
        ):
            assert (await transport.get("", [], max_bytes=LIMIT))[0] == int(status[:3])

    async def test_a_discovery_over_the_limit_is_an_error(self) -> None:
        async with (
            wire(lambda _: Reply(start(b"x" * 200_000) + chunk(b"x" * 1000), hold=True)) as server,
            opened(server.url) as transport,
        ):
            with pytest.raises(
                NegotiationError,
                match=r"longer than 100000 bytes: raise Limits.max_discovery_bytes",
            ):
                await transport.get("", [], max_bytes=100_000)

    async def test_the_connection_is_reused_after_an_error(self) -> None:
        async with (
            wire(lambda _: ok(b"no", status="404 No")) as server,
            opened(server.url) as transport,
        ):
            for _ in range(3):
                with pytest.raises(RequestRefusedError):
                    await body_of(transport)
            assert not server.closed.is_set()


class TestTornBodies:
    @pytest.mark.parametrize("sync", [False, True])
    @pytest.mark.parametrize(
        "reply",
        [
            Reply(start(LINE, length=1000), close=True),
            Reply(start(LINE), close=True),
            Reply(start(LINE) + b"ff\r\nhalf a chunk", close=True),
            Reply(start(LINE) + b"sesame\r\n", close=True),
        ],
        ids=["too short", "no last chunk", "half a chunk", "garbage for a chunk"],
    )
    async def test_r14_a_body_that_breaks_off_is_torn(self, reply: Reply, sync: bool) -> None:
        error = await fetch_error(reply, sync=sync)
        assert type(error) is TornResponseError
        assert "the response broke off: " in str(error)
        assert "sesame" not in str(error)

    async def test_r14_a_body_that_can_not_be_decompressed_is_torn(self) -> None:
        error = await fetch_error(ok(b"sesame no gzip", "Content-Encoding: gzip"), sync=True)
        assert type(error) is TornResponseError
        assert "its compressed data is damaged" in str(error)

    async def test_what_came_before_is_returned_first(self) -> None:
        async with (
            wire(lambda _: Reply(start(LINE), close=True)) as server,
            opened(server.url) as transport,
            transport.stream("", []) as body,
        ):
            assert await anext(body) == LINE
            with pytest.raises(TornResponseError) as caught:
                await anext(body)
        assert isinstance(caught.value.__cause__, httpx.RemoteProtocolError)

    async def test_r14_silence_within_a_body_is_torn(self) -> None:
        error = await fetch_error(Reply(start(LINE), hold=True), limits=Limits(request_timeout=1))
        assert type(error) is TornResponseError
        assert "ReadTimeout" in str(error)

    async def test_r15_a_streamed_response_has_an_idle_timeout_of_its_own(self) -> None:
        async with (
            wire(lambda _: Reply(start(LINE), hold=True)) as server,
            opened(server.url, limits=Limits(request_timeout=3600)) as transport,
        ):
            with pytest.raises(TornResponseError, match="ReadTimeout"):
                await body_of(transport, idle_timeout=1)


class TestConnections:
    @pytest.mark.parametrize("sync", [False, True])
    @pytest.mark.parametrize("raw", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200"])
    async def test_r14_no_response_is_unavailable(self, raw: bytes, sync: bool) -> None:
        error = await fetch_error(Reply(raw, close=True), sync=sync)
        assert isinstance(error, FeedUnavailableError)
        assert error.status is None
        assert "no answer: RemoteProtocolError" in str(error)

    async def test_r14_a_refused_connection_is_unavailable(self) -> None:
        async with wire(lambda _: ok(b"")) as server:
            url = server.url
        async with opened(url) as transport:
            with pytest.raises(FeedUnavailableError, match="no answer: ConnectError") as caught:
                await transport.get("", [], max_bytes=LIMIT)
        assert isinstance(caught.value.__cause__, httpx.ConnectError)

    async def test_r14_a_response_that_does_not_begin_in_time_is_unavailable(self) -> None:
        error = await fetch_error(Reply(b"", hold=True), limits=Limits(request_timeout=1))
        assert isinstance(error, FeedUnavailableError)
        assert "ReadTimeout" in str(error)

    async def test_r14_the_error_of_a_pool_that_is_too_small_names_the_limit(self) -> None:
        http = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=1), timeout=httpx.Timeout(60, pool=0.01)
        )
        async with (
            http,
            wire(lambda _: Reply(start(LINE), hold=True)) as server,
            opened(server.url, http=http) as transport,
            transport.stream("", []) as body,
        ):
            await anext(body)
            with pytest.raises(FeedUnavailableError, match="larger pool"):
                await body_of(transport)

    async def test_a_response_left_early_ends_its_connection(self) -> None:
        async with (
            wire(lambda _: Reply(start(LINE), hold=True)) as server,
            opened(server.url) as transport,
        ):
            async with transport.stream("", []) as body:
                assert await anext(body) == LINE
            with anyio.fail_after(60):
                await server.closed.wait()

    async def test_a_response_can_be_cancelled(self) -> None:
        read = []

        async def read_on(transport: Transport) -> None:
            async with transport.stream("", []) as body:
                async for piece in body:
                    read.append(piece)
                    reading.set()
            raise AssertionError("the response never ends")

        async with (
            wire(lambda _: Reply(start(LINE), hold=True)) as server,
            opened(server.url) as transport,
            anyio.create_task_group() as tasks,
        ):
            reading = anyio.Event()
            tasks.start_soon(read_on, transport)
            with anyio.fail_after(60):
                await reading.wait()
                tasks.cancel_scope.cancel()
                await server.closed.wait()
        assert read == [LINE]


class TestRedirects:
    async def test_a_redirect_within_the_origin_is_followed(self) -> None:
        def reply_to(request: Request) -> Reply:
            return (
                ok(LINE)
                if request.path == "/new"
                else ok(
                    b"",
                    f"Location: /new?{request.target.partition('?')[2]}",
                    status="307 Elsewhere",
                )
            )

        async with (
            wire(reply_to) as server,
            opened(server.url.replace("//", "//me:pass@") + "?k=1") as transport,
        ):
            assert await body_of(transport, [("cursor", "c")]) == LINE
            assert (await transport.get("", [], max_bytes=LIMIT)) == (200, LINE)
            assert [request.target for request in server.requests][1] == "/new?k=1&cursor=c"
            assert all("authorization" in request.headers for request in server.requests)

    @pytest.mark.parametrize("follow", [False, True])
    async def test_r19_a_redirect_to_another_origin_is_refused(self, follow: bool) -> None:
        async with wire(lambda _: ok(LINE)) as other:
            reply = ok(
                b"",
                f"Location: http://u:sesame@127.0.0.1:{other.port}/feed?key=sesame",
                status="302 Elsewhere",
            )
            async with (
                httpx.AsyncClient(follow_redirects=follow) as http,
                wire(lambda _: reply) as server,
                opened(server.url, http=http) as transport,
            ):
                with pytest.raises(
                    TransportError,
                    match=rf"another origin, http://127.0.0.1:{other.port}, which is refused",
                ) as fetch:
                    await body_of(transport)
                with pytest.raises(NegotiationError, match="another origin") as discovery:
                    await transport.get("", [], max_bytes=LIMIT)
            assert other.requests == []
            assert "sesame" not in f"{fetch.value} {discovery.value}"

    async def test_r19_another_scheme_is_another_origin(self) -> None:
        async with (
            wire(
                lambda request: ok(
                    b"", f"Location: https://{request.headers['host']}/feed", status="301 Secure"
                )
            ) as server,
            opened(server.url) as transport,
        ):
            with pytest.raises(TransportError, match="another origin"):
                await body_of(transport)

    @pytest.mark.parametrize("sync", [False, True])
    async def test_endless_redirects_are_an_error(self, sync: bool) -> None:
        error = await fetch_error(ok(b"", "Location: /feed", status="302 Again"), sync=sync)
        assert type(error) is TransportError
        assert "more than 5 redirects" in str(error)


def test_the_url_of_a_scripted_server_is_that_of_its_port() -> None:
    assert Wire(lambda _: ok(b""), 7).url == "http://127.0.0.1:7/feed"
