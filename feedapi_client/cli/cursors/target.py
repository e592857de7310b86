"""The feed and consumer that a command of ``feedapi cursors`` works on, given by URL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from feedapi_client.cli.common.http_client import http_client
from feedapi_client.cli.common.stores import open_store
from feedapi_client.client import FeedClient
from feedapi_client.model import FeedInfo, FeedKey
from feedapi_client.options import FetchOptions, Limits, RetryPolicy
from feedapi_client.stores.base import AdministrableStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A feed, how it is asked, and the store with a consumer's cursors."""

    url: str
    name: str
    store: str
    table: str
    fetch: FetchOptions = field(default_factory=FetchOptions)
    headers: dict[str, str] = field(default_factory=dict)
    ca_file: str | None = None
    v1_partitions: int | None = None
    lineage: Mapping[int, int] = field(default_factory=dict)
    give_up_after: float = 30.0

    @property
    def key(self) -> FeedKey:
        """The key of the consumer's cursors."""
        return FeedKey(self.url, self.name, self.fetch.selection())

    @property
    def retry(self) -> RetryPolicy:
        """How long an unreachable feed is asked again."""
        return RetryPolicy(give_up_after=self.give_up_after)

    @asynccontextmanager
    async def open_store(self, *, create: bool = False) -> AsyncIterator[AdministrableStore]:
        """Open the store; see `feedapi_client.cli.common.stores.open_store`."""
        async with open_store(self.store, create=create, table=self.table) as store:
            yield store

    async def discover(self) -> FeedInfo:
        """Discover the feed once. Raises `FeedError`."""
        async with (
            http_client(self.headers, Limits(), self.ca_file) as http,
            FeedClient(
                self.url,
                http=http,
                v1_partitions=self.v1_partitions,
                fetch=self.fetch,
                retry=self.retry,
            ) as client,
        ):
            return await client.discover()
