"""The present end of a partition, where `start="last"` begins (R7)."""

from __future__ import annotations

import anyio
import pytest

from feedapi_client.client import FeedClient
from feedapi_client.errors import NoProgressError, RequestRefusedError
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.runtime.discovery import PresentEnds
from tests.client.wire import Reply, Request, feed, ok, start, wire

pytestmark = pytest.mark.anyio

QUICK = RetryPolicy(base_delay=0.001, max_delay=0.001, max_retry_after=0.001)


async def test_r07_the_end_is_the_first_checkpoint_after_last() -> None:
    async with (
        wire(feed(b'{"cursor":"x"}\n{"data":{}}\n{"cursor":"y"}\n')) as server,
        FeedClient(server.url) as client,
    ):
        assert await PresentEnds(client).end_of(1) == "x"
        assert server.requests[-1].query == {"token": "t", "partition": "1", "cursor": "_last"}


async def test_r07_failures_are_retried_and_refusals_lead_to_a_discovery() -> None:
    replies = [
        ok(b"", status="503 Later"),
        ok(b"", status="409 Conflict"),
        ok(b""),
        Reply(start(b"{"), close=True),
        ok(b'{"cursor":"x"}'),
    ]
    async with (
        wire(feed(lambda _: replies.pop(0))) as server,
        FeedClient(server.url, retry=QUICK) as client,
    ):
        assert await PresentEnds(client).end_of(0) == "x"
        assert [request.path for request in server.requests].count("/feed") == 2


async def test_r13_a_publisher_without_a_cursor_is_an_error() -> None:
    async with (
        wire(feed(b'{"data":{}}\n')) as server,
        FeedClient(server.url, retry=QUICK) as client,
    ):
        with pytest.raises(
            NoProgressError,
            match=r"partition 1: the publisher answers a fetch from _last without a cursor",
        ):
            await PresentEnds(client).end_of(1)
        assert len(server.requests) == 1 + Limits().max_attempts_without_progress


async def test_r10_partitions_that_are_refused_together_share_a_discovery() -> None:
    def page(_: Request) -> Reply:
        outdated = [request.path for request in server.requests].count("/feed") < 2
        return ok(b"", status="409 Conflict") if outdated else ok(b'{"cursor":"x"}')

    async with wire(feed(page)) as server, FeedClient(server.url, retry=QUICK) as client:
        await client.discover()
        ends = PresentEnds(client)
        async with anyio.create_task_group() as tasks:
            for _ in range(32):
                tasks.start_soon(ends.end_of, 0)
        assert [request.path for request in server.requests].count("/feed") == 2


async def test_r10_a_refusal_that_persists_is_raised() -> None:
    async with (
        wire(feed(lambda _: ok(b"", status="404 Gone"))) as server,
        FeedClient(server.url, retry=QUICK) as client,
    ):
        with pytest.raises(RequestRefusedError):
            await PresentEnds(client).end_of(0)
