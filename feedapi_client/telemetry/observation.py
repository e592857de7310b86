"""`observe`: from a consumer to its metrics and spans, until the end of the block."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

import feedapi_client.telemetry.metrics as metrics
from feedapi_client.notifications import (
    BatchCommitted,
    BatchDelivered,
    BatchFetched,
    BatchReleased,
    CommitFailed,
    DiscoveryEnded,
    EventQuarantined,
    EventsPassedOver,
    FetchEnded,
    FetchRetried,
    HandlerFailed,
    HandlerRetried,
)
from feedapi_client.telemetry.meters import SCOPE, Look, Measured, Meters, instruments_of

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

    from feedapi_client.consumer import FeedConsumer

_COUNTED = {
    FetchRetried: metrics.FETCH_RETRIES,
    HandlerFailed: metrics.HANDLER_FAILURES,
    HandlerRetried: metrics.HANDLER_RETRIES,
    EventQuarantined: metrics.QUARANTINED,
}
_NO_CONTEXT = nullcontext()


def observe(
    consumer: FeedConsumer, meter: Meter | None = None, tracer: Tracer | None = None
) -> Observation:
    """Export metrics and traces of a consumer, until the ``with`` block ends.

    ::

        with observe(consumer):
            await consumer.run(handle)

    For any number of consumers at a time, also of the same meter. `METRICS` lists what is exported.
    All of it carries system, destination (the feed's URL without credentials and query) and
    consumer group. Durations do not tell partitions apart. Of a feed with more than 64 partitions
    counters don't either, and gauges only export the worst one.

    Observing begins at the call and outlasts iterations. Counters keep their values when it ends.

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

    def __init__(
        self,
        consumer: FeedConsumer,
        meters: Meters,
        tracer: Tracer | None,
        _look: Look | None = None,
    ) -> None:
        common = {
            metrics.SYSTEM: "feedapi",
            metrics.DESTINATION: consumer.feed,
            metrics.GROUP: consumer.key.name,
        }
        look = _look or (lambda: (consumer.status(), consumer.health()))
        self._measured = Measured(common, lambda: consumer.instance, look, meters)
        self._meters = meters
        self._spans = _Spans(tracer, common)
        self._listeners = consumer._listeners
        self._meters.attach(self._measured)
        self._listeners.attach(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the observation. May be called again."""
        self._listeners.detach(self)
        self._meters.detach(self._measured)
        self._spans.close()

    def handling(self, partition: int, /) -> AbstractContextManager[object]:
        """See `feedapi_client.notifications.InnerListener`."""
        return self._spans.current(partition)

    def told(self, happened: object, cause: BaseException | None, /) -> None:
        """See `feedapi_client.notifications.InnerListener`."""
        if (take := _TAKES.get(type(happened))) is not None:
            take(self, happened, None if cause is None else type(cause).__qualname__)

    def _delivered(self, told: BatchDelivered, _: str | None) -> None:
        self._measured.add(
            metrics.MESSAGES, told.events, partition=told.partition, operation="process"
        )
        self._spans.begin(told.partition, told.events)

    def _fetched(self, told: BatchFetched, _: str | None) -> None:
        self._spans.add(told.partition, "fetch", "receive", told.seconds_ago, None)

    def _fetch_ended(self, told: FetchEnded, error: str | None) -> None:
        # Only the conventions' histogram: a second one of the same durations would take the SDK
        # 90,000 instructions more, also for each commit. Their sum in a counter is almost free.
        self._measured.add(metrics.OPERATIONS, told.seconds, error=error, operation="fetch")
        self._measured.add(metrics.FETCH, told.seconds, error=error)

    def _committed(self, told: BatchCommitted | CommitFailed, error: str | None) -> None:
        self._measured.add(metrics.OPERATIONS, told.seconds, error=error, operation="commit")
        self._measured.add(metrics.COMMIT, told.seconds, error=error)
        self._spans.add(told.partition, "commit", "settle", told.seconds, error)

    def _released(self, told: BatchReleased, error: str | None) -> None:
        self._measured.add(metrics.PROCESS, told.seconds, error=error, operation="process")
        self._spans.end(told.partition, error)

    def _discovered(self, told: DiscoveryEnded, error: str | None) -> None:
        self._measured.add(metrics.DISCOVERY, told.seconds, error=error)

    def _passed_over(self, told: EventsPassedOver, _: str | None) -> None:
        self._measured.add(metrics.PASSED_OVER, told.events, partition=told.partition)

    def _counted(self, told: Any, _: str | None) -> None:
        self._measured.add(_COUNTED[type(told)], 1, partition=told.partition)


# By type, which takes a tenth of the time that a match does: it is done several times a batch.
_TAKES: dict[type, Callable[[Observation, Any, str | None], None]] = {
    BatchDelivered: Observation._delivered,
    BatchFetched: Observation._fetched,
    FetchEnded: Observation._fetch_ended,
    BatchCommitted: Observation._committed,
    CommitFailed: Observation._committed,
    BatchReleased: Observation._released,
    DiscoveryEnded: Observation._discovered,
    EventsPassedOver: Observation._passed_over,
    **dict.fromkeys(_COUNTED, Observation._counted),
}


class _Spans:
    """One ``process`` a batch, with ``fetch`` and ``commit`` below it.

    Without a tracer that of the global provider, also if the application sets that one later.
    """

    def __init__(self, tracer: Tracer | None, common: dict[str, str]) -> None:
        self._tracer = trace.get_tracer(SCOPE) if tracer is None else tracer
        self._common = common
        self._open: dict[int, Span] = {}

    def begin(self, partition: int, events: int) -> None:
        if self._open:
            self.end(partition, None)
        count = {"messaging.batch.message_count": events}
        span = self._start(partition, "process", "process", SpanKind.CONSUMER, count)
        if span.is_recording():
            self._open[partition] = span

    def current(self, partition: int) -> AbstractContextManager[object]:
        span = self._open.get(partition)
        if span is None:
            return _NO_CONTEXT
        # The exception is not recorded: its text may hold a payload.
        return trace.use_span(
            span, end_on_exit=False, record_exception=False, set_status_on_exception=False
        )

    def add(self, partition: int, name: str, kind: str, seconds: float, error: str | None) -> None:
        if (parent := self._open.get(partition)) is not None:
            now = time.time_ns()
            below = trace.set_span_in_context(parent)
            begun = {"context": below, "start_time": now - int(seconds * 1e9)}
            _end(self._start(partition, name, kind, SpanKind.CLIENT, {}, **begun), error, now)

    def end(self, partition: int, error: str | None) -> None:
        if (span := self._open.pop(partition, None)) is not None:
            _end(span, error)

    def close(self) -> None:
        for partition in list(self._open):
            self.end(partition, None)

    def _start(
        self, partition: int, name: str, kind: str, of: SpanKind, more: dict[str, Any], **begun: Any
    ) -> Span:
        own = {
            metrics.OPERATION: name,
            metrics.OPERATION_TYPE: kind,
            metrics.PARTITION: str(partition),
        }
        attributes = self._common | own | more
        named = f"{name} {self._common[metrics.DESTINATION]}"
        return self._tracer.start_span(named, kind=of, attributes=attributes, **begun)


def _end(span: Span, error: str | None, now: int | None = None) -> None:
    if error is not None:
        span.set_attribute(metrics.ERROR, error)
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(now)
