"""The metrics, as data: what is exported and what is documented come from this table."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kind of an instrument."""

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

MESSAGES = Metric(
    "messaging.client.consumed.messages",
    Kind.COUNTER,
    "{message}",
    "Events delivered to the application",
    (OPERATION, PARTITION),
)
PROCESS = Metric(
    "messaging.process.duration",
    Kind.HISTOGRAM,
    "s",
    "Time for which the application had a batch",
    (OPERATION, ERROR),
)
OPERATIONS = Metric(
    "messaging.client.operation.duration",
    Kind.HISTOGRAM,
    "s",
    "Duration of fetches and commits",
    (OPERATION, OPERATION_TYPE, ERROR),
)
FETCH = Metric(
    "feedapi.consumer.fetch.duration",
    Kind.COUNTER,
    "s",
    "Time in requests, up to the ends of their responses; a streamed one lasts long",
    (ERROR,),
)
COMMIT = Metric(
    "feedapi.consumer.commit.duration",
    Kind.COUNTER,
    "s",
    "Time in which cursors were saved",
    (ERROR,),
)
DISCOVERY = Metric(
    "feedapi.consumer.discovery.duration",
    Kind.HISTOGRAM,
    "s",
    "Duration of discoveries, after the first one",
    (ERROR,),
)
FETCH_RETRIES = Metric(
    "feedapi.consumer.fetch.retries",
    Kind.COUNTER,
    "{request}",
    "Requests that failed or were refused, and are made again",
    (PARTITION,),
)
HANDLER_FAILURES = Metric(
    "feedapi.consumer.handler.failures",
    Kind.COUNTER,
    "{failure}",
    "Times that the handler of run() raised",
    (PARTITION,),
)
HANDLER_RETRIES = Metric(
    "feedapi.consumer.handler.retries",
    Kind.COUNTER,
    "{attempt}",
    "Times that the handler got a batch again",
    (PARTITION,),
)
QUARANTINED = Metric(
    "feedapi.consumer.quarantined",
    Kind.COUNTER,
    "{event}",
    "Events put into quarantine, the dead-letter queue",
    (PARTITION,),
)
PASSED_OVER = Metric(
    "feedapi.consumer.passed_over",
    Kind.COUNTER,
    "{event}",
    "Events not handled by run_by_key(), because one with their event_id is done already",
    (PARTITION,),
)
BUFFERED = Metric(
    "feedapi.consumer.buffered",
    Kind.GAUGE,
    "By",
    "Bytes received and not yet delivered",
)
PARTITIONS = Metric(
    "feedapi.consumer.partitions",
    Kind.GAUGE,
    "{partition}",
    "Partitions by state",
    (STATE,),
)
CAUGHT_UP = Metric(
    "feedapi.consumer.caught_up",
    Kind.GAUGE,
    "1",
    "1 where everything that the publisher had is committed, else 0",
    (PARTITION,),
)
CAUGHT_UP_AGE = Metric(
    "feedapi.consumer.caught_up.age",
    Kind.GAUGE,
    "s",
    "Time since the partition was last caught up, or since the iteration began",
    (PARTITION,),
)
IN_FLIGHT_AGE = Metric(
    "feedapi.consumer.in_flight.age",
    Kind.GAUGE,
    "s",
    "For how long the application has had the batch in flight; 0 without one",
    (PARTITION,),
)
COMMIT_AGE = Metric(
    "feedapi.consumer.commit.age",
    Kind.GAUGE,
    "s",
    "Time since the last commit of this iteration",
    (PARTITION,),
)
LEASES = Metric(
    "feedapi.consumer.leases",
    Kind.GAUGE,
    "{partition}",
    "Partitions whose lease this instance holds, where several share the feed",
)
LIVE = Metric(
    "feedapi.consumer.live",
    Kind.GAUGE,
    "1",
    "0 if only a new process helps, else 1: Health.live",
)
READY = Metric(
    "feedapi.consumer.ready",
    Kind.GAUGE,
    "1",
    "1 while the consumer gets on or is at the end, else 0: Health.ready",
)
PROBLEMS = Metric(
    "feedapi.consumer.problems",
    Kind.GAUGE,
    "{problem}",
    "Problems by name: Health.problems",
    (PROBLEM,),
)

FROM_THE_START = (
    MESSAGES,
    FETCH_RETRIES,
    HANDLER_FAILURES,
    HANDLER_RETRIES,
    QUARANTINED,
    PASSED_OVER,
)
"""Counters that are there at 0 for every partition, before anything is counted: to Prometheus the
first occurrence is an increase only then. So they have no attribute that can't be known before,
such as the type of an error; the durations have that one."""

METRICS: tuple[Metric, ...] = (
    MESSAGES,
    PROCESS,
    OPERATIONS,
    FETCH,
    COMMIT,
    DISCOVERY,
    FETCH_RETRIES,
    HANDLER_FAILURES,
    HANDLER_RETRIES,
    QUARANTINED,
    PASSED_OVER,
    BUFFERED,
    PARTITIONS,
    CAUGHT_UP,
    CAUGHT_UP_AGE,
    IN_FLIGHT_AGE,
    COMMIT_AGE,
    LEASES,
    LIVE,
    READY,
    PROBLEMS,
)
"""All metrics."""
