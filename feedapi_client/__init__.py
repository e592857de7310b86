"""Consumer library for FeedAPI: a partitioned event feed over plain HTTP, every event in order and once.

::

    from feedapi_client import FeedConsumer, SQLiteCursorStore

    async with FeedConsumer("https://service/myfeed", store=SQLiteCursorStore("cursors.db")) as consumer:
        async for event in consumer:
            print(event.partition, event.json())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from feedapi_client.client import FeedClient, Page, SyncFeedClient
from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import (
    AmbiguousLineageError,
    AuthenticationError,
    BufferLimitError,
    CommitOrderError,
    CursorRejectedError,
    FeedError,
    FeedUnavailableError,
    FencedError,
    LineageError,
    LineTooLongError,
    LostPartitionError,
    NegotiationError,
    NoProgressError,
    ProtocolError,
    RequestRefusedError,
    StoreError,
    TornResponseError,
    TransportError,
)
from feedapi_client.model import FIRST, LAST, Batch, Event, FeedInfo, FeedKey, Partition, Position
from feedapi_client.options import FetchOptions, Limits, RetryPolicy, default_decision
from feedapi_client.status import ConsumerStatus, PartitionStatus
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.memory import MemoryCursorStore
from feedapi_client.stores.sqlite import SQLiteCursorStore

if TYPE_CHECKING:
    from feedapi_client.stores.redis import RedisCursorStore
    from feedapi_client.stores.sql import SQLAlchemyCursorStore

__version__ = "0.1.0"

__all__ = [
    "FIRST",
    "LAST",
    "AmbiguousLineageError",
    "AuthenticationError",
    "Batch",
    "BufferLimitError",
    "CommitOrderError",
    "ConsumerStatus",
    "CursorRejectedError",
    "CursorStore",
    "Event",
    "FeedClient",
    "FeedConsumer",
    "FeedError",
    "FeedInfo",
    "FeedKey",
    "FeedUnavailableError",
    "FencedError",
    "FetchOptions",
    "Limits",
    "LineTooLongError",
    "LineageError",
    "LostPartitionError",
    "MemoryCursorStore",
    "NegotiationError",
    "NoProgressError",
    "Page",
    "Partition",
    "PartitionStatus",
    "Position",
    "ProtocolError",
    "RedisCursorStore",
    "RequestRefusedError",
    "RetryPolicy",
    "SQLAlchemyCursorStore",
    "SQLiteCursorStore",
    "StoreError",
    "SyncFeedClient",
    "TornResponseError",
    "TransportError",
    "default_decision",
]

# Need an extra, which is asked for only when they are used.
_LAZY = {"SQLAlchemyCursorStore": "feedapi_client.stores.sql", "RedisCursorStore": "feedapi_client.stores.redis"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
