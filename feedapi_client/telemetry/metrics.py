"""The metrics, as data: what is exported and what is documented come from this table."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


class Metric(NamedTuple):
    """One metric.

    Attributes:
        name: as OpenTelemetry knows it. Prometheus' name has underscores and the unit in it.
        kind: counter, histogram or gauge.
        unit: in UCUM's notation.
        description: what it says.
        attributes: those beside the ones that every metric carries.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    attributes: tuple[str, ...] = ()


SYSTEM = "messaging.system"
DESTINATION = "messaging.destination.name"
GROUP = "messaging.consumer.group.name"
PARTITION = "messaging.destination.partition.id"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
ERROR = "error.type"
STATE = "feedapi.partition.state"
PROBLEM = "feedapi.problem"

_COUNTER, _HISTOGRAM, _GAUGE = Kind.COUNTER, Kind.HISTOGRAM, Kind.GAUGE
_OWN = "feedapi.consumer."
# fmt: off
METRICS: tuple[Metric, ...] = (
    MESSAGES := Metric("messaging.client.consumed.messages", _COUNTER, "{message}",
        "Events delivered to the application", (OPERATION, PARTITION)),
    PROCESS := Metric("messaging.process.duration", _HISTOGRAM, "s",
        "Time for which the application had a batch", (OPERATION, ERROR)),
    OPERATIONS := Metric("messaging.client.operation.duration", _HISTOGRAM, "s",
        "Duration of fetches and commits", (OPERATION, OPERATION_TYPE, ERROR)),
    FETCH := Metric(_OWN + "fetch.duration", _COUNTER, "s",
        "Time in requests, up to the ends of their responses; a streamed one lasts long",
        (ERROR,)),
    COMMIT := Metric(_OWN + "commit.duration", _COUNTER, "s",
        "Time in which cursors were saved", (ERROR,)),
    DISCOVERY := Metric(_OWN + "discovery.duration", _HISTOGRAM, "s",
        "Duration of discoveries, after the first one", (ERROR,)),
    FETCH_RETRIES := Metric(_OWN + "fetch.retries", _COUNTER, "{request}",
        "Requests that failed or were refused, and are made again", (PARTITION,)),
    HANDLER_FAILURES := Metric(_OWN + "handler.failures", _COUNTER, "{failure}",
        "Times that the handler of run() raised", (PARTITION,)),
    HANDLER_RETRIES := Metric(_OWN + "handler.retries", _COUNTER, "{attempt}",
        "Times that the handler got a batch again", (PARTITION,)),
    QUARANTINED := Metric(_OWN + "quarantined", _COUNTER, "{event}",
        "Events put into quarantine, the dead-letter queue", (PARTITION,)),
    PASSED_OVER := Metric(_OWN + "passed_over", _COUNTER, "{event}",
        "Events not handled by run_by_key(), because one with their event_id is done already",
        (PARTITION,)),
    BUFFERED := Metric(_OWN + "buffered", _GAUGE, "By",
        "Bytes received and not yet delivered"),
    PARTITIONS := Metric(_OWN + "partitions", _GAUGE, "{partition}",
        "Partitions by state", (STATE,)),
    CAUGHT_UP := Metric(_OWN + "caught_up", _GAUGE, "1",
        "1 where everything that the publisher had is committed, else 0", (PARTITION,)),
    CAUGHT_UP_AGE := Metric(_OWN + "caught_up.age", _GAUGE, "s",
        "Time since the partition was last caught up, or since the iteration began",
        (PARTITION,)),
    IN_FLIGHT_AGE := Metric(_OWN + "in_flight.age", _GAUGE, "s",
        "For how long the application has had the batch in flight; 0 without one", (PARTITION,)),
    COMMIT_AGE := Metric(_OWN + "commit.age", _GAUGE, "s",
        "Time since the last commit of this iteration", (PARTITION,)),
    LEASES := Metric(_OWN + "leases", _GAUGE, "{partition}",
        "Partitions whose lease this instance holds, where several share the feed"),
    LIVE := Metric(_OWN + "live", _GAUGE, "1",
        "0 if only a new process helps, else 1: Health.live"),
    READY := Metric(_OWN + "ready", _GAUGE, "1",
        "1 while the consumer gets on or is at the end, else 0: Health.ready"),
    PROBLEMS := Metric(_OWN + "problems", _GAUGE, "{problem}",
        "Problems by name: Health.problems", (PROBLEM,)),
)
# fmt: on
"""All metrics."""

FROM_THE_START = tuple(
    metric for metric in METRICS if metric.kind is _COUNTER and PARTITION in metric.attributes
)
"""Counters that are there at 0 for every partition, before anything is counted: to Prometheus the
first occurrence is an increase only then. So they have no attribute that can't be known before,
such as the type of an error; the durations have that one."""
