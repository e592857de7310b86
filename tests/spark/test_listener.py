"""`FeedQueryListener`: the progress of streaming queries as metrics."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryProgress,
)

from feedapi_client.spark.listener import FeedQueryListener
from feedapi_client.testing import Publisher
from tests.spark.slow_workers import despite_slow_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark]

QUERY, RUN = str(uuid.uuid4()), str(uuid.uuid4())
NOW = "2026-11-22T00:00:00.000Z"
FEED = "https://service/orders"
REPORT = {
    "feed": FEED,
    "run": "abc",
    "epoch": 3,
    "partitions": 4,
    "reading": 1,
    "caughtUp": 2,
    "waiting": 0,
    "drained": 1,
    "failing": 0,
    "caughtUpPartitions": 3,
    "behindSeconds": 1.5,
    "requests": 7,
}


class Metrics:
    """A listener and what it exports."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])
        self.listener = FeedQueryListener(self.provider.get_meter("test"))

    def points(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        found = [
            metric
            for resource in (data.resource_metrics if data else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == f"feedapi.spark.{name}"
        ]
        return [point for metric in found for point in metric.data.data_points]

    def values(self, name: str) -> list[float]:
        return [point.value for point in self.points(name)]


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    metrics = Metrics()
    yield metrics
    metrics.provider.shutdown()


def progress(report: Any = REPORT, *, batch: bool = True) -> QueryProgressEvent:
    source = {
        "description": "PythonMicroBatchStream",
        "startOffset": None,
        "endOffset": None,
        "latestOffset": json.dumps(report),
        "numInputRows": 50,
        "inputRowsPerSecond": 0.0,
        "processedRowsPerSecond": 0.0,
    }
    made = StreamingQueryProgress.fromJson(
        {
            "id": QUERY,
            "runId": RUN,
            "name": "orders",
            "timestamp": NOW,
            "batchId": 3,
            "batchDuration": 400,
            "durationMs": {"triggerExecution": 400, **({"addBatch": 300} if batch else {})},
            "eventTime": {},
            "stateOperators": [],
            "sources": [source],
            "sink": {"description": "memory", "numOutputRows": 50},
            "numInputRows": 50,
            "inputRowsPerSecond": 0.0,
            "processedRowsPerSecond": 0.0,
            "observedMetrics": {},
        }
    )
    return QueryProgressEvent(made)


def test_progress_becomes_metrics_until_the_query_ends(metrics: Metrics) -> None:
    listener, values = metrics.listener, metrics.values
    run = {"id": QUERY, "runId": RUN, "timestamp": NOW}
    started = {**run, "name": "orders", "jobTags": []}
    listener.onQueryStarted(QueryStartedEvent.fromJson(started))
    listener.onQueryProgress(progress({**REPORT, "behindSeconds": None}, batch=False))
    assert (values("events"), values("behind"), values("caught_up")) == ([], [], [3])
    listener.onQueryProgress(progress())
    (events,) = metrics.points("events")
    assert events.value == 50
    assert dict(events.attributes) == {"feedapi.feed": FEED, "feedapi.spark.query": "orders"}
    (duration,) = metrics.points("batch.duration")
    assert (duration.count, duration.sum) == (1, 0.4)
    states = {
        p.attributes["feedapi.partition.state"]: p.value for p in metrics.points("partitions")
    }
    assert states == {"reading": 1, "caught_up": 2, "waiting": 0, "drained": 1, "failing": 0}
    for name, value in {"caught_up": 3, "behind": 1.5, "requests": 7, "idle": 0}.items():
        assert values(name) == [value]
    assert values("batches") == [1]
    listener.onQueryIdle(QueryIdleEvent.fromJson(run))
    assert (values("idle"), values("behind")) == ([1], [])
    ended = {**run, "exception": "StagingError: gone", "errorClassOnException": None}
    listener.onQueryTerminated(QueryTerminatedEvent.fromJson(ended))
    assert values("caught_up") == []
    (failure,) = metrics.points("failures")
    assert (failure.value, dict(failure.attributes)) == (1, {"feedapi.spark.query": "orders"})


@pytest.mark.parametrize("report", [None, "text", {"offset": 3}, [1]])
def test_sources_of_others_are_left_alone(metrics: Metrics, report: object) -> None:
    metrics.listener.onQueryProgress(progress(report))
    assert metrics.values("events") == []
    assert metrics.values("caught_up") == []


@pytest.mark.timeout(600)
def test_real_query_is_observed(spark: SparkSession, metrics: Metrics, tmp_path: Path) -> None:
    publisher = Publisher(partitions=2)
    for n in range(50):
        publisher.publish(f"e{n}", {"n": n})
    interval = "spark.sql.streaming.noDataProgressEventInterval"
    spark.conf.set(interval, "200ms")
    spark.streams.addListener(metrics.listener)
    try:
        with publisher.serve() as url:
            stream = (
                spark.readStream.format("feedapi")
                .option("stagingLocation", (tmp_path / "staging").as_uri())
                .load(str(url))
                .writeStream.format("noop")
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .queryName("observed")
            )
            stream = stream.trigger(processingTime="0 seconds")

            def until_idle() -> None:
                query = stream.start()
                while sum(metrics.values("events")) < 50 or metrics.values("idle") != [1]:
                    query.awaitTermination(1)  # raises what ended it
                assert metrics.values("requests")
                query.stop()

            despite_slow_workers(until_idle)
    finally:
        spark.conf.unset(interval)
        spark.streams.removeListener(metrics.listener)
    (events,) = metrics.points("events")
    assert dict(events.attributes) == {
        "feedapi.feed": str(url),
        "feedapi.spark.query": "observed",
    }
