"""Metrics of a consumer by OpenTelemetry (extra ``telemetry``): ``observe(consumer)``.

Values are observed when the metric reader asks for them, so consuming itself costs nothing. No
attribute holds a cursor, a payload, a credential or a query.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

try:
    from opentelemetry import metrics
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
except ImportError as error:
    raise ImportError(
        "feedapi_client.telemetry needs an extra: pip install 'feedapi-client[telemetry]'"
    ) from error

if TYPE_CHECKING:
    from feedapi_client.consumer import FeedConsumer


def observe(consumer: FeedConsumer, meter: Meter | None = None) -> None:
    """Register instruments for the consumer with `meter` (the global provider's unless given).

    - ``feedapi.consumer.events``: events delivered, by partition (counter)
    - ``feedapi.consumer.buffered``: bytes received and not yet taken (gauge)
    - ``feedapi.consumer.partitions``: partitions, by state (gauge)
    - ``feedapi.consumer.caught_up``: 1 where a partition is caught up, else 0 (gauge)

    All carry ``feedapi.feed`` (the URL without credentials and query) and
    ``feedapi.consumer.name``.
    """
    meter = meter or metrics.get_meter("feedapi_client")
    common = {"feedapi.feed": consumer.feed, "feedapi.consumer.name": consumer.key.name}

    def events(_: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(p.events, common | {"feedapi.partition": p.partition})
            for p in consumer.status().partitions.values()
        ]

    def buffered(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(consumer.status().buffered_bytes, common)]

    def partitions(_: CallbackOptions) -> Iterable[Observation]:
        states = Counter(p.state.value for p in consumer.status().partitions.values())
        return [
            Observation(count, common | {"feedapi.partition.state": state})
            for state, count in states.items()
        ]

    def caught_up(_: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(int(p.caught_up is True), common | {"feedapi.partition": p.partition})
            for p in consumer.status().partitions.values()
        ]

    meter.create_observable_counter(
        "feedapi.consumer.events",
        [events],
        unit="{event}",
        description="Events delivered to the application",
    )
    meter.create_observable_gauge(
        "feedapi.consumer.buffered",
        [buffered],
        unit="By",
        description="Bytes received and not yet taken",
    )
    meter.create_observable_gauge(
        "feedapi.consumer.partitions",
        [partitions],
        unit="{partition}",
        description="Partitions by state",
    )
    meter.create_observable_gauge(
        "feedapi.consumer.caught_up", [caught_up], description="Partitions at their end"
    )
