"""Consumer library for FeedAPI, a partitioned event feed over plain HTTP.

Every event is handled in order, once.

::

    from feedapi_client import FeedConsumer, SQLiteCursorStore

    store = SQLiteCursorStore("cursors.db")
    async with FeedConsumer("https://service/myfeed", store=store) as consumer:
        async for event in consumer:
            print(event.partition, event.json())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feedapi_client.client import FeedClient, Page, SyncFeedClient
    from feedapi_client.consumer import FeedConsumer
    from feedapi_client.errors import (
        AlreadyDoneError,
        AmbiguousLineageError,
        AuthenticationError,
        BufferLimitError,
        CommitOrderError,
        CursorRejectedError,
        FeedError,
        FeedUnavailableError,
        FencedError,
        HostError,
        LeaseLostError,
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
    from feedapi_client.http.auth import OAuthClientCredentials, TokenFile
    from feedapi_client.http.redaction import redact_http_logs
    from feedapi_client.model import (
        FIRST,
        LAST,
        Batch,
        Event,
        FeedInfo,
        FeedKey,
        Partition,
        Position,
        Reached,
    )
    from feedapi_client.model import (
        __version__ as __version__,
    )
    from feedapi_client.options import FetchOptions, Limits, RetryPolicy, Share, default_decision
    from feedapi_client.quarantine.policy import Quarantine, Retry
    from feedapi_client.status import (
        ConsumerStatus,
        Health,
        PartitionState,
        PartitionStatus,
        PartitionWait,
        Problem,
        ProblemName,
    )
    from feedapi_client.stores.base import CursorStore
    from feedapi_client.stores.journal import Journal
    from feedapi_client.stores.postgres import PostgresCursorStore as PostgresCursorStore
    from feedapi_client.stores.redis import RedisCursorStore as RedisCursorStore
    from feedapi_client.stores.sql import SQLAlchemyCursorStore as SQLAlchemyCursorStore
    from feedapi_client.stores.sqlite import MemoryCursorStore, SQLiteCursorStore
    from feedapi_client.sync import SyncBatch, SyncFeedConsumer

__all__ = [
    "FIRST",
    "LAST",
    "AlreadyDoneError",
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
    "Health",
    "HostError",
    "Journal",
    "LeaseLostError",
    "Limits",
    "LineTooLongError",
    "LineageError",
    "LostPartitionError",
    "MemoryCursorStore",
    "NegotiationError",
    "NoProgressError",
    "OAuthClientCredentials",
    "Page",
    "Partition",
    "PartitionState",
    "PartitionStatus",
    "PartitionWait",
    "Position",
    "Problem",
    "ProblemName",
    "ProtocolError",
    "Quarantine",
    "Reached",
    "RequestRefusedError",
    "Retry",
    "RetryPolicy",
    "SQLiteCursorStore",
    "Share",
    "StoreError",
    "SyncBatch",
    "SyncFeedClient",
    "SyncFeedConsumer",
    "TokenFile",
    "TornResponseError",
    "TransportError",
    "default_decision",
    "redact_http_logs",
]

# Public as well, but not in __all__: a star import must not ask for an extra.
_MORE = ("PostgresCursorStore", "RedisCursorStore", "SQLAlchemyCursorStore", "__version__")

# Where they are, the modules that need less first. Loaded when a name is first asked for: what a
# program does not use costs it nothing, and the stores of an extra ask for it only when used.
_HOMES = (
    "errors",
    "model",
    "options",
    "status",
    "quarantine.policy",
    "http.redaction",
    "http.auth",
    "stores",
    "client",
    "consumer",
    "sync",
)


if not TYPE_CHECKING:  # a type checker knows the names from above, and no others

    def __getattr__(name: str) -> Any:
        for home in _HOMES if name in __all__ or name in _MORE else ():
            module = import_module(f"feedapi_client.{home}")
            if hasattr(module, name):
                value = globals()[name] = getattr(module, name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", *(name for name in globals() if name.startswith("__"))})
