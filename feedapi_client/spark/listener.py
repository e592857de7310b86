"""Metrics of streaming queries by OpenTelemetry (extra ``telemetry``)::

    spark.streams.addListener(FeedQueryListener())

Works in a session of Spark itself and over Spark Connect. No attribute holds a cursor, a payload,
a credential or a query string.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
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

__all__ = ["FeedQueryListener"]

_STATES = ("reading", "caughtUp", "waiting", "drained", "failing")
_GAUGES = (
    ("partitions", "{partition}", "Partitions by state", _STATES),
    ("requests", "{request}", "Polls since the last micro-batch", ["requests"]),
    ("caught_up", "{partition}", "Partitions at their end", ["caughtUpPartitions"]),
    ("behind", "s", "Longest time since a partition was at its end", ["behindSeconds"]),
    ("idle", "{query}", "1 while the query finds nothing new, else 0", ["idle"]),
)
"""Of each gauge: its name, unit, description, and the fields of the report that it shows."""


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
        self._reports: dict[str, list[tuple[dict[str, str], dict[str, Any]]]] = {}
        counter = meter.create_counter
        self._events = counter("feedapi.spark.events", "{event}", "Events read")
        self._batches = counter("feedapi.spark.batches", "{batch}", "Micro-batches")
        self._failures = counter("feedapi.spark.failures", "{query}", "Queries that failed")
        self._duration = meter.create_histogram(
            "feedapi.spark.batch.duration", "s", "Time of a micro-batch"
        )
        for name, unit, description, fields in _GAUGES:
            observe = partial(self._observe, fields)
            meter.create_observable_gauge(f"feedapi.spark.{name}", [observe], unit, description)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """Remember the name of the query."""
        self._names[str(event.id)] = event.name or str(event.id)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Record a trigger."""
        progress = event.progress
        query, took = progress.name or str(progress.id), progress.durationMs
        reports = []
        for rows, report in _reports(progress):
            common = {"feedapi.feed": str(report["feed"]), "feedapi.spark.query": query}
            reports.append((common, {**report, "idle": 0}))
            if "addBatch" in took:  # else Spark started no micro-batch
                self._events.add(rows, common)
                self._batches.add(1, common)
                self._duration.record(took.get("triggerExecution", took["addBatch"]) / 1000, common)
        with self._lock:
            self._reports[str(progress.id)] = reports

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Note that nothing is new. Spark sends no progress then."""
        with self._lock:
            for _, report in self._reports.get(str(event.id), []):
                report |= {"idle": 1, "behindSeconds": None}

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Count a failure, and end the gauges."""
        with self._lock:
            read_feeds = bool(self._reports.pop(str(event.id), None))
        name = self._names.pop(str(event.id), str(event.id))
        if event.exception is not None and (read_feeds or "feedapi" in event.exception):
            self._failures.add(1, {"feedapi.spark.query": name})

    def _observe(self, fields: Sequence[str], _: CallbackOptions) -> list[Observation]:
        with self._lock:
            reports = [one for several in self._reports.values() for one in several]
            return [
                Observation(report[field], {**common, **_attributes(field)})
                for common, report in reports
                for field in fields
                if report.get(field) is not None
            ]


def _attributes(field: str) -> dict[str, str]:
    state = "caught_up" if field == "caughtUp" else field
    return {"feedapi.partition.state": state} if field in _STATES else {}


def _reports(progress: StreamingQueryProgress) -> Iterator[tuple[int, dict[str, Any]]]:
    for source in progress.sources:
        try:
            report = json.loads(source.latestOffset or "null")
        except (TypeError, ValueError):
            continue  # another source's
        if isinstance(report, dict) and {"caughtUpPartitions", "feed"} <= report.keys():
            yield source.numInputRows, report
