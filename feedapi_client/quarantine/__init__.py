"""Events that a handler could not handle, kept for later (elsewhere called a dead-letter queue).

`Quarantine` and `Retry` say what `FeedConsumer.run` does when a handler fails; the functions here
are what an operator does with the events that were put aside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from feedapi_client.quarantine.base import (
    MemoryQuarantineStore,
    QuarantineStore,
    SQLiteQuarantineStore,
    quarantine_beside,
)
from feedapi_client.quarantine.operations import (
    Replayed,
    drop,
    list_events,
    open_quarantine,
    replay,
    show,
)
from feedapi_client.quarantine.policy import Quarantine, Retry
from feedapi_client.quarantine.record import QuarantinedEvent

if TYPE_CHECKING:
    from feedapi_client.quarantine.sql import SQLAlchemyQuarantineStore as SQLAlchemyQuarantineStore

__all__ = [
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
    # Needs the extra `sql`, which is asked for only when the class is used.
    if name == "SQLAlchemyQuarantineStore":
        from feedapi_client.quarantine.sql import SQLAlchemyQuarantineStore

        return SQLAlchemyQuarantineStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
