"""Cursor stores. Those that need an extra are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from feedapi_client.stores.base import AdministrableStore, CursorStore, JournalledStore
from feedapi_client.stores.done import Claim, DoneEvent, DoneStore
from feedapi_client.stores.journal import Journal
from feedapi_client.stores.leases import Instance, Lease, LeaseStore, View
from feedapi_client.stores.sqlite import MemoryCursorStore, SQLiteCursorStore
from feedapi_client.stores.threads import in_callers_thread

if TYPE_CHECKING:
    from feedapi_client.stores.postgres import PostgresCursorStore
    from feedapi_client.stores.redis import RedisCursorStore
    from feedapi_client.stores.sql import SQLAlchemyCursorStore

__all__ = [
    "AdministrableStore",
    "Claim",
    "CursorStore",
    "DoneEvent",
    "DoneStore",
    "Instance",
    "Journal",
    "JournalledStore",
    "Lease",
    "LeaseStore",
    "MemoryCursorStore",
    "PostgresCursorStore",
    "RedisCursorStore",
    "SQLAlchemyCursorStore",
    "SQLiteCursorStore",
    "View",
    "in_callers_thread",
]

_LAZY = {
    "PostgresCursorStore": "feedapi_client.stores.postgres",
    "RedisCursorStore": "feedapi_client.stores.redis",
    "SQLAlchemyCursorStore": "feedapi_client.stores.sql",
}


if not TYPE_CHECKING:  # a type checker knows the names from above, and no others

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
