"""The feed and consumer that an operation works on, where it has to ask the feed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from feedapi_client.client import FeedClient
from feedapi_client.consumer import FeedConsumer
from feedapi_client.model import FeedInfo, FeedKey
from feedapi_client.options import FetchOptions, RetryPolicy

if TYPE_CHECKING:
    import httpx

    from feedapi_client.stores.base import CursorStore


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedAccess:
    """A feed, how it is asked, and the name of the consumer whose positions are meant.

    The attributes are arguments of `FeedConsumer`, and have the values that the consumer has.
    """

    url: str
    name: str = "default"
    feed_name: str | None = None
    fetch: FetchOptions = field(default_factory=FetchOptions)
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(give_up_after=10.0))
    v1_partitions: int | None = None
    lineage: Mapping[int, int | None] = field(default_factory=dict)
    http: httpx.AsyncClient | None = None

    @property
    def key(self) -> FeedKey:
        """The key of the consumer's positions."""
        selection = self.fetch.selection()
        if self.feed_name is not None:
            return FeedKey.named(self.feed_name, self.name, selection)
        return FeedKey(self.url, self.name, selection)

    def client(self, fetch: FetchOptions | None = None) -> FeedClient:
        """Return a client of the feed, to be opened and closed by the caller."""
        return FeedClient(
            self.url,
            http=self.http,
            v1_partitions=self.v1_partitions,
            fetch=self.fetch if fetch is None else fetch,
            retry=self.retry,
        )

    async def discover(self) -> FeedInfo:
        """Discover the feed once. Raises `FeedError`."""
        async with self.client() as client:
            return await client.discover()


def consumer_of(feed: FeedAccess, store: CursorStore, **settings: Any) -> FeedConsumer:
    """Return a consumer of the feed, to be opened. Settings are its other arguments."""
    own = {name: getattr(feed, name) for name in feed.__slots__}
    return FeedConsumer(store=store, **own, **settings)
