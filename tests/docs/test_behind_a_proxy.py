"""The settings of the guide "Behind a proxy", with nginx before a publisher."""

from __future__ import annotations

from pathlib import Path

import pytest

from feedapi_client import FeedConsumer, FeedError, FetchOptions
from feedapi_client.testing import Publisher
from tests import nginx
from tests.consumer.helpers import RETRY, SHORT, limits, n_of, numbers, read, take
from tests.deployments.application import port_of
from tests.docs.snippets import blocks

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PAGE = "docs/pages/guides/behind-a-proxy.md"
ZONES = (
    "limit_req_zone $binary_remote_addr zone=feeds:1m rate=50r/s;\n"
    "proxy_cache_path {folder}/cache keys_zone=cache:1m;"
)


def settings(heading: str, publisher: Publisher) -> str:
    (text,) = (b.text for b in blocks(PAGE) if b.heading == heading and b.language == "nginx")
    return text.replace("publisher:8000", f"127.0.0.1:{port_of(publisher)}")


def feed(partitions: int = 2, events: int = 50) -> Publisher:
    publisher = Publisher(partitions, dialect="v2-draft", stream=True, page_size=10)
    publisher.path = "/myfeed"
    for partition in range(partitions):
        numbers(publisher, partition, range(events))
    return publisher


def test_the_zone_of_the_text_is_the_one_that_is_tried() -> None:
    text = (Path(__file__).parents[2] / PAGE).read_text(encoding="utf-8")
    assert ZONES.partition("\n")[0] in text


async def test_streams_arrive_as_they_come(tmp_path: Path) -> None:
    publisher = feed(1, 0)
    async with publisher.serve():
        with nginx.serve(tmp_path, settings("Buffering", publisher)) as url:
            options = FetchOptions(stream=True)
            quick = limits(stream_idle_timeout=5.0)
            async with FeedConsumer(url + "/myfeed", fetch=options, limits=quick) as consumer:
                events = aiter(consumer)
                for n in range(20):
                    numbers(publisher, 0, [n])
                    assert n_of(await take(events)) == [n]
                assert not consumer.status().reports
    fetches = [request for request in publisher.requests if request.kind == "fetch"]
    assert all(request.stream for request in fetches)


async def test_redirects_keep_the_query(tmp_path: Path) -> None:
    publisher = feed()
    async with publisher.serve():
        with nginx.serve(tmp_path, settings("Redirects", publisher)) as url:
            quick = limits(request_timeout=20.0)
            async with FeedConsumer(
                url + "/old", follow=False, limits=quick, retry=RETRY
            ) as consumer:
                assert len(await read(consumer)) == 100


@pytest.mark.parametrize("set_up", [False, True])
async def test_long_urls(tmp_path: Path, set_up: bool) -> None:
    publisher = feed()
    async with publisher.serve():
        text = settings("Length of a URL", publisher)
        if not set_up:
            text = text.replace("large_client_header_buffers 4 64k;", "")
        with nginx.serve(tmp_path, text) as url:
            long = f"{url}/myfeed?tenant={'x' * 12_000}"
            consumer = FeedConsumer(long, follow=False, retry=SHORT)
            if set_up:
                async with consumer:
                    assert len(await read(consumer)) == 100
                return
            with pytest.raises(FeedError, match="414"):
                async with consumer:
                    await read(consumer)


async def test_a_feed_is_not_cached(tmp_path: Path) -> None:
    publisher = feed(1, 10)
    async with publisher.serve():
        text = f"proxy_cache cache; proxy_cache_valid 200 1h;\n{settings('Caches', publisher)}"
        before = ZONES.format(folder=tmp_path)
        with nginx.serve(tmp_path, text, before=before) as url:
            quick = limits(request_timeout=20.0)
            async with FeedConsumer(url + "/myfeed", limits=quick) as consumer:
                events = aiter(consumer)
                assert n_of(await take(events, 10)) == list(range(10))
                numbers(publisher, 0, [10])
                assert n_of(await take(events)) == [10]


async def test_r14_a_feed_behind_a_rate_limit(tmp_path: Path) -> None:
    publisher = feed(20, 100)
    async with publisher.serve():
        before = ZONES.format(folder=tmp_path)
        text = settings("Rate limits", publisher)
        text = text.replace("limit_req zone", "access_log {0}/limited.log;\n    limit_req zone")
        with nginx.serve(tmp_path, text.replace("{0}", str(tmp_path)), before=before) as url:
            quick = limits(request_timeout=20.0)
            async with FeedConsumer(url + "/myfeed", follow=False, limits=quick) as consumer:
                assert len(await read(consumer)) == 2000
    log = (tmp_path / "limited.log").read_text().splitlines()
    statuses = [line.split('" ')[1].split()[0] for line in log]
    refused, granted = statuses.count("429"), statuses.count("200")
    assert granted >= 220
    assert 1 <= refused < granted
