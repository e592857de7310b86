"""The status of consumers as JSON: what ``/status`` gives, and what the page is drawn from."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any

from feedapi_client.model import Partition
from feedapi_client.monitor.snapshots import ConsumerSnapshots, Snapshot
from feedapi_client.status import PartitionStatus, Problem

_MAX_TEXT = 200
SHOWN = 100
"""Problems that are listed."""
_SECONDS = ("behind_seconds", "in_flight_seconds", "evidence_seconds")
_FIELDS = (*(field.name for field in fields(PartitionStatus)), *_SECONDS)
_ZEROS = ("id", "starts_after", "behind_seconds")
"""Where 0 says something."""
_STARTED = datetime.now(UTC)

Quarantined = Mapping[str, Any] | None


def status_json(seen: ConsumerSnapshots, quarantined: Sequence[Quarantined]) -> dict[str, Any]:
    from feedapi_client import __version__

    return {
        "version": __version__,
        "time": datetime.now(UTC),
        "process": {"host": socket.gethostname(), "pid": os.getpid(), "started": _STARTED},
        "consumers": [
            _consumer(snapshot, found)
            for snapshot, found in zip(seen.snapshots, quarantined, strict=True)
        ],
        "blocked": asdict(seen.blocked) if seen.blocked else None,
    }


def health_json(seen: ConsumerSnapshots) -> dict[str, Any]:
    healths = [snapshot.health for snapshot in seen.snapshots]
    problems = [seen.blocked] if seen.blocked else []
    problems += [problem for health in healths for problem in health.problems]
    live = seen.live and all(health.live for health in healths)
    ready = bool(healths) and not seen.blocked and all(health.ready for health in healths)
    return _health(live, ready, problems)


def _health(live: bool, ready: bool, problems: Sequence[Problem]) -> dict[str, Any]:
    """The oldest problems, and how many: an outage makes each of 32,768 partitions fail."""
    return {
        "live": live,
        "ready": ready,
        "problem_count": len(problems),
        "problems": [asdict(problem) for problem in problems[:SHOWN]],
    }


def _consumer(snapshot: Snapshot, quarantined: Quarantined) -> dict[str, Any]:
    status, health, partitions = snapshot.status, snapshot.health, snapshot.status.partitions
    return {
        "feed": status.feed,
        "name": snapshot.name,
        "time": snapshot.time,
        "dialect": status.dialect,
        "events": status.events,
        "buffered_bytes": status.buffered_bytes,
        "health": _health(health.live, health.ready, health.problems),
        "states": Counter(partition.state.value for partition in partitions.values()),
        "owners": Counter(each.owner for each in partitions.values() if each.owner is not None),
        "quarantine": quarantined,
        "reports": status.reports,
        "partitions": [
            _partition(partition, snapshot.topology.get(id)) for id, partition in partitions.items()
        ],
    }


def _partition(status: PartitionStatus, listed: Partition | None) -> dict[str, Any]:
    """What is None, 0 or empty is left out: there may be thousands of partitions."""
    values = {name: getattr(status, name) for name in _FIELDS}
    values["id"] = values.pop("partition")
    values["cursor"] = status.cursor and status.cursor[:_MAX_TEXT]
    if listed is not None:
        values["closed"] = listed.closed or None
        values["starts_after"] = listed.starts_after
        values["cursor_from"] = listed.cursor_from
    return {
        name: value
        for name, value in values.items()
        if value or value is False or (value == 0 and name in _ZEROS)
    }
