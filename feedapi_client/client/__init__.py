"""One call for each operation of the protocol.

`FeedClient` is asynchronous, `SyncFeedClient` its twin over `httpx.Client`. Neither schedules,
retries fetches or keeps cursors: `FeedConsumer` does that.
"""

from feedapi_client.client.asynchronous import FeedClient, Fetch, Response
from feedapi_client.client.page import Page
from feedapi_client.client.synchronous import SyncFeedClient, SyncFetch, SyncResponse

__all__ = [
    "FeedClient",
    "Fetch",
    "Page",
    "Response",
    "SyncFeedClient",
    "SyncFetch",
    "SyncResponse",
]
