"""One call for each operation of the protocol.

`FeedClient` is asynchronous, `SyncFeedClient` its twin over `httpx.Client`. Neither schedules,
retries fetches or keeps cursors: `FeedConsumer` does that.
"""

from feedapi_client.client.asynchronous import FeedClient, Fetch, FetchResponse
from feedapi_client.client.page_batches import Page
from feedapi_client.client.synchronous import SyncFeedClient, SyncFetch, SyncFetchResponse

__all__ = [
    "FeedClient",
    "Fetch",
    "FetchResponse",
    "Page",
    "SyncFeedClient",
    "SyncFetch",
    "SyncFetchResponse",
]
