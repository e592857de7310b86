"""Unknown hosts and certificates that can't be verified: fatal at first, retried later (R14)."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

import anyio
import httpx
import pytest

from feedapi_client import (
    FeedClient,
    FeedConsumer,
    FeedError,
    FeedInfo,
    FeedUnavailableError,
    HostError,
    Limits,
    Partition,
    RetryPolicy,
    SyncFeedClient,
    TornResponseError,
)
from feedapi_client.options import Decision, default_decision
from tests.client.wire import Reply, Request, ok, wire
from tests.http.certificates import Certificate, self_signed
from tests.http.helpers import a_client, discovery_of, page_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

UNKNOWN = "https://no-such-host.invalid/feed"
NEVER_AGAIN = RetryPolicy(base_delay=3600, max_delay=3600)
"""One retry would outlast the test."""
SOON = RetryPolicy(base_delay=0.001, max_delay=0.001, give_up_after=0.05)
INFO = b'{"token":"t","partitions":[{"id":"0"}]}'


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("trusted"), "127.0.0.1")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("foreign"), "elsewhere.test")


class TestTransport:
    @pytest.mark.parametrize("ask", [page_of, discovery_of])
    @pytest.mark.parametrize("alerted", [False, True])
    async def test_r14_an_unknown_host_or_an_alert_about_our_certificate_is_about_the_host(
        self, ask: Any, alerted: bool, sync: bool
    ) -> None:
        http = a_client(sync, transport=httpx.MockTransport(alert)) if alerted else None
        says = "server wants another client certificate" if alerted else "its host, or the proxy's"
        with pytest.raises(HostError, match=f"no answer: (the )?{says}") as caught:
            await ask(UNKNOWN, sync=sync, http=http)
        assert caught.value.feed == UNKNOWN

    @pytest.mark.parametrize(
        ("signed_for", "says"),
        [
            ("trusted", "self-signed certificate"),  # which nobody signed
            ("foreign", r"not valid for '127\.0\.0\.1'"),
        ],
    )
    async def test_r14_a_certificate_that_is_not_trusted_is_about_the_host(
        self, signed_for: str, says: str, sync: bool, request: pytest.FixtureRequest
    ) -> None:
        certificate: Certificate = request.getfixturevalue(signed_for)
        http = a_client(sync, verify=certificate.client()) if signed_for == "foreign" else None
        async with wire(lambda _: ok(b""), tls=certificate.server()) as server:
            with pytest.raises(HostError, match=says):
                await page_of(server.url, sync=sync, http=http)
        assert server.requests == []

    async def test_r14_an_alert_within_a_body_tears_it(self, sync: bool) -> None:
        def reply(_: httpx.Request) -> httpx.Response:
            return httpx.Response(200, stream=Alerting())

        http = a_client(sync, transport=httpx.MockTransport(reply))
        with pytest.raises(TornResponseError, match="TLS: TLSV13_ALERT_CERTIFICATE_REQUIRED"):
            await page_of(UNKNOWN, sync=sync, http=http)

    async def test_r14_a_server_without_tls_is_an_outage(self, sync: bool) -> None:
        short = Limits(request_timeout=1)  # both sides of the handshake wait for the other
        async with wire(lambda _: ok(b"")) as server:
            with pytest.raises(FeedUnavailableError) as caught:
                await page_of(server.url.replace("http:", "https:"), sync=sync, limits=short)
        assert type(caught.value) is FeedUnavailableError


def alert(_: object) -> NoReturn:
    """Raise what httpcore's backend of anyio lets through, as it is."""
    error = ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] alert (_ssl.c:2580)")
    error.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    raise error


class Alerting(httpx.AsyncByteStream, httpx.SyncByteStream):
    def __iter__(self) -> Iterator[bytes]:
        yield b"{"
        alert(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"{"
        alert(None)


async def discover(url: str, *, sync: bool, known: bool, retry: RetryPolicy) -> None:
    info = FeedInfo("v2-token", {0: Partition(0)}, "t") if known else None
    if sync:
        with SyncFeedClient(url, retry=retry) as blocking:
            blocking.info = info
            await anyio.to_thread.run_sync(blocking.discover)
    else:
        async with FeedClient(url, retry=retry) as client:
            client.info = info
            await client.discover()


class TestDiscovery:
    async def test_r14_the_first_discovery_fails_at_once(self, sync: bool) -> None:
        with pytest.raises(HostError):
            await discover(UNKNOWN, sync=sync, known=False, retry=NEVER_AGAIN)

    async def test_r14_a_later_discovery_is_retried(
        self, sync: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "feedapi_client"), pytest.raises(HostError):
            await discover(UNKNOWN, sync=sync, known=True, retry=SOON)
        assert "attempt 2 in" in caplog.text

    async def test_r14_a_function_of_the_callers_decides_at_the_first_discovery_too(
        self, sync: bool
    ) -> None:
        asked: list[FeedError] = []

        def decide(error: FeedError) -> Any:
            asked.append(error)
            return "retry" if len(asked) < 3 else "fatal"

        policy = RetryPolicy(base_delay=0.001, max_delay=0.001, decide=decide)
        with pytest.raises(HostError):
            await discover(UNKNOWN, sync=sync, known=False, retry=policy)
        assert len(asked) == 3


class TestConsumer:
    async def test_r14_entry_ends_at_once(self, trusted: Certificate) -> None:
        async with wire(lambda _: ok(INFO), tls=trusted.server()) as server:
            for url in (UNKNOWN, server.url):
                with pytest.raises(HostError):
                    async with FeedConsumer(url, retry=NEVER_AGAIN):
                        raise AssertionError("entered")

    async def test_r14_a_running_consumer_waits_for_a_better_certificate(
        self, trusted: Certificate, foreign: Certificate
    ) -> None:
        context = trusted.server()
        refused = anyio.Event()

        def decide(error: FeedError) -> Decision:
            if isinstance(error, HostError):
                refused.set()
            return default_decision(error)

        def reply_to(request: Request) -> Reply:
            if "/events" not in request.path:
                return closing(INFO)
            if request.query["cursor"] == "_first":
                foreign.show(context)  # to the next connection
                return closing(b'{"data":{}}\n{"cursor":"1"}\n')
            return closing(b'{"data":{}}\n{"cursor":"2"}\n')

        async with (
            wire(reply_to, tls=context) as server,
            httpx.AsyncClient(verify=trusted.client()) as http,
            FeedConsumer(
                server.url,
                http=http,
                retry=RetryPolicy(base_delay=0.01, max_delay=0.01, decide=decide),
                limits=Limits(poll_interval=0.01),
            ) as consumer,
        ):
            batches = consumer.batches()
            assert (await anext(batches)).cursor == "1"
            with anyio.fail_after(60):
                await refused.wait()
            trusted.show(context)
            assert (await anext(batches)).cursor == "2"


def closing(body: bytes) -> Reply:
    return Reply(ok(body, "Connection: close").raw, close=True)
