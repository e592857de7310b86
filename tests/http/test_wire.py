"""Connections of our own: what they take for a response, what they refuse, and what they reuse."""

from __future__ import annotations

import itertools
import ssl
import types
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest
from anyio.abc import ByteStream, SocketAttribute

from feedapi_client.http.wire import Connection, Fetcher
from tests.consumer.helpers import wait_until
from tests.http.certificates import self_signed

pytestmark = pytest.mark.anyio

GET = b"GET / HTTP/1.1\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
BODY = b'{"cursor":"c"}\n'
LENGTH = OK + b"Content-Length: 15\r\n\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
TO_CLOSE = OK + b"\r\n"
CHUNKS = b"5\r\n" + BODY[:5] + b"\r\na;x=y\r\n" + BODY[5:] + b"\r\n0\r\nDigest: x\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 \r\n\r\n"
KIB = 1024


class Pieces(ByteStream):
    """A connection that brings these bytes, a piece at a time, and then its end."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)
        self.asked: list[int] = []

    async def receive(self, max_bytes: int = 65536) -> bytes:
        self.asked.append(max_bytes)
        if not self.pieces:
            raise anyio.EndOfStream
        piece = self.pieces.pop(0)
        assert len(piece) <= max_bytes
        return piece

    async def send(self, item: bytes) -> None:
        pass

    async def send_eof(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return {SocketAttribute.raw_socket: lambda: None}


async def read_all(connection: Connection) -> tuple[int, bytes, bool]:
    """Status, body and whether the connection may be used again."""
    await connection.request(GET)
    body = b""
    while (data := await connection.read(1.0)) is not None:
        body += data
    return connection.status, body, connection.is_reusable


async def answer(*pieces: bytes) -> tuple[int, bytes, bool]:
    return await read_all(Connection(Pieces(pieces), 256 * KIB))


WHOLE = {
    "length": (LENGTH + BODY, True),
    "chunked": (CHUNKED + CHUNKS, True),
    "to its end": (TO_CLOSE + BODY, False),
    "hints first": (HINTS + LENGTH + BODY, True),
    "last one": (OK + b"Connection: close\r\nContent-Length: 15\r\n\r\n" + BODY, False),
    "1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 15\r\n\r\n" + BODY, False),
    "1.0 that stays": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 15\r\n\r\n" + BODY,
        True,
    ),
    "lines before it": (b"\r\n\r\n" + LENGTH + BODY, True),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 15\r\n\r\n" + BODY, True),
    "space behind a size": (CHUNKED + b"f \r\n" + BODY + b"\r\n0\r\n\r\n", True),
    "capitals": (OK + b"TRANSFER-ENCODING:  Chunked \r\n\r\n" + CHUNKS, True),
    "bytes that are no text": (OK + b"X: \xff\xfe\r\nContent-Length: 15\r\n\r\n" + BODY, True),
}


@pytest.mark.parametrize("kind", WHOLE)
async def test_a_response_is_the_same_however_it_arrives(kind: str) -> None:
    raw, reusable = WHOLE[kind]
    assert await answer(raw) == (200, BODY, reusable)
    assert await answer(*(raw[i : i + 1] for i in range(len(raw)))) == (200, BODY, reusable)
    for at in range(1, len(raw)):
        assert await answer(raw[:at], raw[at:]) == (200, BODY, reusable)


@pytest.mark.parametrize("kind", WHOLE)
async def test_r14_a_response_that_is_cut_anywhere_is_torn(kind: str) -> None:
    """Only one that ends with the connection, as its head says, may be of any length."""
    raw, _ = WHOLE[kind]
    for at in range(len(TO_CLOSE) if kind == "to its end" else len(raw)):
        with pytest.raises(httpx.RemoteProtocolError):
            await answer(raw[:at])
    for at in range(len(TO_CLOSE), len(raw)) if kind == "to its end" else ():
        assert await answer(raw[:at]) == (200, raw[len(TO_CLOSE) : at], False)


@pytest.mark.parametrize("status", [204, 304])
async def test_a_response_without_a_body_ends_with_its_head(status: int) -> None:
    assert await answer(b"HTTP/1.1 %d \r\n\r\n" % status) == (status, b"", True)


REFUSED = {
    "a length beside chunks": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 15\r\n\r\n",
    "chunks beside a length": OK + b"Content-Length: 15\r\nTransfer-Encoding: chunked\r\n\r\n",
    "two lengths": OK + b"Content-Length: 15\r\nContent-Length: 16\r\n\r\n",
    "the same length twice": OK + b"Content-Length: 15\r\nContent-Length: 15\r\n\r\n",
    "two lengths in one": OK + b"Content-Length: 15, 15\r\n\r\n",
    "an empty length": OK + b"Content-Length: \r\n\r\n",
    "a signed length": OK + b"Content-Length: +15\r\n\r\n",
    "a negative length": OK + b"Content-Length: -1\r\n\r\n",
    "a length that is hexadecimal": OK + b"Content-Length: 0xf\r\n\r\n",
    "a length that overflows": OK + b"Content-Length: 18446744073709551631\r\n\r\n",
    "another coding": OK + b"Transfer-Encoding: gzip\r\n\r\n",
    "a coding of chunks": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "a coding behind chunks": OK + b"Transfer-Encoding: chunked, gzip\r\n\r\n",
    "chunks twice": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    "chunks of chunks": OK + b"Transfer-Encoding: chunked, chunked\r\n\r\n",
    "chunks that are identity": OK + b"Transfer-Encoding: identity\r\n\r\n",
    "chunks with a vertical tab": OK + b"Transfer-Encoding: \x0bchunked\r\n\r\n",
    "chunks with a parameter": OK + b"Transfer-Encoding: chunked;x=y\r\n\r\n",
    "a space before the colon": OK + b"Content-Length : 15\r\n\r\n",
    "a folded line": OK + b"X: a\r\n b\r\nContent-Length: 15\r\n\r\n",
    "a bare LF": OK + b"X: a\nContent-Length: 15\r\n\r\n",
    "LF alone": b"HTTP/1.1 200 OK\nContent-Length: 15\n\n",
    "a bare CR": OK + b"X: a\rb\r\nContent-Length: 15\r\n\r\n",
    "NUL": OK + b"X: a\0b\r\nContent-Length: 15\r\n\r\n",
    "a name with NUL": OK + b"X\0: a\r\nContent-Length: 15\r\n\r\n",
    "no name": OK + b": a\r\nContent-Length: 15\r\n\r\n",
    "no colon": OK + b"Content-Length 15\r\n\r\n",
    "a space in front": OK + b" Content-Length: 15\r\n\r\n",
    "HTTP/2": b"HTTP/2.0 200 OK\r\nContent-Length: 15\r\n\r\n",
    "HTTP/0.9": b"HTTP/0.9 200 OK\r\nContent-Length: 15\r\n\r\n",
    "SMTP": b"220 mail ESMTP\r\n",
    "HTML": b"<html>",
    "TLS": b"\x16\x03\x01\x02\0",
    "a status of two digits": b"HTTP/1.1 20 OK\r\nContent-Length: 15\r\n\r\n",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 15\r\n\r\n",
    "a status that is none": b"HTTP/1.1 abc OK\r\nContent-Length: 15\r\n\r\n",
    "a status below 100": b"HTTP/1.1 099 OK\r\nContent-Length: 15\r\n\r\n",
    "another protocol from here on": b"HTTP/1.1 101 Switch\r\nUpgrade: x\r\n\r\n",
    "nothing but hints": HINTS,
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_r14_what_is_no_response_is_refused(kind: str) -> None:
    raw = REFUSED[kind]
    single = [raw[i : i + 1] for i in range(len(raw))]
    for pieces in ([raw + BODY], [raw + CHUNKS], [*single, BODY], [*single, CHUNKS]):
        with pytest.raises(httpx.RemoteProtocolError) as caught:
            await answer(*pieces)
        assert "b'" not in str(caught.value)


@pytest.mark.parametrize(
    "rest",
    [
        *(b"g\r\n", b"-1\r\n", b"+f\r\n", b"0xf\r\n", b" f\r\n", b"f\n", b"\r\n", b";\r\n"),
        *(b"f\r\n" + BODY + b"0\r\n\r\n", b"f\r\n" + BODY + b"\n0\r\n\r\n"),
        *(b"ffffffffffffffffff\r\n", b"f;a\n\r\n", b"0\r\nX\0: a\r\n\r\n", b"0\r\n a\r\n\r\n"),
        b"0\r\nContent-Length: 3\r\n\r\n",
    ],
    ids=repr,
)
async def test_r14_what_is_no_chunk_is_torn_and_what_came_before_is_kept(rest: bytes) -> None:
    connection = Connection(Pieces([CHUNKED + b"2\r\n{}\r\n" + rest]), KIB)
    await connection.request(GET)
    assert (await connection.read(1.0) or b"").startswith(b"{}")
    with pytest.raises(httpx.RemoteProtocolError):
        await connection.read(1.0)
    assert not connection.is_reusable


@pytest.mark.parametrize("behind", [LENGTH + b"x" * 15, b"garbage", HINTS, b"H"])
@pytest.mark.parametrize("kind", ["length", "chunked", "hints first", "last one"])
async def test_r14_what_comes_behind_a_response_is_no_part_of_it(kind: str, behind: bytes) -> None:
    assert await answer(WHOLE[kind][0] + behind) == (200, BODY, False)


async def test_r14_what_comes_behind_a_response_is_no_part_of_the_next_one() -> None:
    """Where a part of a read ends with the response, what follows is not looked at."""
    head = len(OK + b"Content-Length: 1234\r\n\r\n")
    for body in range(8 * KIB - head - 1, 8 * KIB - head + 2):
        raw = OK + b"Content-Length: %d\r\n\r\n" % body + b"x" * body
        assert await answer(raw + LENGTH + BODY) == (200, b"x" * body, False)
        assert await answer(raw) == (200, b"x" * body, True)


async def test_what_was_not_read_of_a_response_is_no_part_of_the_next_one() -> None:
    connection = Connection(Pieces([LENGTH + BODY, LENGTH.replace(b"15", b"2") + b"{}"]), KIB)
    await connection.request(GET)
    assert connection.is_reusable
    assert (await read_all(connection))[1] == b"{}"


async def test_headers_are_those_of_the_responses_head() -> None:
    connection = Connection(Pieces([HINTS + CHUNKED + CHUNKS]), KIB)
    assert (await read_all(connection))[1] == BODY
    assert connection.headers == [(b"Transfer-Encoding", b"chunked")]


@pytest.mark.parametrize(
    ("head", "again"),
    [
        (b"", b"HTTP/1.1 103 \r\n\r\n"),
        (b"", b"\r\n"),
        (b"HTTP/1.1 200 ", b"a"),
        (OK, b"X: a\r\n"),
        (OK + b"X: ", b"a"),
        (CHUNKED + b"1;", b"a"),
        (CHUNKED + b"0", b"0"),
        (CHUNKED + b"0\r\n", b"X: a\r\n"),
        (CHUNKED + b"0\r\nX: ", b"a"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("size", [1, 40, 200])
async def test_r16_all_that_is_no_body_is_bounded(head: bytes, again: bytes, size: int) -> None:
    taken, piece = 0, again * (size * KIB // len(again) + 1)

    class Flood(Pieces):
        async def receive(self, max_bytes: int = 65536) -> bytes:
            nonlocal taken
            taken += len(piece)
            return piece if self.pieces == [] else self.pieces.pop()

    connection = Connection(Flood([head] if head else []), 256 * KIB)
    with pytest.raises(httpx.RemoteProtocolError):
        await read_all(connection)
    assert taken <= 64 * KIB + 2 * len(piece)


async def test_r16_chunks_of_one_byte_are_joined() -> None:
    connection = Connection(Pieces([CHUNKED, b"1\r\n \r\n" * 40_000, b"0\r\n\r\n"]), 256 * KIB)
    await connection.request(GET)
    parts = []
    while (part := await connection.read(1.0)) is not None:
        parts.append(part)
    assert b"".join(parts) == b" " * 40_000
    assert len(parts) < 40


async def test_r16_a_read_asks_for_as_much_as_is_set_and_brings_parts_of_it() -> None:
    stream = Pieces([LENGTH.replace(b"15", b"250000"), b"x" * 250_000])
    connection = Connection(stream, 256 * KIB)
    await connection.request(GET)
    sizes = [len(await connection.read(1.0) or b"") for _ in range(5)]
    assert sum(sizes) == 250_000
    assert max(sizes) == 64 * KIB
    assert set(stream.asked) == {256 * KIB}


async def test_r20_an_interruption_within_the_parser_comes_out_as_it_is() -> None:
    class Interrupted(Connection):
        def on_headers_complete(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await Interrupted(Pieces([LENGTH]), KIB).request(GET)


# ------------------------------------------------------------------ several requests, over sockets


class Certificate:
    """Of a server that writes each response at once, the end of TLS behind it included."""

    def __init__(self, folder: Path) -> None:
        self._certificate, self.handshakes = self_signed(folder, "127.0.0.1"), 0
        self.client = self._certificate.client

    def serve(self, reply: bytes, *, notify: bool = False, close: bool = False) -> Any:
        async def serve(stream: ByteStream) -> None:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = self._certificate.server().wrap_bio(incoming, outgoing, server_side=True)

            async def done(call: Callable[[], Any]) -> Any:
                while True:
                    try:
                        return call()
                    except ssl.SSLWantReadError:
                        await stream.send(outgoing.read())
                        incoming.write(await stream.receive())

            async with stream:
                try:
                    await done(tls.do_handshake)
                    self.handshakes += 1
                    while await done(lambda: tls.read(64 * KIB)):
                        tls.write(reply)
                        if notify:
                            with pytest.raises(ssl.SSLWantReadError):
                                tls.unwrap()
                        await stream.send(outgoing.read())
                        if close:
                            return
                except (anyio.EndOfStream, anyio.BrokenResourceError, ssl.SSLError):
                    pass

        return serve


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return Certificate(tmp_path)


class Site:
    """Answers each request once `answers` is set, and counts its connections."""

    def __init__(self, reply: bytes) -> None:
        self.reply, self.port = reply, 0
        self.connections = self.open = self.asked = 0
        self.answers = anyio.Event()
        self.fetchers: list[Fetcher] = []

    async def serve(self, stream: ByteStream) -> None:
        self.connections += 1
        self.open += 1
        try:
            async with stream:
                async for data in stream:
                    self.asked += data.count(b"\r\n\r\n")
                    await self.answers.wait()
                    await stream.send(self.reply)
        except (anyio.BrokenResourceError, OSError):
            pass
        finally:
            self.open -= 1

    def fetcher(self, places: int = 8, **more: Any) -> Fetcher:
        options = {"seconds": 30.0, "expiry": 60.0, "read_bytes": 64 * KIB} | more
        verify = options.pop("verify", None)
        url = httpx.URL(f"{'http' if verify is None else 'https'}://127.0.0.1:{self.port}/")
        self.fetchers.append(Fetcher(url, verify, places=places, **options))
        return self.fetchers[-1]

    async def until(self, *, asked: int) -> None:
        await wait_until(lambda: self.asked >= asked)


@asynccontextmanager
async def a_site(
    reply: bytes = LENGTH + BODY, serve: Callable[[Any], Any] | None = None
) -> AsyncIterator[Site]:
    site = Site(reply)
    site.answers.set()
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    site.port = listener.extra(SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve or site.serve)
        yield site
        for fetcher in site.fetchers:
            await fetcher.aclose()
        tasks.cancel_scope.cancel()


async def get(fetcher: Fetcher, silence: float = 30.0) -> bytes:
    response = await fetcher.get(GET, silence)
    try:
        body = b""
        while (data := await response.read()) is not None:
            body += data
        return body
    finally:
        await response.aclose()


async def test_requests_one_after_the_other_share_a_connection() -> None:
    async with a_site() as site:
        fetcher = site.fetcher()
        assert [await get(fetcher) for _ in range(5)] == [BODY] * 5
        assert (site.asked, site.connections) == (5, 1)
        await fetcher.aclose()
        await wait_until(lambda: not site.open)


@pytest.mark.parametrize("kind", ["last one", "1.0", "to its end"])
async def test_a_connection_that_ends_is_not_used_again(kind: str) -> None:
    async def once(stream: ByteStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(WHOLE[kind][0])

    async with a_site(serve=once) as site:
        fetcher = site.fetcher()
        assert [await get(fetcher) for _ in range(3)] == [BODY] * 3


async def test_a_connection_that_ended_while_it_was_idle_is_not_used_again() -> None:
    ended = anyio.Event()

    async def once(stream: ByteStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(LENGTH + BODY)
        ended.set()

    async with a_site(serve=once) as site:
        fetcher = site.fetcher()
        for _ in range(3):
            assert await get(fetcher) == BODY
            await ended.wait()
            ended = anyio.Event()


async def test_each_request_under_way_has_a_connection_and_no_more_than_there_are_places() -> None:
    async with a_site() as site, anyio.create_task_group() as tasks:
        fetcher, site.answers = site.fetcher(3), anyio.Event()
        for _ in range(7):
            tasks.start_soon(get, fetcher)
        await site.until(asked=3)
        await anyio.wait_all_tasks_blocked()
        assert (site.asked, site.connections) == (3, 3)
        site.answers.set()
        await site.until(asked=7)
        assert site.connections == 3


async def test_who_waits_too_long_for_a_place_has_a_pool_timeout() -> None:
    async with a_site() as site, anyio.create_task_group() as tasks:
        fetcher, site.answers = site.fetcher(1, seconds=0.2), anyio.Event()
        tasks.start_soon(get, fetcher)
        await site.until(asked=1)
        with pytest.raises(httpx.PoolTimeout):
            await get(fetcher)
        site.answers.set()


async def test_a_refused_connection_gives_its_place_back() -> None:
    async with a_site() as site:
        pass
    fetcher = site.fetcher(1)
    for _ in range(3):
        with pytest.raises(httpx.ConnectError):
            await get(fetcher)


async def test_silence_is_bounded_and_its_place_given_back() -> None:
    async with a_site(LENGTH) as site:
        fetcher = site.fetcher(1)
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout):
                await get(fetcher, 0.05)
        await wait_until(lambda: not site.open)


async def test_a_response_that_is_closed_twice_gives_one_place_back() -> None:
    async with a_site() as site, anyio.create_task_group() as tasks:
        fetcher = site.fetcher(1)
        response = await fetcher.get(GET, 1.0)
        await response.aclose()
        await response.aclose()
        site.answers = anyio.Event()
        for _ in range(2):
            tasks.start_soon(get, fetcher)
        await site.until(asked=2)
        await anyio.wait_all_tasks_blocked()
        assert site.asked == 2, "one of the two has to wait"
        site.answers.set()


async def test_connections_that_are_idle_for_too_long_are_closed() -> None:
    async with a_site() as site:
        fetcher, site.answers = site.fetcher(4, expiry=0.02), anyio.Event()
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(get, fetcher)
            await site.until(asked=4)
            site.answers.set()
        await anyio.sleep(0.03)
        await get(fetcher)
        await wait_until(lambda: site.open == 1)
        await fetcher.aclose()


@types.coroutine
def cancelled(coroutine: Any, scope: anyio.CancelScope, at: int) -> Generator[Any, Any, bool]:
    """Run a coroutine, and cancel the scope once it has suspended `at` times: True if it ended."""
    resume, value = coroutine.send, None
    for number in itertools.count():
        if number == at:
            scope.cancel()
        try:
            wanted = resume(value)
        except StopIteration:
            return number <= at
        try:
            resume, value = coroutine.send, (yield wanted)
        except BaseException as error:
            resume, value = coroutine.throw, error
    raise AssertionError


@pytest.mark.parametrize("tls", [False, True], ids=["TCP", "TLS"])
@pytest.mark.parametrize("idle", [False, True], ids=["new", "idle"])
async def test_r20_a_request_may_be_cancelled_at_each_await(
    tls: bool, idle: bool, certificate: Certificate
) -> None:
    """It gives its place back, and leaves no connection that the next one can't use."""
    verify = certificate.client() if tls else None
    serve = certificate.serve(CHUNKED + CHUNKS) if tls else None
    async with a_site(CHUNKED + CHUNKS, serve) as site:
        for at in itertools.count():
            fetcher = site.fetcher(1, verify=verify)
            if idle:
                assert await get(fetcher) == BODY
            whole = False
            with anyio.CancelScope() as scope:
                whole = await cancelled(get(fetcher), scope, at)
            with anyio.fail_after(30):
                assert await get(fetcher) == BODY
            await fetcher.aclose()
            await wait_until(lambda: not site.open)
            if whole:
                break
        assert at > 1


class TestTLS:
    @pytest.mark.parametrize("kind", ["length", "chunked"])
    async def test_one_that_said_its_end_with_the_response_is_not_used_again(
        self, kind: str, certificate: Certificate
    ) -> None:
        """What said so was read together with the response: the socket looks idle."""
        async with a_site(serve=certificate.serve(WHOLE[kind][0], notify=True)) as site:
            fetcher = site.fetcher(verify=certificate.client())
            assert [await get(fetcher) for _ in range(3)] == [BODY] * 3

    async def test_one_that_stays_is_used_again(self, certificate: Certificate) -> None:
        async with a_site(serve=certificate.serve(LENGTH + BODY)) as site:
            fetcher = site.fetcher(verify=certificate.client())
            assert [await get(fetcher) for _ in range(3)] == [BODY] * 3
            assert certificate.handshakes == 1

    @pytest.mark.parametrize("notify", [False, True])
    async def test_r14_a_body_whose_end_is_the_connections_needs_an_end_of_tls(
        self, notify: bool, certificate: Certificate
    ) -> None:
        serve = certificate.serve(TO_CLOSE + BODY, notify=notify, close=True)
        async with a_site(serve=serve) as site:
            fetcher = site.fetcher(verify=certificate.client())
            if notify:
                assert await get(fetcher) == BODY
            else:
                with pytest.raises(httpx.ReadError):
                    await get(fetcher)
