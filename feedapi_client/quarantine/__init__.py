"""Quarantine: events that a handler could not handle, kept for later (a dead-letter queue).

`Quarantine` and `Retry` tell `FeedConsumer.run` what to do when a handler fails. The functions are
for operators: they list, show, replay and drop quarantined events.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from feedapi_client.quarantine.handling import DryRunPassed
from feedapi_client.quarantine.operations import Replayed, drop, replay, show
from feedapi_client.quarantine.policy import Quarantine, Retry
from feedapi_client.quarantine.quarantine_store import (
    MemoryQuarantineStore,
    QuarantineStore,
    list_events,
    open_quarantine,
    quarantine_beside,
)
from feedapi_client.quarantine.record import QuarantinedEvent
from feedapi_client.quarantine.sqlite_quarantine import SQLiteQuarantineStore

if TYPE_CHECKING:
    from feedapi_client.quarantine.postgres_quarantine import (
        PostgresQuarantineStore as PostgresQuarantineStore,
    )
    from feedapi_client.quarantine.sql_quarantine import (
        SQLAlchemyQuarantineStore as SQLAlchemyQuarantineStore,
    )

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


# Those of an extra are imported only when the class is used.
_OF_EXTRAS = {
    "PostgresQuarantineStore": "feedapi_client.quarantine.postgres_quarantine",
    "SQLAlchemyQuarantineStore": "feedapi_client.quarantine.sql_quarantine",
}


if not TYPE_CHECKING:  # a type checker knows the names from above, and no others

    def __getattr__(name: str) -> Any:
        if name in _OF_EXTRAS:
            return getattr(import_module(_OF_EXTRAS[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
