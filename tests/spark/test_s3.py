"""Staging in a real S3-compatible server (moto's), set up by environment variables alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from feedapi_client.spark.source_options import parse_options
from feedapi_client.spark.staging import Fence, Objects, StagingError
from feedapi_client.spark.stream import FeedStreamReader
from feedapi_client.testing import Publisher
from tests.spark.micro_batches import Crash, MicroBatchEngine, problems, publish
from tests.spark.s3_server import old_s3_server, s3_server

pytestmark = [pytest.mark.spark, pytest.mark.slow]

LOCATION = "s3://lake/staging"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3 server with the bucket ``lake``; this process has its endpoint and credentials."""
    with s3_server() as url:
        use(url, monkeypatch)
        yield url


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret-of-staging",
    }.items():
        monkeypatch.setenv(name, value)


def test_r08_store_that_overwrites_what_it_must_not_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with old_s3_server() as url:
        use(url, monkeypatch)
        with pytest.raises(StagingError, match="conditional writes"):
            Fence.claim(Objects(LOCATION, "run"))
        publisher = Publisher(partitions=1)
        publisher.append(0, {"entity": "a", "n": 1})
        with publisher.serve() as feed:
            options = parse_options({"url": str(feed)})
            engine = MicroBatchEngine(lambda: FeedStreamReader(options, LOCATION))
            with pytest.raises(StagingError, match="conditional writes"):
                engine.run()
            assert not list(engine.all_rows())


def test_error_names_neither_bucket_nor_credentials(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StagingError) as caught:
        Objects("s3://missing-bucket/staging", "run").create("run/plan/0", b"")
    assert "missing-bucket" not in str(caught.value)
    assert "secret-of-staging" not in str(caught.value)


def test_every_event_is_delivered_once_from_s3(server: str) -> None:
    publisher = Publisher(partitions=2, page_size=40, checkpoint_every=10, seed=7)
    publisher.split(0, into=2)
    publish(publisher, 200)
    crashes = iter(["planned", "logged", "staged", "sunk"])
    coming = next(crashes)

    def crash_at(point: str) -> None:
        nonlocal coming
        if point == coming:
            coming = next(crashes, "none")
            raise Crash

    with publisher.serve() as url:
        options = parse_options(
            {"url": str(url), "maxEventsPerPartition": "30", "settleTime": "0.5"}
        )
        engine = MicroBatchEngine(lambda: FeedStreamReader(options, "s3a://lake/staging"), crash_at)
        engine.run()
    assert coming == "none"
    assert problems(engine.all_rows(), publisher.payloads()) == []
    assert json.loads(engine.offsets[engine.committed])["epoch"] == engine.committed
