"""The status of consumers as JSON: what ``/status`` gives, and what the page is drawn from."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from feedapi_client.model import Partition
from feedapi_client.monitor.snapshots import ConsumerSnapshots, Snapshot
from feedapi_client.status import Health, PartitionStatus, Problem

_MAX_TEXT = 200
SHOWN = 100
"""Problems that are listed."""
_FIELDS = tuple(field.name for field in fields(PartitionStatus))
_STARTED = datetime.now(UTC)

Quarantined = Mapping[str, Any] | None


def status_json(seen: ConsumerSnapshots, quarantined: Sequence[Quarantined]) -> dict[str, Any]:
    """Return everything that is known, in values that JSON has.

    What is None, 0 or empty is left out of a partition: there may be thousands of them.
    """
    from feedapi_client import __version__

    return {
        "version": __version__,
        "time": datetime.now(UTC),
        "process": {"host": socket.gethostname(), "pid": os.getpid(), "started": _STARTED},
        "consumers": [
            _consumer(snapshot, found)
            for snapshot, found in zip(seen.snapshots, quarantined, strict=True)
        ],
        "blocked": problem_json(seen.blocked) if seen.blocked else None,
    }


def health_json(seen: ConsumerSnapshots) -> dict[str, Any]:
    """Return whether all consumers are live, whether all are ready, and what is wrong."""
    healths = [snapshot.health for snapshot in seen.snapshots]
    problems = [problem for health in healths for problem in health.problems]
    if seen.blocked is not None:
        problems.insert(0, seen.blocked)
    return {
        "live": seen.live and all(health.live for health in healths),
        "ready": (
            bool(healths) and seen.blocked is None and all(health.ready for health in healths)
        ),
        **_problems(problems),
    }


def problem_json(problem: Problem) -> dict[str, Any]:
    """Return one problem."""
    return {
        "name": problem.name,
        "partition": problem.partition,
        "since": problem.since,
        "text": problem.text,
    }


def _consumer(snapshot: Snapshot, quarantined: Quarantined) -> dict[str, Any]:
    status, partitions = snapshot.status, snapshot.status.partitions
    return {
        "feed": status.feed,
        "name": snapshot.name,
        "time": snapshot.time,
        "dialect": status.dialect,
        "events": status.events,
        "buffered_bytes": status.buffered_bytes,
        "health": _health(snapshot.health),
        "states": Counter(partition.state.value for partition in partitions.values()),
        "owners": Counter(each.owner for each in partitions.values() if each.owner is not None),
        "quarantine": quarantined,
        "reports": status.reports,
        "partitions": [
            _partition(partition, snapshot.topology.get(id)) for id, partition in partitions.items()
        ],
    }


def _health(health: Health) -> dict[str, Any]:
    return {
        "live": health.live,
        "ready": health.ready,
        **_problems(health.problems),
    }


def _problems(problems: Sequence[Problem]) -> dict[str, Any]:
    """The oldest ones, and how many there are: an outage makes each of 32,768 partitions fail."""
    shown = [problem_json(problem) for problem in problems[:SHOWN]]
    return {"problem_count": len(problems), "problems": shown}


def _partition(status: PartitionStatus, listed: Partition | None) -> dict[str, Any]:
    values = {name: getattr(status, name) for name in _FIELDS}
    values["id"] = values.pop("partition")
    if status.cursor is not None:
        values["cursor"] = status.cursor[:_MAX_TEXT]
    values["behind_seconds"] = status.behind_seconds
    values["in_flight_seconds"] = status.in_flight_seconds
    values["evidence_seconds"] = status.evidence_seconds
    if listed is not None:
        values["closed"] = listed.closed or None
        values["starts_after"] = listed.starts_after
        values["cursor_from"] = listed.cursor_from
    return {name: value for name, value in values.items() if value or _says(name, value)}


def _says(name: str, value: Any) -> bool:
    """Return whether something that is not true says something all the same."""
    return value is False or (value == 0 and name in ("id", "starts_after", "behind_seconds"))
