"""No secret is in messages, nor in other libraries' logs once the application asks for that."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time
from collections.abc import Generator
from typing import Any

import anyio
import httpx
import pytest

from feedapi_client.errors import FeedError, TransportError
from feedapi_client.http.redaction import redact_http_logs
from feedapi_client.http.transport import Exchange
from feedapi_client.protocol.text import LONGEST_TEXT, hide_secrets
from tests.client.wire import Reply, Request, ok, start, wire
from tests.http.helpers import (
    LINE,
    a_client,
    basic_auth,
    body_of,
    get,
    opened,
    page_of,
    run,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def redacted() -> None:
    redact_http_logs()


URL = "http://me:pa55word@127.0.0.1:{port}/feed?key=sesame&tenant=a%20b%2Fc"
REPLIES: dict[str, Any] = {
    "fine": lambda request: ok(LINE),
    "echoed by 404": lambda request: ok(
        f"no such page: {request.target} {request.headers['authorization']}".encode(),
        status="404 No",
    ),
    "echoed by 500": lambda request: ok(f"bad: {request.query}".encode(), status="500 No"),
    "redirects": lambda request: ok(b"", "Location: /feed?key=sesame", status="302 Again"),
    "garbage": lambda request: Reply(b"HTTP/1.1 sesame\r\n\r\n", close=True),
    "torn": lambda request: Reply(start(LINE) + b"sesame\r\n", close=True),
}


@pytest.mark.parametrize("reply", REPLIES)
async def test_r19_no_secret_in_log_records_and_errors(
    reply: str, caplog: pytest.LogCaptureFixture, sync: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    async with wire(REPLIES[reply]) as server:
        url, http = URL.format(port=server.port), a_client(sync)
        for own in (None, http):
            async with opened(url, sync=sync, http=own) as at:
                shown += [repr(at), str(at)]
                for call in (get(at), body_of(at, [("cursor", "c")])):
                    try:
                        await call
                    except FeedError as error:
                        shown += [str(error), repr(error), str(error.__cause__)]
    shown += [f"{record.getMessage()} {record.args}" for record in caplog.records]
    assert any(record.name.startswith("httpcore") for record in caplog.records)
    encoded = basic_auth("me", "pa55word").split()[1]
    for secret in ("sesame", "pa55word", "a%20b%2Fc", "a b/c", encoded):
        assert secret not in "\n".join(shown), secret


@pytest.mark.parametrize(
    ("said", "secrets", "shown"),
    [
        ("<sesame street>", ["sesame street"], "<***>"),
        ("ab%2fcd%20e and ab%2Fcd+e", ["ab/cd e"], "*** and ***"),
        ("sesame-street sesame", ["sesame", "sesame-street"], "*** ***"),
        ("abc", ["abc"], "abc"),
        ("/+-é", ["/+-é"], "***"),
        (r"a\\u002Fbc%2520d or a&amp;sol;bc d", ["a/bc d"], "*** or ***"),
        ("a/bcd a/b", ["a/bc d"], "*** a/b"),
        ("a%2541bc%25zz a%41bc%zz", ["a%41bc%zz"], "*** ***"),
        (r"a&amp;#x2F;b\\u0022cd%3D1", ['a&#x2F;b"cd=1'], "***"),
        ("x" * 10 * LONGEST_TEXT, [f"secret-{n}" for n in range(1000)], "x" * LONGEST_TEXT),
        # At the cut.
        ("x" * (LONGEST_TEXT - 9) + "sesame street", ["sesame street"], "x" * 16375 + "***"),
        ("x" * (LONGEST_TEXT - 9) + "sesame%20street", ["sesame street"], "x" * 16375 + "***"),
        ("x" * (LONGEST_TEXT - 4) + "sesame street", ["sesame street"], "x" * 16380 + "***"),
        ("x" * (LONGEST_TEXT - 9) + "secretive", ["sesame street"], "x" * 16375 + "secretive"),
        ("x" * (LONGEST_TEXT - 9) + "sesame street", ["sesame"], "x" * 16375 + "*** st"),
        ("x" * 9 + "sesame str", ["sesame street"], "x" * 9 + "sesame str"),
        # Longer than what is searched, itself or as it is escaped.
        ("<" + "sesame" * LONGEST_TEXT, ["sesame" * LONGEST_TEXT], "<***"),
        ("<" + "s%252Fe%252F" * 4096, ["s/e/" * 4096], "<***"),
    ],
    ids=range(18),
)
def test_r19_hiding_secrets(said: str, secrets: list[str], shown: str | None) -> None:
    assert hide_secrets(said, secrets) == (said if shown is None else shown)


@pytest.mark.parametrize("logger", ["hpack.hpack", "httpcore.socks", "httpcore.proxy"])
def test_r19_of_what_carries_headers_only_the_event_is_logged(
    caplog: pytest.LogCaptureFixture, logger: str
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger(logger).debug("headers.complete value=%s", [(b"Set-Cookie", b"open-it")])
    assert caplog.messages == ["headers.complete"]


@pytest.mark.parametrize("token", ["s3same." * 400, "s3same" * 10])
@pytest.mark.parametrize("before", ["", "x" * LONGEST_TEXT])
async def test_r19_a_token_that_is_longer_than_an_excerpt_is_not_shown(
    caplog: pytest.LogCaptureFixture, token: str, before: str, sync: bool
) -> None:
    """Nor what is left of one at the end of what is searched, in an error and in a log record."""
    caplog.set_level(logging.DEBUG)
    said = f"{before[:-30]}{token} " + f"{token} " * 500
    header = f"X-Echo: {before[:-600]}{token}"
    async with wire(lambda _: ok(said.encode(), header, status="401 No")) as server:
        http = a_client(sync, headers={"Authorization": f"Bearer {token}"})
        with pytest.raises(FeedError, match="401") as caught:
            await page_of(server.url, sync=sync, http=http)
    assert "s3sa" not in str(caught.value)
    assert "s3sa" not in caplog.text


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
        "?sesame%20street&tenant=acme",  # of the feed's own URL, and without a name
    ],
    ids=str,
)
@pytest.mark.parametrize("said", ["<sesame street>", "sesame%20street"])
async def test_r19_no_part_of_what_the_client_sends_is_shown(
    settings: Any, said: str, sync: bool
) -> None:
    query, settings = (settings, {}) if isinstance(settings, str) else ("", settings)
    async with wire(lambda _: ok(said.encode(), status="404 No")) as server:
        with pytest.raises(FeedError, match=r"404: '.*\*\*\*") as caught:
            await page_of(server.url + query, sync=sync, http=a_client(sync, **settings))
    assert "sesame" not in str(caught.value)
    assert "street" not in str(caught.value)


class Rotating(httpx.Auth):
    """Another token for each request, and for one that is refused."""

    def __init__(self) -> None:
        self.tokens = 0

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        for _ in range(2):
            self.tokens += 1
            request.headers["X-Api-Key"] = f"sesame-{self.tokens}"
            if (yield request).status_code != 401:
                return


async def test_r19_the_query_of_a_redirect_is_not_in_the_log_of_httpx(
    caplog: pytest.LogCaptureFixture, sync: bool
) -> None:
    caplog.set_level(logging.INFO)

    def answer(request: httpx.Request) -> httpx.Response:
        if b"sesame" in request.url.query:
            return httpx.Response(200, content=LINE)
        return httpx.Response(303, headers={"Location": "?key=sesame&cursor=c1"})

    http = a_client(sync, transport=httpx.MockTransport(answer))
    async with opened("http://127.0.0.1:9/feed", sync=sync, http=http) as at:
        stream = Exchange(at, "", [("cursor", "c1")])
        await run(at, stream.__aenter__())
        await run(at, stream.__aexit__())
    assert caplog.text.count("http://127.0.0.1:9/feed?*** ") == 2
    assert "sesame" not in caplog.text


async def test_r19_logs_of_a_request_under_way_are_redacted(
    caplog: pytest.LogCaptureFixture, sync: bool
) -> None:
    """The first one, too, and one with a token that was replaced meanwhile."""
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["X-Api-Key"])
        logging.getLogger("httpx").debug("Adding %s", " ".join(seen))
        return httpx.Response(200, content=LINE)

    http = a_client(sync, transport=httpx.MockTransport(answer), auth=Rotating())
    async with opened("http://127.0.0.1:9/feed", sync=sync, http=http) as at:
        streams = [Exchange(at, "", []) for _ in range(100)]
        for stream in streams:
            await run(at, stream.__aenter__())
        for stream in streams:
            await run(at, stream.__aexit__())
    assert len(seen) == 100
    assert caplog.text.count("***") == 5050
    assert "sesame" not in caplog.text


async def test_r19_tokens_that_were_sent_before_the_present_one_are_not_shown(sync: bool) -> None:
    """With the same request, and with those before it."""
    seen: list[str] = []

    def reply_to(request: Request) -> Reply:
        seen.append(request.headers["x-api-key"])
        return ok(" ".join(seen).encode(), status="401 No" if len(seen) % 2 else "404 No")

    async with wire(reply_to) as server:
        http = a_client(sync, auth=Rotating())
        async with opened(server.url, sync=sync, http=http) as at:
            for count in (2, 4):
                with pytest.raises(FeedError, match=" ".join([r"\*\*\*"] * count)) as caught:
                    await body_of(at)
                assert "sesame" not in str(caught.value)


class Proving(httpx.Auth):
    """A token, and a header whose value is another one each time."""

    def __init__(self) -> None:
        self.token, self.requests = "s3same-1", 0

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        self.requests += 1
        request.headers["Authorization"] = f"DPoP {self.token}"
        request.headers["DPoP"] = f"proof-{self.requests}"
        yield request


async def test_r19_a_token_is_remembered_beside_a_header_that_changes(sync: bool) -> None:
    async with wire(lambda _: ok(b"s3same-1 s3same-2", status="404 No")) as server:
        auth = Proving()
        async with opened(server.url, sync=sync, http=a_client(sync, auth=auth)) as at:
            for _ in range(100):
                with pytest.raises(FeedError, match=r"'\*\*\* ") as caught:
                    await body_of(at)
                auth.token = "s3same-2"
    assert "s3same" not in str(caught.value)


async def test_r19_a_cookie_of_the_publisher_is_one_secret(sync: bool) -> None:
    """However many words it has: each was one. No more cookies of one request are looked for."""

    def reply_to(_: Request) -> Reply:
        cookies = [f"Set-Cookie: c{n}=w{word}a w{n}b" for n in range(100)]
        return ok(f"w{word}a w{word}a w0b".encode(), *cookies, status="404 No")

    async with wire(reply_to) as server:
        word = server.port  # other tests' clients may still be in use
        async with opened(server.url, sync=sync, http=a_client(sync)) as at:
            for shown in (f"w{word}a w{word}a w0b", rf"w{word}a \*\*\*"):
                with pytest.raises(FeedError, match=f"'{shown}'"):
                    await body_of(at)
            assert len(at.secrets.texts()) < 50


async def test_r19_a_header_that_can_not_be_sent_is_not_shown(sync: bool) -> None:
    async with wire(lambda _: ok(LINE)) as server:
        http = a_client(sync, headers={"authorization": "Bearer sesame\n"})
        with pytest.raises(
            TransportError, match="can't be sent: check the http client's headers"
        ) as caught:
            await page_of(server.url, sync=sync, http=http)
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
    caplog: pytest.LogCaptureFixture, anew: bool, status: str, sync: bool
) -> None:
    """The protocol's own parameters are."""
    caplog.set_level(logging.DEBUG)
    async with wire(lambda request: ok(request.target.encode(), status=status)) as server:
        http = a_client(sync, auth=InTheQuery(anew))
        async with opened(server.url, sync=sync, http=http) as at:
            with pytest.raises(FeedError) as caught:
                await body_of(at, [("cursor", "c-1234"), ("filter-color", "green")])
            logging.getLogger("httpx").debug("Adding %s", "api_key=sesame+street")
            assert at.hide("bad line: sesame street") == "bad line: ***"
    query = r"\?cursor=c-1234&filter-color=green&api_key=\*\*\*&user=\*\*\*"
    assert re.search(query, str(caught.value))
    for shown in (str(caught.value), caplog.text):
        assert "sesame" not in shown
        assert "alibaba" not in shown


USER = basic_auth("proxyuser", "s3same")


@pytest.mark.parametrize(("scheme", "status"), [("http", 407), ("https", 407), ("https", 403)])
@pytest.mark.parametrize("named_by", ["environment", "environment, with http=", "http="])
async def test_r19_the_credentials_of_a_proxy_are_not_shown(
    scheme: str,
    status: int,
    named_by: str,
    sync: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the page of one that echoes them, in the reason of CONNECT, in httpcore's records."""
    caplog.set_level(logging.DEBUG)
    reply = ok(f"you sent {USER}, that is s3same".encode(), status=f"{status} refused {USER}")
    async with wire(lambda _: reply) as proxy:
        address = f"http://proxyuser:s3same@127.0.0.1:{proxy.port}"
        if named_by != "http=":
            monkeypatch.setenv(f"{scheme.upper()}_PROXY", address)
        settings = {"proxy": address} if named_by == "http=" else {}
        http = None if named_by == "environment" else a_client(sync, **settings)
        with pytest.raises(FeedError, match=str(status)) as caught:
            await page_of(f"{scheme}://feed.invalid/feed", sync=sync, http=http)
    shown = f"{caught.value} {caught.value.__cause__!r} {caplog.text}"
    assert "s3same" not in shown
    assert USER.split()[1] not in shown


async def test_r21_a_reason_phrase_of_64_kb_is_not_searched(
    sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quadratic pattern took 10 s for it. The time is the processor's, a thousandth of that."""
    reply = ok(b"", status=f"407 {'/' * 60_000}")
    async with wire(lambda _: reply) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        before = time.thread_time()
        with pytest.raises(FeedError, match="proxy answers status 407") as caught:
            await page_of("https://feed.invalid/feed", sync=sync)
    assert len(str(caught.value)) < 400
    assert time.thread_time() - before < 5
    await anyio.lowlevel.checkpoint()


class Fails(httpx.Auth):
    def auth_flow(self, request: httpx.Request) -> Any:
        raise ValueError("bad ValueError")
        yield request


@pytest.mark.parametrize("said", ["ConnectError", "connection", "refused: does", "ValueError"])
async def test_r19_words_of_ours_are_shown_although_a_secret_equals_them(
    said: str, sync: bool
) -> None:
    """What comes from outside is searched, and nothing else."""
    async with wire(lambda _: ok(b"")) as server:
        url = f"{server.url}?mode={said}"
    fails = said == "ValueError"
    says = "no answer: ConnectError: the connection was refused: "
    says = "the http client failed with ValueError: look" if fails else says
    with pytest.raises(FeedError, match=says) as caught:
        await page_of(url, sync=sync, http=a_client(sync, auth=Fails()) if fails else None)
    assert not fails or caught.value.__cause__ is None
