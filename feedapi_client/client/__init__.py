"""One call for each operation of the protocol.

`FeedClient` is asynchronous, `SyncFeedClient` the same over `httpx.Client`. Neither schedules,
retries fetches or keeps cursors: `FeedConsumer` does that.
"""

from feedapi_client.client.feed_client import FeedClient, Fetch, FetchResponse, Page
from feedapi_client.client.sync_client import SyncFeedClient, SyncFetch, SyncFetchResponse

__all__ = [
    "FeedClient",
    "Fetch",
    "FetchResponse",
    "Page",
    "SyncFeedClient",
    "SyncFetch",
    "SyncFetchResponse",
]
