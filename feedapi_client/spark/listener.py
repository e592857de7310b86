"""Metrics of streaming queries by OpenTelemetry (extra ``telemetry``)::

    spark.streams.addListener(FeedQueryListener())

Works in a session of Spark itself and over Spark Connect. No attribute holds a cursor, a payload,
a credential or a query string.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

try:
    from opentelemetry import metrics
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
except ImportError as error:
    raise ImportError(
        "feedapi_client.spark.listener needs an extra: pip install 'feedapi-client[telemetry]'"
    ) from error

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

Report = Mapping[str, Any]
Attributes = Mapping[str, str]

__all__ = ["FeedQueryListener"]

_STATES = {
    "reading": "reading",
    "caughtUp": "caught_up",
    "waiting": "waiting",
    "drained": "drained",
    "failing": "failing",
}
_GAUGES = (
    ("requests", "requests", "{request}", "Requests of the last epoch and the polls before it"),
    ("retries", "retries", "{retry}", "Requests of the last epoch that were repeated"),
    ("caughtUpPartitions", "caught_up", "{partition}", "Partitions at their end"),
    ("behindSeconds", "behind", "s", "Longest time since a partition that is not at its end was"),
    ("idle", "idle", "{query}", "1 while the query finds nothing new, else 0"),
)
"""Of each gauge: the field of the report, its name, unit and description."""


class FeedQueryListener(StreamingQueryListener):
    """Exports the progress of all queries of a session that read feeds.

    The guide to Spark lists the instruments, ``feedapi.spark.*``. A sink that reads a micro-batch
    twice counts its events twice. All but ``failures`` carry ``feedapi.feed`` (the URL without
    credentials and query). All carry ``feedapi.spark.query``, the query's name, or its id. The
    gauges of a query end with it.

    Concurrency: Spark calls it from a thread of its own, one event after the other.

    Arguments:
        meter: the global provider's unless given.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        meter = meter or metrics.get_meter("feedapi_client")
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._reports: dict[str, list[tuple[Attributes, Report]]] = {}
        self._events = meter.create_counter("feedapi.spark.events", "{event}", "Events read")
        self._batches = meter.create_counter("feedapi.spark.batches", "{batch}", "Micro-batches")
        self._failures = meter.create_counter(
            "feedapi.spark.failures", "{query}", "Queries that ended with an error"
        )
        self._duration = meter.create_histogram(
            "feedapi.spark.batch.duration", "s", "Time of a micro-batch"
        )
        meter.create_observable_gauge(
            "feedapi.spark.partitions", [self._by_state], "{partition}", "Partitions by state"
        )
        for field, name, unit, description in _GAUGES:
            callbacks = [partial(self._observe, field)]
            meter.create_observable_gauge(f"feedapi.spark.{name}", callbacks, unit, description)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """Remember the name of the query."""
        with self._lock:
            self._names[str(event.id)] = event.name or str(event.id)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Record a trigger."""
        progress = event.progress
        query = progress.name or str(progress.id)
        found = [
            (rows, {"feedapi.feed": str(report["feed"]), "feedapi.spark.query": query}, report)
            for rows, report in _reports(progress)
        ]
        with self._lock:
            self._reports[str(progress.id)] = [
                (common, {**report, "idle": 0}) for _, common, report in found
            ]
        milliseconds = progress.durationMs.get("addBatch")
        for rows, common, _ in found:
            if milliseconds is None:  # Spark started no micro-batch
                continue
            self._events.add(rows, common)
            self._batches.add(1, common)
            total = progress.durationMs.get("triggerExecution", milliseconds)
            self._duration.record(total / 1000, common)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Note that nothing is new. Spark sends no progress then."""
        with self._lock:
            self._reports[str(event.id)] = [
                (common, {**report, "idle": 1, "behindSeconds": None})
                for common, report in self._reports.get(str(event.id), [])
            ]

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Count a failure, and end the gauges."""
        with self._lock:
            read_feeds = bool(self._reports.pop(str(event.id), None))
            name = self._names.pop(str(event.id), str(event.id))
        if event.exception is not None and (read_feeds or "feedapi" in event.exception):
            self._failures.add(1, {"feedapi.spark.query": name})

    def _current(self) -> list[tuple[Attributes, Report]]:
        with self._lock:
            return [one for several in self._reports.values() for one in several]

    def _by_state(self, _: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(report[field], {**common, "feedapi.partition.state": state})
            for common, report in self._current()
            for field, state in _STATES.items()
            if field in report
        ]

    def _observe(self, field: str, _: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(report[field], common)
            for common, report in self._current()
            if report.get(field) is not None
        ]


def _reports(progress: StreamingQueryProgress) -> Iterator[tuple[int, Report]]:
    """Yield events and `ProgressReport` of each source that is a feed."""
    for source in progress.sources:
        try:
            report = json.loads(source.latestOffset or "null")
        except (TypeError, ValueError):
            continue  # another source's
        if isinstance(report, dict) and "caughtUpPartitions" in report and "feed" in report:
            yield source.numInputRows, report
