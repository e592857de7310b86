"""No secret is in messages, nor in other libraries' logs once the application asks for that."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from feedapi_client.errors import FeedError, TransportError
from feedapi_client.http.redaction import redact_http_logs
from feedapi_client.http.sync_transport import SyncTransport
from tests.client.wire import Reply, ok, start, wire
from tests.http.helpers import LIMIT, LINE, basic_auth, body_of, opened

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def redacted() -> None:
    redact_http_logs()


URL = "http://me:pa55word@127.0.0.1:{port}/feed?key=sesame&tenant=a%20b%2Fc"


async def texts_shown(url: str) -> list[str]:
    """All text that a transport in use shows."""
    shown = []
    async with opened(url) as transport:
        shown += [repr(transport), str(transport)]
        for call in (
            transport.get("", [], max_bytes=LIMIT),
            body_of(transport, [("cursor", "c")]),
        ):
            try:
                await call
            except FeedError as error:
                shown += [str(error), repr(error), str(error.__cause__)]
    return shown


@pytest.mark.parametrize(
    "reply",
    [
        lambda request: ok(LINE),
        lambda request: ok(
            f"no such page: {request.target} {request.headers['authorization']}".encode(),
            status="404 No",
        ),
        lambda request: ok(f"bad: {request.query}".encode(), status="500 No"),
        lambda request: ok(b"", "Location: /feed?key=sesame", status="302 Again"),
        lambda request: Reply(b"HTTP/1.1 sesame\r\n\r\n", close=True),
        lambda request: Reply(start(LINE) + b"sesame\r\n", close=True),
    ],
    ids=["fine", "echoed by 404", "echoed by 500", "redirects", "garbage", "torn"],
)
async def test_r19_no_secret_in_log_records_and_errors(
    reply: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with wire(reply) as server:
        shown = await texts_shown(URL.format(port=server.port))
    records = [f"{record.getMessage()} {record.args}" for record in caplog.records]
    assert any(record.name.startswith("httpcore") for record in caplog.records)
    for secret in (
        "sesame",
        "pa55word",
        "a%20b%2Fc",
        "a b/c",
        basic_auth("me", "pa55word").split()[1],
    ):
        assert secret not in "\n".join(shown + records), secret


async def test_r19_no_secret_in_what_http2_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    transport = SyncTransport(URL.format(port=9))
    logging.getLogger("hpack.hpack").debug(
        "Adding %s to the header table", (b":path", b"/feed?key=sesame&tenant=a%20b%2Fc")
    )
    assert "Adding (b':path', b'/feed?***') to the header table" in caplog.text
    transport.close()


async def test_r19_a_secret_that_begins_with_the_secret_of_another_feed_is_hidden_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    # Several, since a set has no order.
    transports = [
        SyncTransport(f"http://127.0.0.1:9/feed?key=sesame{'-street' * n}") for n in range(8)
    ]
    logging.getLogger("hpack.hpack").debug("Adding %s", "sesame" + "-street" * 7)
    assert "street" not in caplog.text
    for transport in transports:
        transport.close()


async def test_r19_other_requests_of_the_process_are_logged_unchanged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "httpx")
    async with wire(lambda _: ok(LINE)) as server, httpx.AsyncClient() as http:
        await http.get(server.url + "?a=b")
    assert "/feed?a=b" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"auth": ("me", "sesame street")},
        {"headers": {"Cookie": 'a=1; session="sesame%20street"; b=2'}},
        {"cookies": {"a": "1", "session": "sesame%20street", "b": "2"}},
        {"params": {"api_key": "sesame street", "b": "2"}},
        {"headers": {"X-Keys": "sesame,street"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("said", ["<sesame street>", "sesame%20street"])
async def test_r19_no_part_of_what_the_client_sends_is_shown(
    settings: dict[str, Any], said: str
) -> None:
    async with (
        httpx.AsyncClient(**settings) as http,
        wire(lambda _: ok(said.encode(), status="404 No")) as server,
        opened(server.url, http=http) as transport,
    ):
        with pytest.raises(FeedError, match=r"404: '.*\*\*\*") as caught:
            await body_of(transport)
    assert "sesame" not in str(caught.value)
    assert "street" not in str(caught.value)


class Rotating(httpx.Auth):
    """Another token for each request."""

    def __init__(self) -> None:
        self.tokens = 0

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        self.tokens += 1
        request.headers["X-Api-Key"] = f"sesame-{self.tokens}"
        yield request


async def test_r19_logs_of_a_request_under_way_are_redacted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first one, too, and one with a token that was replaced meanwhile."""
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["X-Api-Key"])
        logging.getLogger("hpack.hpack").debug("Adding %s", " ".join(seen))
        return httpx.Response(200, content=LINE)

    client = httpx.Client(transport=httpx.MockTransport(answer), auth=Rotating())
    with client, ExitStack() as streams:
        transport = SyncTransport("http://127.0.0.1:9/feed", http=client)
        for _ in range(3):
            streams.enter_context(transport.stream("", []))
    assert seen == ["sesame-1", "sesame-2", "sesame-3"]
    assert caplog.text.count("***") == 6
    assert "sesame" not in caplog.text


async def test_r19_a_header_that_can_not_be_sent_is_not_shown() -> None:
    async with (
        httpx.AsyncClient(headers={"authorization": "Bearer sesame\n"}) as http,
        wire(lambda _: ok(LINE)) as server,
        opened(server.url, http=http) as transport,
    ):
        with pytest.raises(
            TransportError, match="can't be sent: check the http client's headers"
        ) as caught:
            await body_of(transport)
    assert "sesame" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_the_import_leaves_other_loggers_alone() -> None:
    program = """
import logging
from feedapi_client import FeedClient, SyncFeedClient, redact_http_logs
SyncFeedClient("http://127.0.0.1:9/feed").close()
names = ("httpx", "httpcore.http11", "hpack.hpack")
print([len(logging.getLogger(name).filters) for name in names])
redact_http_logs()
redact_http_logs()
print([len(logging.getLogger(name).filters) for name in names])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split("\n")[:2] == ["[0, 0, 0]", "[1, 1, 1]"]


class InTheQuery(httpx.Auth):
    """A key in the URL, added to the request or to a new one."""

    def __init__(self, anew: bool) -> None:
        self.anew = anew

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        url = request.url.copy_merge_params({"api_key": "sesame street", "user": "alibaba"})
        if self.anew:
            request = httpx.Request("GET", url, headers=request.headers)
        request.url = url
        yield request


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("status", ["404 No", "503 No"])
async def test_r19_what_an_auth_adds_to_the_url_is_not_shown(
    caplog: pytest.LogCaptureFixture, anew: bool, status: str
) -> None:
    """The protocol's own parameters are."""
    caplog.set_level(logging.DEBUG)
    async with (
        httpx.AsyncClient(auth=InTheQuery(anew)) as http,
        wire(lambda request: ok(request.target.encode(), status=status)) as server,
        opened(server.url, http=http) as transport,
    ):
        with pytest.raises(FeedError) as caught:
            await body_of(transport, [("cursor", "c-1234"), ("filter-color", "green")])
        logging.getLogger("hpack.hpack").debug("Adding %s", "api_key=sesame+street")
    query = r"\?cursor=c-1234&filter-color=green&api_key=\*\*\*&user=\*\*\*"
    assert re.search(query, str(caught.value))
    for shown in (str(caught.value), caplog.text):
        assert "sesame" not in shown
        assert "alibaba" not in shown


async def test_r19_a_page_that_quotes_what_an_auth_added_to_the_url() -> None:
    client = httpx.AsyncClient(auth=InTheQuery(anew=True))
    async with (
        client as http,
        wire(lambda _: ok(LINE)) as server,
        opened(server.url, http=http) as transport,
        transport.stream("/events", [], partition=3),
    ):
        assert transport.hide("bad line: sesame street") == "bad line: ***"
