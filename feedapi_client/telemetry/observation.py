"""`observe`: from a consumer to its metrics and spans, until the end of the block."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import feedapi_client.telemetry.metrics as metrics
from feedapi_client.model import Batch
from feedapi_client.telemetry.gauges import TOLD_APART, Gauges
from feedapi_client.telemetry.instruments import instruments_of
from feedapi_client.telemetry.metrics import Metric
from feedapi_client.telemetry.spans import Spans

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Tracer

    from feedapi_client.consumer import FeedConsumer

HISTOGRAMS_TOLD_APART = 100
"""Partitions that histograms tell apart: each of their series has some twenty numbers."""


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

    Of a feed with more than 100 partitions histograms do not tell the partitions apart, and of one
    with more than 1000 counters don't, and gauges only export the worst partition.

    Observing begins at the call and outlasts iterations. Counters keep their values when it ends,
    gauges are exported no more.

    Arguments:
        consumer: before or after it is entered.
        meter: the one to register the instruments with; by default of the global meter provider.
        tracer: the one that begins the spans; by default of the global tracer provider.
    """
    return Observation(consumer, meter, tracer)


class Observation:
    """What `observe` returns: observes a consumer until it is closed."""

    def __init__(self, consumer: FeedConsumer, meter: Meter | None, tracer: Tracer | None) -> None:
        self._consumer = consumer
        self._common: dict[str, Any] = {
            metrics.SYSTEM: "feedapi",
            metrics.DESTINATION: consumer.feed,
            metrics.GROUP: consumer.key.name,
        }
        self._instruments = instruments_of(meter)
        self._spans = Spans(tracer, self._common)
        self._attributes: dict[tuple[object, ...], dict[str, Any]] = {}
        self._seen: set[int] = set()
        self._instruments.gauges[id(self)] = Gauges(consumer, self._common)
        consumer.observers.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the observation. May be called again."""
        self._consumer.observers.remove(self)
        self._instruments.gauges.pop(id(self), None)
        self._spans.close()

    # ------------------------------------------------------------------ what the runtime tells

    def delivered(self, batch: Batch, requested_seconds_ago: float) -> None:
        """See `feedapi_client.runtime.observers.Observer`; likewise below."""
        self._seen.add(batch.partition)
        attributes = self._labels(metrics.MESSAGES, batch.partition, operation=("process", None))
        self._instruments[metrics.MESSAGES].add(len(batch.events), attributes)
        self._spans.delivered(batch, requested_seconds_ago)

    def handling(self, batch: Batch) -> AbstractContextManager[object]:
        """See `Observer`."""
        return self._spans.handling(batch)

    def released(self, partition: int, seconds: float, error: BaseException | None) -> None:
        """See `Observer`."""
        self._record(metrics.PROCESS, partition, seconds, error, ("process", "process"))
        self._spans.released(partition, error)

    def fetched(self, partition: int, seconds: float, error: BaseException | None) -> None:
        """See `Observer`."""
        self._seen.add(partition)
        self._record(metrics.OPERATIONS, partition, seconds, error, ("fetch", "receive"))
        self._record(metrics.FETCH, partition, seconds, error)

    def committed(self, partition: int, seconds: float, error: BaseException | None) -> None:
        """See `Observer`."""
        self._record(metrics.OPERATIONS, partition, seconds, error, ("commit", "settle"))
        self._record(metrics.COMMIT, partition, seconds, error)
        self._spans.committed(partition, seconds, error)

    def discovered(self, seconds: float, error: BaseException | None) -> None:
        """See `Observer`."""
        self._record(metrics.DISCOVERY, None, seconds, error)

    def handler_failed(self, partition: int, error: BaseException) -> None:
        """See `Observer`."""
        self._count(metrics.HANDLER_FAILURES, partition, type(error).__qualname__)

    def handler_retried(self, partition: int) -> None:
        """See `Observer`."""
        self._count(metrics.HANDLER_RETRIES, partition)

    def fetch_retried(self, partition: int, error: BaseException) -> None:
        """See `Observer`."""
        self._count(metrics.FETCH_RETRIES, partition, type(error).__qualname__)

    def quarantined(self, partition: int, error_type: str) -> None:
        """See `Observer`."""
        self._count(metrics.QUARANTINED, partition, error_type)

    # ------------------------------------------------------------------ attributes

    def _record(
        self,
        metric: Metric,
        partition: int | None,
        seconds: float,
        error: BaseException | None,
        operation: tuple[str, str | None] | None = None,
    ) -> None:
        kind = None if error is None else type(error).__qualname__
        attributes = self._labels(metric, partition, kind, operation)
        self._instruments[metric].record(seconds, attributes)

    def _count(self, metric: Metric, partition: int, error: str | None = None) -> None:
        self._instruments[metric].add(1, self._labels(metric, partition, error))

    def _labels(
        self,
        metric: Metric,
        partition: int | None,
        error: str | None = None,
        operation: tuple[str, str | None] | None = None,
    ) -> dict[str, Any]:
        """Return the attributes of a measurement. Each set of them is built once."""
        most = HISTOGRAMS_TOLD_APART if metric.kind is metrics.Kind.HISTOGRAM else TOLD_APART
        if len(self._seen) > most:
            partition = None
        key = (operation, partition, error)
        if key not in self._attributes:
            attributes = dict(self._common)
            if partition is not None:
                attributes[metrics.PARTITION] = str(partition)
            if error is not None:
                attributes[metrics.ERROR] = error
            if operation is not None:
                names = (metrics.OPERATION, metrics.OPERATION_TYPE)
                attributes |= {
                    name: value
                    for name, value in zip(names, operation, strict=True)
                    if value is not None
                }
            self._attributes[key] = attributes
        return self._attributes[key]
