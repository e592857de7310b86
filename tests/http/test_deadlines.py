"""Every exchange has an end, although the server is never silent for long (R14)."""

from __future__ import annotations

import itertools

import pytest

from feedapi_client.errors import (
    AuthenticationError,
    FeedUnavailableError,
    RequestRefusedError,
    TornResponseError,
)
from feedapi_client.options import Limits
from tests.client.wire import Reply, chunk, start, wire
from tests.http.helpers import LINE, discovery_of, page_of

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.parametrize("sync", [False, True]),
]

SHORT = Limits(request_timeout=1)
ENDLESS_HEADERS = {
    "status line": (b"", b"H", page_of),
    "one header": (b"HTTP/1.1 200 OK\r\nX-Long: ", b"a", discovery_of),
    "many headers": (b"HTTP/1.1 200 OK\r\n", b"X-Many: a\r\n", page_of),
    "1xx flood": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 50, discovery_of),
}


@pytest.mark.parametrize("kind", ENDLESS_HEADERS)
async def test_r14_headers_without_an_end_are_no_answer(kind: str, sync: bool) -> None:
    head, piece, ask = ENDLESS_HEADERS[kind]
    async with wire(lambda _: Reply(head, drip=itertools.repeat(piece))) as server:
        with pytest.raises(FeedUnavailableError, match=r"not complete after 0\.5 s"):
            await ask(server.url, sync=sync, limits=Limits(request_timeout=0.5))


async def test_r14_a_discovery_without_an_end_is_torn(sync: bool) -> None:
    reply = Reply(start(b'{"partitions":['), drip=itertools.repeat(chunk(b" ")))
    async with wire(lambda _: reply) as server:
        with pytest.raises(TornResponseError, match="not complete after 1 s"):
            await discovery_of(server.url, sync=sync, limits=SHORT)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("503 Later", FeedUnavailableError),
        ("401 Who", AuthenticationError),
        ("404 Gone", RequestRefusedError),
    ],
)
async def test_r14_an_error_body_without_an_end_is_left_out(
    status: str, kind: type[Exception], sync: bool
) -> None:
    head = f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    async with wire(lambda _: Reply(head, drip=itertools.repeat(chunk(b"x")))) as server:
        with pytest.raises(kind, match=f"status {status[:3]}"):
            await page_of(server.url, sync=sync, limits=SHORT)


async def test_r14_redirects_count_together(sync: bool) -> None:
    head = b"HTTP/1.1 302 Elsewhere\r\nLocation: /feed\r\nContent-Length: 4\r\n\r\n"
    async with wire(lambda _: Reply(head, drip=[b"x"] * 4)) as server:
        with pytest.raises(FeedUnavailableError, match="not complete after 1 s"):
            await page_of(server.url, sync=sync, limits=SHORT)


async def test_r14_a_page_may_take_longer_than_its_headers(sync: bool) -> None:
    reply = Reply(start(length=25 * len(LINE)), drip=[LINE] * 25)
    async with wire(lambda _: reply) as server:
        assert await page_of(server.url, sync=sync, limits=Limits(request_timeout=2)) == LINE * 25
