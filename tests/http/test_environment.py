"""What the environment says about proxies and certificates, and what ends before its user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from feedapi_client import NegotiationError, OAuthClientCredentials
from feedapi_client.errors import FeedUnavailableError, HostError
from feedapi_client.http.environment import proxy_of
from feedapi_client.testing import Publisher
from tests.client.wire import ok, wire
from tests.http.helpers import LINE, a_client, discovery_of, endpoint, page_of

PROXY = "http://proxy:3128"
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize(
    ("url", "no_proxy", "asked"),
    [
        ("http://feed/", "", True),
        ("http://feed/", "*", False),
        ("http://feed/", "other, feed", False),
        ("http://FEED/", "Feed", False),
        ("http://a.example/", "example", False),
        ("http://an-example/", "example", True),
        ("http://example/", ".example", True),
        ("http://a.example/", ".example,", False),
        ("http://a.example/", "*.example", False),
        ("http://feed:81/", "feed:80", True),
        ("http://feed/", "feed:80", False),
        ("http://feed/", "https://feed", True),
        ("http://feed/", "all://feed", False),
        ("http://10.1.2.3/", "10.0.0.0/8", False),
        ("http://11.1.2.3/", "10.0.0.0/8", True),
        ("http://127.0.0.1/", "localhost,127.0.0.1,::1,[::1]", False),
        ("http://[::1]/", "[::1]", False),
        ("http://[::1]/", "::1", False),
        ("http://[::1]:81/", "[::1]:80", True),
        ("http://[fe80::7]/", "fe80::/10", False),
        ("http://[2001:db8::7]/", "fe80::/10,nonsense:::,[", True),
    ],
)
def test_a_host_without_a_proxy(
    url: str, no_proxy: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (proxy_of(httpx.URL(url)) is not None) is asked


@pytest.mark.anyio
@pytest.mark.parametrize("no_proxy", ["localhost,127.0.0.1,::1,[::1]", "127.0.0.1,fe80::/10"])
@pytest.mark.parametrize("proxy", [None, "http://127.0.0.1:9"])
async def test_no_proxy_may_name_addresses_and_networks_of_ipv6(
    no_proxy: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    monkeypatch.setenv("NO_PROXY", no_proxy)
    if proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy)
    async with wire(lambda _: ok(LINE)) as server:
        assert await page_of(server.url, sync=sync) == LINE


@pytest.mark.parametrize(
    ("variable", "value", "shown"),
    [
        ("HTTP_PROXY", "ftp://u:sesame@proxy:21", "'proxy:21'"),
        ("http_proxy", "http://u:sesame@proxy:port", "'proxy:port'"),
        ("ALL_PROXY", "http://", "'http://'"),
        ("ALL_PROXY", "\x1b[31m", r"'\x1b[31m'"),
    ],
)
def test_a_proxy_that_none_can_be_is_named_with_its_variable(
    variable: str, value: str, shown: str, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(NegotiationError) as caught:
        endpoint("http://feed.invalid/feed", sync=sync)
    assert caught.value.message == f"{variable} names no proxy that can be asked: {shown}"


@pytest.mark.anyio
async def test_a_proxy_that_is_not_there_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://u:sesame@127.0.0.1:9")
    via = "asked through http://127.0.0.1:9, which HTTP_PROXY names"
    with pytest.raises(FeedUnavailableError, match=f"no answer, {via}: ConnectError"):
        await page_of("http://feed.invalid/feed", sync=sync)
    monkeypatch.setenv("HTTP_PROXY", "no-such-proxy.invalid")
    via = "asked through http://no-such-proxy.invalid, which HTTP_PROXY names"
    with pytest.raises(HostError, match=f"no answer, {via}: its host, or the proxy's"):
        await page_of("http://feed.invalid/feed", sync=sync)


@pytest.mark.anyio
async def test_a_token_endpoint_that_is_not_there_is_named(sync: bool) -> None:
    auth = OAuthClientCredentials("http://127.0.0.1:9/token", client_id="a", client_secret="b")
    says = "no answer from http://127.0.0.1:9, which the client asks: ConnectError"
    with pytest.raises(FeedUnavailableError, match=says):
        await discovery_of("http://feed.invalid/feed", sync=sync, http=a_client(sync, auth=auth))


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSLKEYLOGFILE"])
def test_certificates_that_are_not_there_are_named_with_their_variable(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sync: bool
) -> None:
    missing = tmp_path / "none" / "file.pem"
    monkeypatch.setenv(variable, str(missing))
    with pytest.raises(NegotiationError) as caught:
        endpoint("https://feed.invalid/feed", sync=sync)
    assert f"{variable}={missing}" in caught.value.message
    assert "No such file" in caught.value.message


def test_a_proxy_that_speaks_socks_needs_an_extra_of_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    program = (
        "import sys; sys.modules['socksio'] = None\n"
        "from feedapi_client import SyncFeedClient\n"
        "SyncFeedClient('http://feed.invalid/feed').discover()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert "ALL_PROXY names a SOCKS proxy: pip install 'httpx[socks]'" in done.stderr


THREAD = """
import sys, threading
from feedapi_client import RetryPolicy, SyncFeedConsumer

def consume():
    retry = RetryPolicy(give_up_after=120)
    with SyncFeedConsumer(sys.argv[1], retry=retry, follow=False) as consumer:
        print(len(list(consumer)))

threading.Thread(target=consume).start()
"""


def test_r14_a_thread_that_outlives_the_main_thread_reads_or_is_refused_at_once(
    feedapi_publisher: Publisher,
) -> None:
    """asyncio resolves names by an executor, which ends with the main thread."""
    feedapi_publisher.append(0, {"n": 1})
    url = str(feedapi_publisher.url).replace("127.0.0.1", "localhost")
    done = subprocess.run(
        [sys.executable, "-c", THREAD, url], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "1\n" or "the program's main thread is over" in done.stderr
