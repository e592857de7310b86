"""The instruments of one meter, which all observed consumers share.

OpenTelemetry keeps the callbacks of the first instrument of a name, and ignores those of a second
one. So there is one set of instruments for each meter, and consumers come and go.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from opentelemetry import metrics as api
from opentelemetry.metrics import CallbackOptions, Meter
from opentelemetry.metrics import Observation as Value

from feedapi_client.telemetry.counts import Totals
from feedapi_client.telemetry.gauges import READS, Gauges, read_all
from feedapi_client.telemetry.metrics import METRICS, Kind, Metric

SCOPE = "feedapi_client"
BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 60.0, 300.0),
)
"""In seconds, as the conventions of messaging systems advise, and two more for slow handlers."""
_all: WeakKeyDictionary[Meter, Instruments] = WeakKeyDictionary()


class HistogramLike(Protocol):
    """What durations are recorded with: an instrument of a meter, or something cheaper."""

    def record(self, amount: float, attributes: dict[str, Any], /) -> None:
        """Add a duration in seconds. The same series always comes with the same dictionary."""
        ...


class Sink:
    """What observations write to: one for each way to export.

    Attributes:
        gauges: the consumers whose gauges are read, by the observation.
        totals: the counters of the consumers.
    """

    def __init__(self) -> None:
        self.gauges: dict[int, Gauges] = {}
        self.totals = Totals()

    def read(self, metric: Metric) -> Iterator[Value]:
        """Return the values of a counter or gauge."""
        if metric.kind is Kind.COUNTER:
            return self.totals.read(metric)
        return read_all(READS[metric], self.gauges.values())

    def __getitem__(self, metric: Metric) -> HistogramLike:
        """Return what records a histogram."""
        raise NotImplementedError


class Instruments(Sink):
    """The instruments of a meter, and the consumers that they read."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._made = {metric: self._make(meter, metric) for metric in METRICS}

    def _make(self, meter: Meter, metric: Metric) -> Any:
        named = {"unit": metric.unit, "description": metric.description}
        if metric.kind is Kind.HISTOGRAM:
            return meter.create_histogram(
                metric.name,
                metric.unit,
                metric.description,
                explicit_bucket_boundaries_advisory=BUCKETS,
            )
        callback = partial(self._read, metric)
        if metric.kind is Kind.COUNTER:
            return meter.create_observable_counter(metric.name, [callback], **named)
        return meter.create_observable_gauge(metric.name, [callback], **named)

    def _read(self, metric: Metric, _: CallbackOptions) -> Iterator[Value]:
        return self.read(metric)

    def __getitem__(self, metric: Metric) -> HistogramLike:
        made: HistogramLike = self._made[metric]
        return made


def instruments_of(meter: Meter | None) -> Instruments:
    """Return the instruments of a meter; of the global provider's without one."""
    meter = _global_meter() if meter is None else meter
    if meter not in _all:
        _all[meter] = Instruments(meter)
    return _all[meter]


@cache
def _global_meter() -> Meter:
    # Always the same one. Before an application has set its provider, each call returns another
    # proxy, whose instruments would be the second ones of their names.
    return api.get_meter(SCOPE)
