"""Spans: one ``process`` a batch, with ``fetch`` and ``commit`` below it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

import feedapi_client.telemetry.metrics as metrics
from feedapi_client.model import Batch

SCOPE = "feedapi_client"
_NO_CONTEXT = nullcontext()
_NANOSECONDS = 1_000_000_000
_LOOK_SECONDS = 1.0
"""How often to look whether the application has set a provider: that reads the environment."""


class Spans:
    """The spans of one consumer.

    Arguments:
        tracer: None for that of the global provider. As long as the application has not set one,
            no span is begun; those of batches are within a second after it has.
        common: the attributes of every span.
    """

    def __init__(self, tracer: Tracer | None, common: dict[str, Any]) -> None:
        self._tracer = trace.get_tracer(SCOPE) if tracer is None else tracer
        self._off = isinstance(self._tracer, trace.NoOpTracer)
        # When to look next for a provider; None when there is no need to.
        self._look_at: float | None = float("-inf") if tracer is None else None
        self._common = common
        self._destination = common[metrics.DESTINATION]
        self._open: dict[int, Span] = {}

    def delivered(self, batch: Batch, requested_seconds_ago: float) -> None:
        """Begin the span of a batch. The fetch that brought it is over, and becomes its child."""
        if self._open:
            self._end(batch.partition, None)
        if self._off or (self._look_at is not None and self._no_provider()):
            return
        span = self._tracer.start_span(
            f"process {self._destination}",
            kind=SpanKind.CONSUMER,
            attributes=self._attributes("process", "process", batch.partition)
            | {"messaging.batch.message_count": len(batch.events)},
        )
        if not span.is_recording():
            return
        self._open[batch.partition] = span
        self._child(batch.partition, "fetch", "receive", requested_seconds_ago, None)

    def handling(self, batch: Batch) -> AbstractContextManager[object]:
        """Make the span the current one, so that spans of the handler are below it."""
        span = self._open.get(batch.partition)
        if span is None:
            return _NO_CONTEXT
        # The exception is not recorded: its text may hold a payload.
        return trace.use_span(
            span, end_on_exit=False, record_exception=False, set_status_on_exception=False
        )

    def committed(self, partition: int, seconds: float, error: BaseException | None) -> None:
        """Add the commit of the batch in flight."""
        if self._open:
            self._child(partition, "commit", "settle", seconds, error)

    def released(self, partition: int, error: BaseException | None) -> None:
        """End the span of a batch."""
        if self._open:
            self._end(partition, error)

    def close(self) -> None:
        """End the spans of batches that nobody has finished."""
        for partition in list(self._open):
            self._end(partition, None)

    def _no_provider(self) -> bool:
        """Whether the application has not set a global provider, as far as was looked."""
        now = time.monotonic()
        if self._look_at is not None and now >= self._look_at:
            missing = isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
            self._look_at = now + _LOOK_SECONDS if missing else None
        return self._look_at is not None

    def _end(self, partition: int, error: BaseException | None) -> None:
        span = self._open.pop(partition, None)
        if span is not None:
            _fail(span, error)
            span.end()

    def _child(
        self, partition: int, name: str, kind: str, seconds: float, error: BaseException | None
    ) -> None:
        parent = self._open.get(partition)
        if parent is None:
            return
        now = time.time_ns()
        span = self._tracer.start_span(
            f"{name} {self._destination}",
            context=trace.set_span_in_context(parent),
            kind=SpanKind.CLIENT,
            attributes=self._attributes(name, kind, partition),
            start_time=now - int(seconds * _NANOSECONDS),
        )
        _fail(span, error)
        span.end(now)

    def _attributes(self, name: str, kind: str, partition: int) -> dict[str, Any]:
        return self._common | {
            metrics.OPERATION: name,
            metrics.OPERATION_TYPE: kind,
            metrics.PARTITION: str(partition),
        }


def _fail(span: Span, error: BaseException | None) -> None:
    if error is not None:
        span.set_attribute(metrics.ERROR, type(error).__qualname__)
        span.set_status(Status(StatusCode.ERROR, type(error).__qualname__))
