"""`observe`: from a consumer to its metrics and spans, until the end of the block."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import feedapi_client.telemetry.metrics as metrics
from feedapi_client.model import Batch
from feedapi_client.status import ConsumerStatus, PartitionState
from feedapi_client.telemetry.gauges import MAX_PARTITIONS, Gauges
from feedapi_client.telemetry.instruments import Count, HistogramLike, Sink, instruments_of
from feedapi_client.telemetry.metrics import Metric
from feedapi_client.telemetry.spans import Spans

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Tracer

    from feedapi_client.consumer import FeedConsumer

ENDED = (
    PartitionState.DRAINED,
    PartitionState.SUPERSEDED,
    PartitionState.VANISHED,
    PartitionState.ELSEWHERE,
)
"""States of partitions that are not read, by this instance."""
_Operation = tuple[str, str | None]
_PROCESS: _Operation = ("process", None)
_FETCH: _Operation = ("fetch", "receive")
_COMMIT: _Operation = ("commit", "settle")


def observe(
    consumer: FeedConsumer, meter: Meter | None = None, tracer: Tracer | None = None
) -> Observation:
    """Export metrics and traces of a consumer, until the ``with`` block ends.

    ::

        with observe(consumer):
            await consumer.run(handle)

    For any number of consumers at a time, also of the same meter. `METRICS` lists what is exported.
    All of it carries ``messaging.system`` (``feedapi``), ``messaging.destination.name`` (the feed's
    URL without credentials and query) and ``messaging.consumer.group.name`` (the consumer's name).

    Durations do not tell partitions apart. Of a feed with more than 64 partitions counters don't
    either, and gauges only export the worst partition.

    Observing begins at the call and outlasts iterations. Counters keep their values when it ends,
    gauges are exported no more.

    Arguments:
        consumer: before or after it is entered.
        meter: the one to register the instruments with; by default of the global meter provider.
        tracer: the one that begins the spans; by default of the global tracer provider.
    """
    return Observation(consumer, instruments_of(meter), tracer)


class Observation:
    """What `observe` returns: observes a consumer until it is closed.

    Concurrency: to be closed in the event loop of the consumer, or when that has ended.
    """

    def __init__(self, consumer: FeedConsumer, sink: Sink, tracer: Tracer | None) -> None:
        self._consumer = consumer
        self._common: dict[str, Any] = {
            metrics.SYSTEM: "feedapi",
            metrics.DESTINATION: consumer.feed,
            metrics.GROUP: consumer.key.name,
        }
        self._sink = sink
        self._process = sink[metrics.PROCESS]
        self._operations = sink[metrics.OPERATIONS]
        self._discovery = sink[metrics.DISCOVERY]
        self._spans = Spans(tracer, self._common)
        self._attributes: dict[tuple[object, ...], dict[str, Any]] = {}
        self._counts = sink.totals.open()
        self._seen: set[int] = set()
        self._sink.gauges[id(self)] = Gauges(consumer, self._common, self._begin_counting)
        consumer._observers.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the observation. May be called again."""
        self._consumer._observers.remove(self)
        self._sink.gauges.pop(id(self), None)
        self._sink.totals.close(self._counts)
        self._spans.close()

    # ------------------------------------------------------------------ what the runtime tells

    def delivered(self, batch: Batch, requested_seconds_ago: float) -> None:
        """See `feedapi_client.runtime.observers.Observer`; likewise below."""
        self._seen.add(batch.partition)
        self._count(metrics.MESSAGES, batch.partition, len(batch.events), operation=_PROCESS)
        self._spans.delivered(batch, requested_seconds_ago)

    def handling(self, batch: Batch) -> AbstractContextManager[object]:
        """See `Observer`."""
        return self._spans.handling(batch)

    def released(self, partition: int, seconds: float, error: BaseException | None) -> None:
        """See `Observer`."""
        self._record(self._process, seconds, error, _PROCESS)
        self._spans.released(partition, error)

    def fetched(self, partition: int, seconds: float, error: BaseException | None) -> None:
        """See `Observer`."""
        # Only the conventions' histogram: a second one of the same durations would take the SDK
        # 90,000 instructions more, also for each commit. Their sum in a counter is almost free.
        self._seen.add(partition)
        self._record(self._operations, seconds, error, _FETCH)
        self._count(metrics.FETCH, None, seconds, error=_kind(error))

    def committed(self, partition: int, seconds: float, error: BaseException | None) -> None:
        """See `Observer`."""
        self._record(self._operations, seconds, error, _COMMIT)
        self._count(metrics.COMMIT, None, seconds, error=_kind(error))
        self._spans.committed(partition, seconds, error)

    def discovered(self, seconds: float, error: BaseException | None) -> None:
        """See `Observer`."""
        self._record(self._discovery, seconds, error)

    def handler_failed(self, partition: int, error: BaseException) -> None:  # noqa: ARG002
        """See `Observer`."""
        self._count(metrics.HANDLER_FAILURES, partition)

    def handler_retried(self, partition: int) -> None:
        """See `Observer`."""
        self._count(metrics.HANDLER_RETRIES, partition)

    def fetch_retried(self, partition: int, error: BaseException) -> None:  # noqa: ARG002
        """See `Observer`."""
        self._count(metrics.FETCH_RETRIES, partition)

    def quarantined(self, partition: int, error_type: str) -> None:  # noqa: ARG002
        """See `Observer`."""
        self._count(metrics.QUARANTINED, partition)

    def passed_over(self, partition: int, count: int) -> None:
        """See `Observer`."""
        self._count(metrics.PASSED_OVER, partition, count)

    # ------------------------------------------------------------------ series

    def _begin_counting(self, status: ConsumerStatus) -> None:
        """Have the counters of all partitions that may be read, before anything is counted.

        Called by any thread that exports.
        """
        read = [each.partition for each in status.partitions.values() if each.state not in ENDED]
        self._seen.update(read)
        for metric in metrics.FROM_THE_START:
            operation = _PROCESS if metric is metrics.MESSAGES else None
            for partition in read if len(self._seen) <= MAX_PARTITIONS else (None,):
                self._count(metric, partition, 0, operation=operation)

    def _record(
        self,
        histogram: HistogramLike,
        seconds: float,
        error: BaseException | None,
        operation: _Operation | None = None,
    ) -> None:
        kind = _kind(error)
        attributes = self._attributes.get((operation, None, kind))
        if attributes is None:
            attributes = self._labels(None, kind, operation)
        histogram.record(seconds, attributes)

    def _count(
        self,
        metric: Metric,
        partition: int | None,
        amount: float = 1,
        *,
        error: str | None = None,
        operation: _Operation | None = None,
    ) -> None:
        if len(self._seen) > MAX_PARTITIONS:
            partition = None
        key = (metric.name, partition, error)
        count = self._counts.get(key)
        if count is None:
            made = Count(metric, self._labels(partition, error, operation))
            count = self._counts.setdefault(key, made)  # a thread that exports may be faster
        if amount:
            count.value += amount

    def _labels(
        self, partition: int | None, error: str | None, operation: _Operation | None
    ) -> dict[str, Any]:
        """Return the attributes of a series. Each set of them is built once."""
        key = (operation, partition, error)
        found = self._attributes.get(key)
        if found is None:
            found = self._attributes.setdefault(key, self._built(partition, error, operation))
        return found

    def _built(
        self, partition: int | None, error: str | None, operation: _Operation | None
    ) -> dict[str, Any]:
        name, kind = operation or (None, None)
        own = {
            metrics.PARTITION: None if partition is None else str(partition),
            metrics.ERROR: error,
            metrics.OPERATION: name,
            metrics.OPERATION_TYPE: kind,
        }
        return self._common | {key: value for key, value in own.items() if value is not None}


def _kind(error: BaseException | None) -> str | None:
    return None if error is None else type(error).__qualname__
