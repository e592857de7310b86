"""Quarantine: events that a handler could not handle, kept for later (a dead-letter queue).

`Quarantine` and `Retry` tell `FeedConsumer.run` what to do when a handler fails. The functions are
for operators: they list, show, replay and drop quarantined events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from feedapi_client.quarantine.base import QuarantineStore
from feedapi_client.quarantine.bisection import DryRunPassed
from feedapi_client.quarantine.location import open_quarantine, quarantine_beside
from feedapi_client.quarantine.memory import MemoryQuarantineStore
from feedapi_client.quarantine.operations import Replayed, drop, list_events, replay, show
from feedapi_client.quarantine.policy import Quarantine, Retry
from feedapi_client.quarantine.record import QuarantinedEvent
from feedapi_client.quarantine.sqlite import SQLiteQuarantineStore

if TYPE_CHECKING:
    from feedapi_client.quarantine.sql import SQLAlchemyQuarantineStore as SQLAlchemyQuarantineStore

__all__ = [
    "DryRunPassed",
    "MemoryQuarantineStore",
    "Quarantine",
    "QuarantineStore",
    "QuarantinedEvent",
    "Replayed",
    "Retry",
    "SQLiteQuarantineStore",
    "drop",
    "list_events",
    "open_quarantine",
    "quarantine_beside",
    "replay",
    "show",
]


def __getattr__(name: str) -> Any:
    # Needs the extra `sql`, which is imported only when the class is used.
    if name == "SQLAlchemyQuarantineStore":
        from feedapi_client.quarantine.sql import SQLAlchemyQuarantineStore

        return SQLAlchemyQuarantineStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
