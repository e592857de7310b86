"""A proxy that holds back responses which are meant to be streamed (R14, R15)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from feedapi_client import FeedConsumer, FetchOptions, Limits
from feedapi_client.testing import Publisher
from tests import nginx
from tests.consumer.helpers import RETRY, limits, n_of, numbers, take, wait_until
from tests.deployments.application import port_of
from tests.simulation.manners import Manners
from tests.simulation.scenario import Scenario, Settings, Step
from tests.simulation.simulation import run
from tests.testing.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.anyio

IDLE = 1.0
"""`Limits.stream_idle_timeout` here."""


@contextmanager
def behind_nginx(folder: Path, publisher: Publisher, settings: str = "") -> Iterator[str]:
    """Run nginx before a publisher, with its defaults and these settings. Yield the feed's URL."""
    location = f"location / {{ proxy_pass http://127.0.0.1:{port_of(publisher)}; {settings} }}"
    with nginx.serve(folder, location) as url:
        yield f"{url}/feed"


def consumer_of(url: str, **options: Any) -> FeedConsumer:
    return FeedConsumer(
        url,
        fetch=FetchOptions(stream=True),
        limits=limits(stream_idle_timeout=IDLE, slot_timeout=5.0),
        retry=RETRY,
        **options,
    )


@pytest.mark.slow
async def test_r14_a_stream_behind_a_buffering_proxy_is_polled_instead(tmp_path: Path) -> None:
    publisher = Publisher(2, dialect="v2-draft", stream=True)
    async with publisher.serve():
        with behind_nginx(tmp_path, publisher) as url:
            async with consumer_of(url) as consumer:
                events = aiter(consumer)
                seen: list[int] = []
                for n in range(60):
                    numbers(publisher, n % 2, [n])
                    seen += n_of(await take(events))
                assert sorted(seen) == list(range(60))
                (report,) = [line for line in consumer.status().reports if "buffers" in line]
                assert "proxy_buffering off" in report
    streams = [r for r in publisher.requests if r.kind == "fetch" and r.stream is not None]
    assert 1 <= len(streams) <= 4, "each partition asked for one, before it was known"


@pytest.mark.slow
async def test_r15_a_stream_behind_a_proxy_that_does_not_buffer_stays_one(tmp_path: Path) -> None:
    publisher = Publisher(1, dialect="v2-draft", stream=True)
    async with publisher.serve():
        with behind_nginx(tmp_path, publisher, "proxy_buffering off;") as url:
            async with consumer_of(url) as consumer:
                events = aiter(consumer)
                for n in range(60):
                    numbers(publisher, 0, [n])
                    assert n_of(await take(events)) == [n]
                assert not consumer.status().reports
    fetches = [r for r in publisher.requests if r.kind == "fetch"]
    assert all(request.stream is not None for request in fetches)


@pytest.mark.virtual_time
async def test_r14_a_silent_stream_of_a_feed_without_events_is_no_buffering_proxy() -> None:
    """Streams bring nothing, not even a header; pages are empty."""
    asked_for: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        await anyio.sleep(0.002)
        if "partition" not in request.url.params:
            return httpx.Response(200, json={"partitions": [{"id": "0"}], "stream": True})
        asked_for.append("stream" if "stream" in request.url.params else "page")
        if asked_for[-1] == "stream":
            await anyio.sleep_forever()
        return httpx.Response(200)

    async def consume() -> None:
        async with consumer:
            async for _ in consumer:
                pass

    consumer = FeedConsumer(
        "http://feed/feed",
        http=httpx.AsyncClient(transport=httpx.MockTransport(answer), timeout=None),
        fetch=FetchOptions(stream=True),
        limits=limits(stream_idle_timeout=0.05, slot_timeout=0.04),
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        await wait_until(lambda: len(asked_for) >= 8)
        assert not [line for line in consumer.status().reports if "buffer" in line]
        tasks.cancel_scope.cancel()
    assert asked_for.count("stream") >= 3, "streams are tried again and again"
    # Each of them is followed by a request without one; a page's first end is asked again.
    assert "stream stream" not in " ".join(asked_for)


@pytest.mark.parametrize("concurrent", [1, 3])
def test_r14_streams_that_are_ended_before_a_proxy_passes_them_on_alternate_with_pages(
    concurrent: int,
) -> None:
    """Partitions wait for the slots: each stream is ended before the proxy's buffer is full."""
    settings = Settings(
        partitions=12, stream=True, concurrent=concurrent, manners=Manners(holds_streams=True)
    )
    steps = (Step(0.0, "publish", {"count": 40, "entities": 12}),)
    result = run(Scenario("more partitions than slots behind a proxy", settings, steps))
    assert result.failure is None


class Ticking:
    """A feed of draft v2 that publishes an event to each partition every ten seconds.

    Arguments:
        checkpoints: whether a stream brings a checkpoint behind each event. Otherwise its only one
            comes at its end.
    """

    def __init__(self, partitions: int, *, checkpoints: bool = True) -> None:
        self.partitions = partitions
        self.checkpoints = checkpoints
        self.streams = self.polls = 0
        self.reports: tuple[str, ...] = ()
        self._began = 0.0

    @property
    def published(self) -> int:
        return int((anyio.current_time() - self._began) / 10)

    async def _streamed(self, seconds: float, cursor: int) -> AsyncIterator[bytes]:
        until = anyio.current_time() + seconds  # no scope: it would be open while this yields
        while anyio.current_time() < until:
            for n in range(cursor, self.published):
                yield _line(n, checkpoint=self.checkpoints)
            cursor = max(cursor, self.published)
            await anyio.sleep(min(0.5, until - anyio.current_time()))
        yield b'{"cursor":"%d"}\n' % cursor

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        await anyio.sleep(0.002)
        params = request.url.params
        if "partition" not in params:
            listed = [{"id": str(id)} for id in range(self.partitions)]
            return httpx.Response(200, json={"partitions": listed, "stream": True})
        cursor = 0 if params["cursor"] == "_first" else int(params["cursor"])
        if (stream := params.get("stream")) is not None:
            self.streams += 1
            seconds = math.inf if stream == "y" else int(stream) / 1000
            return httpx.Response(200, content=self._streamed(seconds, cursor))
        self.polls += 1
        lines = [_line(n, checkpoint=True) for n in range(cursor, self.published)]
        return httpx.Response(200, content=b"".join(lines) or b'{"cursor":"%d"}\n' % cursor)

    async def read(self, seconds: float, **options: Any) -> int:
        """Consume the feed for so long. Return how many events came."""
        self._began, read = anyio.current_time(), 0
        client = httpx.AsyncClient(transport=httpx.MockTransport(self))
        fetch = FetchOptions(stream=True)
        consumer = FeedConsumer("http://feed/feed", fetch=fetch, http=client, **options)
        with anyio.move_on_after(seconds):
            async with consumer:
                async for _ in consumer:
                    read += 1
                    self.reports = consumer.status().reports
        return read


def _line(n: int, *, checkpoint: bool) -> bytes:
    return b'{"event":{}}\n' + (b'{"cursor":"%d"}\n' % (n + 1) if checkpoint else b"")


@pytest.mark.parametrize("partitions", [6, 16])
def test_r14_streams_that_are_shared_out_are_no_buffering_proxy(partitions: int) -> None:
    """Events for all partitions come at the same moment, while not all have a slot."""
    feed = Ticking(partitions)

    async def body() -> None:
        read = await feed.read(600, limits=Limits(max_concurrent_fetches=4))
        assert read >= 50 * partitions
        assert feed.streams > feed.polls / 2

    run_in_virtual_time(body, "asyncio")
    assert not [line for line in feed.reports if "proxy" in line]


def test_r15_a_stream_whose_only_checkpoint_comes_at_its_end_is_polled_and_reported() -> None:
    """Its events can't be delivered before: for `stream_idle_timeout` that is silence."""
    feed = Ticking(1, checkpoints=False)

    async def body() -> None:
        assert await feed.read(3600) >= 355

    run_in_virtual_time(body, "asyncio")
    assert feed.polls > 10 * feed.streams > 0
    assert len(feed.reports) >= 2, "a stream is tried again at times"
    assert all("or no checkpoint comes before their end" in line for line in feed.reports)
