"""One call for each operation of the protocol, without schedule, retries of fetches or cursors."""

from feedapi_client.client.feed_client import FeedClient, FetchResponse, Page
from feedapi_client.client.sync_client import SyncFeedClient, SyncFetchResponse

__all__ = ["FeedClient", "FetchResponse", "Page", "SyncFeedClient", "SyncFetchResponse"]
