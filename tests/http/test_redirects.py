"""Whatever a Location holds, the error is ours (R19)."""

from __future__ import annotations

import random

import httpx
import pytest

from feedapi_client.errors import FeedError, NegotiationError, ProtocolError, TransportError
from tests.client.wire import Reply, wire
from tests.http.helpers import LIMIT, body_of, opened, page_of

pytestmark = pytest.mark.anyio

NASTY = [
    b"http://[",
    b"http://[::1/feed",
    b"http://a:port/",
    b"http://a:" + b"9" * 5000 + b"/",
    b"http://a..b/",
    b"http://" + b"a" * 70 + b"/",
    b"http://" + b"a" * 70_000,
    b"http://xn--\xff/",
    b"http://\xe2\x84\x80.com/",
    b"http://u:p@exa\xe2\x84\x80mple.com/",
    b"//[::1",
    b"//",
    b"http:",
    b"http://",
    b"\xff\xfe",
    b"/\xff",
    b"?",
    b"#",
    b"file:///etc/passwd",
    b"javascript:alert(1)",
    b"http://127.0.0.1:99999/",
    b"http://127.0.0.1:-1/",
    b"http://%00/",
    b"http://\xf0\x9f\x92\xa9.example/",
    b"",
]


def redirect(location: bytes) -> Reply:
    return Reply(
        b"HTTP/1.1 302 Elsewhere\r\nContent-Length: 0\r\nLocation: " + location + b"\r\n\r\n"
    )


@pytest.mark.parametrize("location", NASTY, ids=range(len(NASTY)))
@pytest.mark.parametrize("sync", [False, True])
async def test_r19_no_location_raises_a_foreign_error(location: bytes, sync: bool) -> None:
    async with wire(lambda _: redirect(location)) as server:
        with pytest.raises((TransportError, ProtocolError)) as caught:
            await page_of(server.url, sync=sync)
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("location", [b"http://a:port/", b"http://a..b\x01/", b"http://xn--\xff/"])
async def test_r19_a_location_that_can_not_be_read_is_named_as_that(location: bytes) -> None:
    async with wire(lambda _: redirect(location)) as server, opened(server.url) as transport:
        with pytest.raises(TransportError, match="redirects to a URL that can't be read") as caught:
            await body_of(transport)
        assert caught.value.status == 302
        with pytest.raises(NegotiationError, match="redirects to a URL that can't be read"):
            await transport.get("", [], max_bytes=LIMIT)


@pytest.mark.parametrize("location", [b"http://a:port/", b"javascript:x", b"http://xn--/"])
async def test_r19_it_is_an_error_of_ours_with_a_client_of_the_caller(location: bytes) -> None:
    async with wire(lambda _: redirect(location)) as server, httpx.AsyncClient() as http:
        with pytest.raises(TransportError, match="redirects"):
            await page_of(server.url, sync=False, http=http)


async def test_r19_random_bytes_in_a_location() -> None:
    dice = random.Random(7)
    allowed = bytes(set(range(256)) - {0, 10, 13})
    starts = [b"", b"/", b"//", b"http://", b"http://[", b"http://a:", b"https://u:p@", b"?", b"x:"]
    locations = [
        dice.choice(starts) + bytes(dice.choices(allowed, k=dice.randrange(12))) for _ in range(100)
    ]
    async with wire(lambda _: redirect(locations[-1])) as server, opened(server.url) as transport:
        while locations:
            with pytest.raises(FeedError):
                await transport.get("", [], max_bytes=LIMIT)
            locations.pop()
