"""What a feed is asked, and what its answers mean, over real sockets."""

from __future__ import annotations

import gzip
import itertools
import math
import random
import re
import threading
from collections.abc import Iterable
from typing import Any

import anyio
import httpx
import pytest

import feedapi_client
from feedapi_client.errors import (
    AuthenticationError,
    FeedError,
    FeedUnavailableError,
    NegotiationError,
    ProtocolError,
    RequestRefusedError,
    TornResponseError,
    TransportError,
)
from feedapi_client.http.io import AsyncIO, run_now
from feedapi_client.http.transport import Exchange
from feedapi_client.options import Limits
from tests.client.wire import Reply, Request, chunk, ok, start, wire
from tests.http.helpers import (
    LINE,
    a_client,
    basic_auth,
    body_of,
    discovery_of,
    endpoint,
    fetch_error,
    get,
    opened,
    page_of,
    run,
)

pytestmark = pytest.mark.anyio
SHORT = Limits(request_timeout=1)


class TestRequests:
    async def test_the_query_of_the_feeds_url_is_sent_with_every_request(self, sync: bool) -> None:
        async with (
            wire(lambda _: ok(LINE)) as server,
            opened(server.url + "?tenant=a%20b&k=1", sync=sync) as at,
        ):
            await get(at)
            await body_of(at, [("cursor", "c")])
        assert [request.target for request in server.requests] == [
            "/feed?tenant=a%20b&k=1",
            "/feed/events?tenant=a%20b&k=1&cursor=c",
        ]

    @pytest.mark.parametrize("given", [None, {}, {"User-Agent": "billing/7"}], ids=str)
    async def test_r14_requests_name_the_library_and_r10_discoveries_pass_caches(
        self, sync: bool, given: dict[str, str] | None
    ) -> None:
        http = None if given is None else a_client(sync, headers=given)
        async with (
            wire(lambda _: ok(LINE)) as server,
            opened(server.url, sync=sync, http=http) as at,
        ):
            await get(at)
            await body_of(at)
        discovery, fetch = (request.headers for request in server.requests)
        name = f"feedapi-client/{feedapi_client.__version__}"
        agent = (given or {}).get("User-Agent", name)
        assert [discovery["user-agent"], fetch["user-agent"]] == [agent, agent]
        assert discovery["cache-control"] == "no-cache"
        assert "cache-control" not in fetch
        assert fetch["accept-encoding"] == "gzip"

    @pytest.mark.parametrize(
        ("path", "expected"),
        [("", "/events"), ("/", "/events"), ("/a/", "/a/events"), ("/a%2Fb", "/a%2Fb/events")],
    )
    async def test_the_dialects_suffix_is_appended_to_the_path(
        self, path: str, expected: str, sync: bool
    ) -> None:
        async with wire(lambda _: ok(LINE)) as server:
            await page_of(f"http://127.0.0.1:{server.port}{path}", sync=sync)
        assert server.requests[0].target == expected

    @pytest.mark.parametrize(
        "cursor", ["+ & = % / ? # %41 ;:@~*'\"<>{}|\\^`", "é", "x" * 10_000, "%", "_first"]
    )
    async def test_a_cursor_arrives_unchanged(self, cursor: str, sync: bool) -> None:
        async with wire(lambda _: ok(LINE)) as server, opened(server.url, sync=sync) as at:
            await body_of(at, [("cursor", cursor)])
        assert server.requests[0].query == {"cursor": cursor}

    async def test_a_cursor_too_long_for_a_url_is_an_error(self, sync: bool) -> None:
        async with opened("http://127.0.0.1:9/feed", sync=sync) as at:
            with pytest.raises(ProtocolError, match="over 64 KiB: the cursor"):
                await body_of(at, [("cursor", "x" * 100_000)])

    async def test_credentials_in_the_url_are_basic_auth(self, sync: bool) -> None:
        async with wire(lambda _: ok(LINE)) as server:
            await page_of(server.url.replace("//", "//me:p%40ss@"), sync=sync)
        assert server.requests[0].headers["authorization"] == basic_auth("me", "p@ss")
        assert "@" not in server.requests[0].headers["host"]

    async def test_the_callers_client_is_used_as_it_is_and_stays_open(self, sync: bool) -> None:
        http = a_client(
            sync, headers={"x-key": "1"}, params={"p": "q r"}, auth=("a", "b"), cookies={"s": "1"}
        )
        async with wire(lambda _: ok(LINE)) as server:
            url = server.url.replace("//", "//me:pass@") + "?own=1"
            async with opened(url, sync=sync, http=http) as at:
                await body_of(at, [("cursor", "c")])
        request = server.requests[0]
        assert request.query == {"own": "1", "p": "q r", "cursor": "c"}
        assert (request.headers["x-key"], request.headers["cookie"]) == ("1", "s=1")
        assert request.headers["authorization"] == basic_auth("a", "b")
        assert not http.is_closed

    async def test_r19_our_own_client_keeps_no_cookies(self, sync: bool) -> None:
        def reply_to(request: Request) -> Reply:
            number = len(server.requests)
            headers = (f"Set-Cookie: c{number}=1", "Set-Cookie: d=1; Domain=127.0.0.1; Path=/")
            if request.path.endswith("/new"):
                return ok(LINE, *headers)
            return ok(b"", "Location: /new", *headers, status="307 On")

        async with wire(reply_to) as server, opened(server.url, sync=sync) as at:
            for _ in range(2):
                await body_of(at)
        assert not any("cookie" in request.headers for request in server.requests)

    async def test_our_own_client_is_closed(self, sync: bool) -> None:
        async with opened("http://127.0.0.1:9/feed", sync=sync) as at:
            pass
        assert at.io.client.is_closed

    async def test_a_client_of_the_wrong_kind_is_refused_at_once(self, sync: bool) -> None:
        with pytest.raises(TypeError, match=r"http must be an httpx\.(Async)?Client, not "):
            endpoint("http://a/feed", sync=sync, http=a_client(not sync))

    async def test_a_coroutine_that_suspends_without_a_loop_is_an_error_at_once(self) -> None:
        class Suspends:
            def __await__(self) -> Iterable[None]:
                yield

        async def wait() -> None:
            await Suspends()

        with pytest.raises(RuntimeError, match="waits for an event loop"):
            run_now(wait())


STATUSES: list[tuple[str, type[FeedError]]] = [
    *((f"{n} Later", FeedUnavailableError) for n in (408, 425, 429, 500, 501, 502, 503, 504, 599)),
    *((f"{n} No", AuthenticationError) for n in (401, 403)),
    *((f"{n} No", RequestRefusedError) for n in (400, 404, 409, 410)),
    *((f"{n} Other", ProtocolError) for n in (300, 304, 405, 407, 418, 451, 499)),
]


class TestStatuses:
    @pytest.mark.parametrize(("status", "kind"), STATUSES)
    async def test_r01_r10_r14_a_status_of_a_fetch(
        self, status: str, kind: type[FeedError], sync: bool
    ) -> None:
        error: Any = await fetch_error(ok(b"busy", "Retry-After: 7", status=status), sync=sync)
        assert type(error) is kind
        assert error.status == int(status[:3])
        assert f"status {status[:3]}" in str(error)
        assert ("'busy'" in str(error)) is not status.startswith(("304", "407"))
        assert getattr(error, "retry_after", 7.0) == 7.0

    @pytest.mark.parametrize("status", [201, 203, 206, 299, 204, 205])
    async def test_r03_any_2xx_of_a_fetch_is_a_page_and_204_an_empty_one(
        self, status: int, sync: bool
    ) -> None:
        body = b"" if status in (204, 205) else LINE
        async with wire(lambda _: ok(body, status=f"{status} Fine")) as server:
            assert await page_of(server.url, sync=sync) == body

    @pytest.mark.parametrize("status", ["200 OK", "400 Bad", "404 Gone", "204 No"])
    async def test_r01_discovery_returns_other_statuses(self, status: str, sync: bool) -> None:
        raw = f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\nhello".encode()
        async with wire(lambda _: Reply(raw, close=True)) as server:
            assert (await discovery_of(server.url, sync=sync))[0] == int(status[:3])

    async def test_a_discovery_over_the_limit_is_an_error(self, sync: bool) -> None:
        reply = Reply(start(b"x" * 200_000) + chunk(b"x" * 1000), hold=True)
        async with wire(lambda _: reply) as server, opened(server.url, sync=sync) as at:
            with pytest.raises(
                NegotiationError,
                match=r"longer than 100000 bytes: raise Limits.max_discovery_bytes",
            ):
                await get(at, 100_000)

    async def test_the_connection_is_reused_after_an_error(self, sync: bool) -> None:
        reply = ok(b"no", status="404 No")
        async with wire(lambda _: reply) as server, opened(server.url, sync=sync) as at:
            for _ in range(3):
                with pytest.raises(RequestRefusedError):
                    await body_of(at)
            assert not server.closed.is_set()


def redirect(location: bytes) -> Reply:
    head = b"HTTP/1.1 302 Elsewhere\r\nContent-Length: 0\r\nLocation: "
    return Reply(head + location + b"\r\n\r\n")


def coded(coding: str, body: bytes, status: str = "200 OK") -> Reply:
    return ok(body, f"Content-Encoding: {coding}", status=status)


def endless(head: bytes, piece: bytes) -> Reply:
    return Reply(head, drip=itertools.repeat(piece))


def endless_error(status: str) -> Reply:
    head = f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return endless(head, chunk(b"x"))


GZIPPED = gzip.compress(LINE * 9)
OK, BROKE = b"HTTP/1.1 200 OK\r\n", "the response broke off: "
LATER = "503 Later"
NO_END = "not complete after 1 s"
SLOWLY = Reply(
    b"HTTP/1.1 302 Elsewhere\r\nLocation: /feed\r\nContent-Length: 4\r\n\r\n", drip=[b"x"] * 4
)
FAILURES: dict[str, tuple[Reply, type[FeedError], str]] = {
    # R14: a body that breaks off
    "too short": (Reply(start(LINE, length=1000), close=True), TornResponseError, BROKE),
    "no last chunk": (Reply(start(LINE), close=True), TornResponseError, BROKE),
    "half a chunk": (Reply(start(LINE) + b"ff\r\nab", close=True), TornResponseError, BROKE),
    "no chunk": (Reply(start(LINE) + b"sesame\r\n", close=True), TornResponseError, BROKE),
    "silence within": (Reply(start(LINE), hold=True), TornResponseError, "ReadTimeout"),
    "no gzip": (coded("gzip", b"sesame no gzip"), TornResponseError, BROKE),
    "half of a gzip": (coded("gzip", GZIPPED[:-5]), TornResponseError, "incomplete"),
    # R16: one coding, which was asked for
    "gzip twice": (coded("gzip, gzip", GZIPPED), ProtocolError, "compressed more than once"),
    "brotli": (coded("br", b"{}"), ProtocolError, "not asked for"),
    # R14: no answer
    "nothing": (Reply(b"", close=True), FeedUnavailableError, "no answer: RemoteProtocolError"),
    "garbage": (Reply(b"?\r\n\r\n", close=True), FeedUnavailableError, "RemoteProtocolError"),
    "half a head": (Reply(OK, close=True), FeedUnavailableError, "RemoteProtocolError"),
    "silence": (Reply(b"", hold=True), FeedUnavailableError, "ReadTimeout"),
    # R14: every exchange has an end, although the server is never silent for long
    "endless status": (endless(b"HTTP/1.1 200 ", b"H"), FeedUnavailableError, NO_END),
    "endless header": (endless(OK + b"X: ", b"a"), FeedUnavailableError, NO_END),
    "endless headers": (endless(OK, b"X: a\r\n"), FeedUnavailableError, NO_END),
    "endless hints": (
        endless(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 50),
        FeedUnavailableError,
        NO_END,
    ),
    "endless redirects": (redirect(b"/feed"), TransportError, "more than 5 redirects"),
    "slow redirects": (SLOWLY, FeedUnavailableError, NO_END),
    "endless 503": (endless_error(LATER), FeedUnavailableError, "status 503$"),
    "endless 401": (endless_error("401 Who"), AuthenticationError, r"status 401\. Check"),
    "endless 404": (endless_error("404 No"), RequestRefusedError, "status 404"),
    # R16, R21: the body of an error is an excerpt, or left out
    "no gzip of a 503": (coded("gzip", b"no", LATER), FeedUnavailableError, "status 503$"),
    "half of a 503": (coded("gzip", GZIPPED[:-4], LATER), FeedUnavailableError, "status 503$"),
    "brotli of a 503": (coded("br", b"sorry", LATER), FeedUnavailableError, "status 503$"),
    "long text": (
        ok(b"no\n\x1b[31m " + b"x" * 10_000, status="404 No"),
        RequestRefusedError,
        r"status 404: 'no\\n\\x1b\[31m x{150,201}[^x]",
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
async def test_r14_what_is_no_answer_to_a_fetch(kind: str, sync: bool) -> None:
    reply, expected, says = FAILURES[kind]
    error = await fetch_error(reply, sync=sync, limits=SHORT)
    assert type(error) is expected
    assert re.search(says, str(error))
    assert "sesame" not in str(error)
    assert len(str(error)) < 500


@pytest.mark.parametrize("own", [True, False])
async def test_r14_a_discovery_without_an_end_is_torn(own: bool, sync: bool) -> None:
    http = None if own else a_client(sync)
    async with wire(lambda _: endless(start(b"["), chunk(b" "))) as server:
        with pytest.raises(TornResponseError, match=NO_END):
            await discovery_of(server.url, sync=sync, http=http, limits=SHORT)


class TestBodies:
    async def test_what_came_before_is_returned_first(self, sync: bool) -> None:
        async with (
            wire(lambda _: Reply(start(LINE), close=True)) as server,
            opened(server.url, sync=sync) as at,
        ):
            body = Exchange(at, "", [])
            await run(at, body.__aenter__())
            assert await run(at, body.__anext__()) == LINE
            with pytest.raises(TornResponseError) as caught:
                await run(at, body.__anext__())
            await run(at, body.__aexit__())
        assert isinstance(caught.value.__cause__, httpx.RemoteProtocolError)

    async def test_r15_a_streamed_response_has_an_idle_timeout_of_its_own(self, sync: bool) -> None:
        async with (
            wire(lambda _: Reply(start(LINE), hold=True)) as server,
            opened(server.url, sync=sync, limits=Limits(request_timeout=3600)) as at,
        ):
            with pytest.raises(TornResponseError, match="ReadTimeout"):
                await body_of(at, idle=1)


class TestConnections:
    async def test_r14_a_refused_connection_is_unavailable(self, sync: bool) -> None:
        async with wire(lambda _: ok(b"")) as server:
            url = server.url
        with pytest.raises(FeedUnavailableError, match="no answer: ConnectError") as caught:
            await discovery_of(url, sync=sync)
        assert isinstance(caught.value.__cause__, httpx.ConnectError)

    async def test_r14_the_error_of_a_pool_that_is_too_small_names_the_limit(
        self, sync: bool
    ) -> None:
        limits, timeout = httpx.Limits(max_connections=1), httpx.Timeout(60, pool=0.01)
        http = a_client(sync, limits=limits, timeout=timeout)
        async with (
            wire(lambda _: Reply(start(LINE), hold=True)) as server,
            opened(server.url, sync=sync, http=http) as at,
        ):
            body = Exchange(at, "", [])
            await run(at, body.__aenter__())
            with pytest.raises(FeedUnavailableError, match="larger pool"):
                await body_of(at)
            await run(at, body.__aexit__())

    async def test_a_response_left_early_ends_its_connection(self, sync: bool) -> None:
        async with (
            wire(lambda _: Reply(start(LINE), hold=True)) as server,
            opened(server.url, sync=sync) as at,
        ):
            body = Exchange(at, "", [])
            await run(at, body.__aenter__())
            assert await run(at, body.__anext__()) == LINE
            await run(at, body.__aexit__())
            with anyio.fail_after(60):
                await server.closed.wait()

    async def test_a_response_can_be_cancelled(self) -> None:
        read = []

        async def read_on() -> None:
            async with Exchange(at, "", []) as body:
                async for piece in body:
                    read.append(piece)
                    reading.set()
            raise AssertionError("the response never ends")

        async with (
            wire(lambda _: Reply(start(LINE), hold=True)) as server,
            opened(server.url) as at,
            anyio.create_task_group() as tasks,
        ):
            reading = anyio.Event()
            tasks.start_soon(read_on)
            with anyio.fail_after(60):
                await reading.wait()
                tasks.cancel_scope.cancel()
                await server.closed.wait()
        assert read == [LINE]

    async def test_r20_a_response_of_a_caller_s_client_is_closed_whenever_the_fetch_is_cancelled(
        self,
    ) -> None:
        """The scope is cancelled just before the client returns the response."""
        begun, closed = 0, 0

        class Body(httpx.AsyncByteStream):
            async def __aiter__(self) -> Any:
                yield LINE

            async def aclose(self) -> None:
                nonlocal closed
                closed += 1

        def answer(_: httpx.Request) -> httpx.Response:
            nonlocal begun
            begun += 1
            scope.cancel()
            return httpx.Response(200, stream=Body())

        http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        async with http, opened("http://feed/", http=http) as at:
            with anyio.CancelScope() as scope:
                await body_of(at)
        assert (begun, closed) == (1, 1)

    @pytest.mark.parametrize("own", [True, False])
    async def test_r16_a_read_that_brings_thousands_of_chunks_lets_other_tasks_run(
        self, own: bool
    ) -> None:
        """Counted in turns of another task."""
        turns, done = 0, False

        class Body(httpx.AsyncByteStream):
            async def __aiter__(self) -> Any:
                for _ in range(1000):
                    yield b" "

        async def others() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await anyio.lowlevel.checkpoint()

        transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Body()))
        http = None if own else httpx.AsyncClient(transport=transport)
        reply = Reply(start() + b"1\r\n \r\n" * 200_000 + b"0\r\n\r\n")
        async with wire(lambda _: reply) as server, anyio.create_task_group() as tasks:
            tasks.start_soon(others)
            page = await page_of(server.url, sync=False, http=http)
            done = True
        assert (len(page), turns > 20 if own else turns > 100) == (200_000 if own else 1000, True)

    @pytest.mark.parametrize(("worked", "in_a_turn"), [("long", 1), ("for a moment", 16)])
    async def test_r16_of_those_that_work_for_long_one_goes_on_in_a_turn(
        self, worked: str, in_a_turn: int
    ) -> None:
        """Counted in turns of another task."""
        io, turns, went_on = AsyncIO("http://feed/"), 0, 0

        async def work() -> None:
            nonlocal went_on
            for _ in range(20):
                await io.others(since=-math.inf if worked == "long" else math.inf)
                went_on += 1

        async def others() -> None:
            nonlocal turns
            while went_on < 16 * 20:
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(others)
            for _ in range(16):
                tasks.start_soon(work)
        assert turns * in_a_turn >= went_on
        assert turns <= 3 * went_on / in_a_turn
        await io.aclose()

    async def test_r16_a_long_discovery_is_read_beside_other_tasks(self) -> None:
        io = AsyncIO("http://feed/")
        assert await io.aside(threading.get_ident, 1000) == threading.get_ident()
        assert await io.aside(threading.get_ident, 1 << 20) != threading.get_ident()
        await io.aclose()


@pytest.mark.slow
class TestDeadlines:
    """Every exchange has an end, although the server is never silent for long."""

    async def test_r14_a_page_may_take_longer_than_its_headers(self, sync: bool) -> None:
        reply = Reply(start(length=25 * len(LINE)), drip=[LINE] * 25)
        async with wire(lambda _: reply) as server:
            page = await page_of(server.url, sync=sync, limits=Limits(request_timeout=2))
        assert page == LINE * 25


NASTY = [
    *(b"http://[", b"http://[::1/feed", b"http://a:port/", b"http://a:" + b"9" * 5000 + b"/"),
    *(b"http://a..b/", b"http://" + b"a" * 70 + b"/", b"http://" + b"a" * 70_000),
    *(b"http://xn--\xff/", b"http://\xe2\x84\x80.com/", b"http://u:p@exa\xe2\x84\x80mple.com/"),
    *(b"//[::1", b"//", b"http:", b"http://", b"\xff\xfe", b"/\xff", b"?", b"#", b""),
    *(b"file:///etc/passwd", b"javascript:alert(1)", b"http://127.0.0.1:99999/"),
    *(b"http://127.0.0.1:-1/", b"http://%00/", b"http://\xf0\x9f\x92\xa9.example/"),
]


class TestRedirects:
    async def test_a_redirect_within_the_origin_is_followed(self, sync: bool) -> None:
        def reply_to(request: Request) -> Reply:
            if request.path == "/new":
                return ok(LINE)
            target = f"/new?{request.target.partition('?')[2]}"
            return ok(b"", f"Location: {target}", status="307 Elsewhere")

        async with wire(reply_to) as server:
            url = server.url.replace("//", "//me:pass@") + "?k=1"
            async with opened(url, sync=sync) as at:
                assert await body_of(at, [("cursor", "c")]) == LINE
                assert await get(at) == (200, LINE)
        assert [request.target for request in server.requests][1] == "/new?k=1&cursor=c"
        assert all("authorization" in request.headers for request in server.requests)

    @pytest.mark.parametrize("follow", [False, True])
    @pytest.mark.parametrize("scheme", ["http", "https"])
    async def test_r19_a_redirect_to_another_origin_is_refused(
        self, follow: bool, scheme: str, sync: bool
    ) -> None:
        async with wire(lambda _: ok(LINE)) as other:
            place = f"{scheme}://127.0.0.1:{other.port}"
            location = place.replace("//", "//u:sesame@") + "/feed?key=sesame"
            async with wire(lambda _: redirect(location.encode())) as server:
                http = a_client(sync, follow_redirects=follow)
                async with opened(server.url, sync=sync, http=http) as at:
                    with pytest.raises(
                        TransportError, match=f"another origin, {place}, which is refused"
                    ) as fetch:
                        await body_of(at)
                    with pytest.raises(NegotiationError, match="another origin") as discovery:
                        await get(at)
        assert other.requests == []
        assert "sesame" not in f"{fetch.value} {discovery.value}"

    @pytest.mark.parametrize("location", NASTY, ids=range(len(NASTY)))
    @pytest.mark.parametrize("own", [True, False])
    async def test_r19_no_location_raises_a_foreign_error(
        self, location: bytes, own: bool, sync: bool
    ) -> None:
        async with wire(lambda _: redirect(location)) as server:
            http = None if own else a_client(sync)
            with pytest.raises((TransportError, ProtocolError)) as caught:
                await page_of(server.url, sync=sync, http=http)
        assert len(str(caught.value)) < 600
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize(
        "location", [b"http://a:port/", b"http://xn--\xff/", b"/feed?" + b"a" * 8192]
    )
    async def test_r19_a_location_that_can_not_be_read_is_named_as_that(
        self, location: bytes, sync: bool
    ) -> None:
        says = "redirects to a URL that can't be read"
        async with wire(lambda _: redirect(location)) as server:
            with pytest.raises(TransportError, match=says) as caught:
                await page_of(server.url, sync=sync)
            assert caught.value.status == 302
            with pytest.raises(NegotiationError, match=says):
                await discovery_of(server.url, sync=sync)

    async def test_r19_random_bytes_in_a_location(self) -> None:
        dice = random.Random(7)
        allowed = bytes(set(range(256)) - {0, 10, 13})
        starts = [b"", b"/", b"//", b"http://", b"http://[", b"http://a:", b"https://u:p@", b"?"]
        locations = [
            dice.choice(starts) + bytes(dice.choices(allowed, k=dice.randrange(12)))
            for _ in range(100)
        ]
        async with wire(lambda _: redirect(locations[-1])) as server, opened(server.url) as at:
            while locations:
                with pytest.raises(FeedError):
                    await get(at)
                locations.pop()

    async def test_r19_the_target_of_a_redirect_holds_no_secrets(self, sync: bool) -> None:
        """Each of its values was one, and a pattern: 60 kB took 19 s and 741 MB."""

        def reply_to(request: Request) -> Reply:
            if request.path == "/new":
                return ok(b"%s7 and sesame" % word, status="404 No")
            return redirect(b"/new?" + b"&".join(b"k=%s%d" % (word, n) for n in range(500)))

        async with wire(reply_to) as server:
            word = b"w%da" % server.port  # other tests' feeds may still be in use
            async with opened(server.url + "?k=sesame", sync=sync) as at:
                with pytest.raises(RequestRefusedError, match=rf"'{word.decode()}7 and \*\*\*'"):
                    await body_of(at)
                assert len(at.secrets.texts()) < 20
