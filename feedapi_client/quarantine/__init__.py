"""Quarantine: events that a handler could not handle, kept for later (a dead-letter queue).

`Quarantine` and `Retry` tell `FeedConsumer.run` what to do when a handler fails. The functions are
for operators: they list, show, replay and drop quarantined events.
"""

from __future__ import annotations

from feedapi_client.quarantine.handling import DryRunPassed
from feedapi_client.quarantine.operations import Replayed, drop, replay, show
from feedapi_client.quarantine.policy import Quarantine, Retry
from feedapi_client.quarantine.quarantine_store import (
    MemoryQuarantineStore,
    PostgresQuarantineStore,
    QuarantineStore,
    SQLAlchemyQuarantineStore,
    SQLiteQuarantineStore,
    list_events,
    quarantine_beside,
)
from feedapi_client.quarantine.record import QuarantinedEvent

__all__ = [
    "DryRunPassed",
    "MemoryQuarantineStore",
    "PostgresQuarantineStore",
    "Quarantine",
    "QuarantineStore",
    "QuarantinedEvent",
    "Replayed",
    "Retry",
    "SQLAlchemyQuarantineStore",
    "SQLiteQuarantineStore",
    "drop",
    "list_events",
    "quarantine_beside",
    "replay",
    "show",
]
