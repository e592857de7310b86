"""The connection of one process to one feed. Imports no Spark."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from feedapi_client.client import SyncFeedClient
from feedapi_client.errors import FeedError
from feedapi_client.model import FeedInfo
from feedapi_client.options import FetchOptions
from feedapi_client.protocol.dialects import check_options
from feedapi_client.protocol.page import FeedAnswers
from feedapi_client.spark.http_clients import shared_client
from feedapi_client.spark.source_options import OptionError, SourceOptions


class FeedConnection:
    """Client, last discovery and fetch options of a feed. Thread-safe.

    Arguments:
        fetch, info: what the driver resolved. Without them, `discover` resolves them.

    Raises:
        OptionError: the credentials are not available in this process.
    """

    def __init__(
        self,
        options: SourceOptions,
        fetch: FetchOptions | None = None,
        info: FeedInfo | None = None,
    ) -> None:
        self.options = options
        self._lock = threading.Lock()
        self.began = time.monotonic()
        """When this process first heard of the feed's closed partitions."""
        self._answers = FeedAnswers(options.limits.settle_time)
        self._counting = threading.Lock()
        self._discovery_failed_at = -math.inf
        self._info = info
        self._shared = shared_client(options)
        self._resolved = fetch is not None
        self.client = self._client(fetch or replace(options.fetch, filters={}))

    @property
    def url(self) -> str:
        """URL of the feed for messages, without secrets."""
        return self.client.feed

    @property
    def info(self) -> FeedInfo:
        """The last discovery; discovers first if there was none."""
        return self._info or self.discover()

    @property
    def fetch_options(self) -> FetchOptions:
        """What a fetch asks for, filters included. Their names are known after a discovery."""
        if not self._resolved:
            self.discover()
        return self.client.options

    def client_for(self, page_size: int | None) -> SyncFeedClient:
        """Return the client, or one that asks for pages of this size."""
        if page_size is None:
            return self.client
        return self._client(replace(self.fetch_options, page_size_hint=page_size))

    def answered(self, *, failed: bool) -> None:
        """Count an answer to a fetch, of whichever partition."""
        with self._counting:
            self._answers.add(time.monotonic(), failed=failed)

    @property
    def failed_at(self) -> float:
        """When the feed failed last, as far as that lets the time of an end begin anew (R6)."""
        return max(self._discovery_failed_at, self._answers.failed_at)

    def discover(self, seen: FeedInfo | None = None) -> FeedInfo:
        """Discover, unless another thread did so since the caller got `seen`.

        Raises `FeedError`, and `OptionError` for an option that matches several filters.
        """
        with self._lock:
            if seen is not None and self._info is not seen and self._info is not None:
                return self._info
            try:
                info = self.client.discover()
            except FeedError:
                self._discovery_failed_at = time.monotonic()
                raise
            self._resolve(info)
            self._info = info
            return info

    def restore(self, info: FeedInfo) -> None:
        """Take the last discovery of an earlier driver, unless there was one since.

        The feed need not answer for that. Raises `OptionError` as `discover`.
        """
        if self._resolved:
            return  # and a discovery in the background may hold the lock for long
        with self._lock:
            self._resolve(info)

    def _resolve(self, info: FeedInfo) -> None:
        if self._resolved:
            return
        filters = _resolve_filters(self.options.filters, info)
        fetch = replace(self.options.fetch, filters=filters)
        check_options(info, fetch, feed=self.url)
        self._info = info
        self.client, self._resolved = self._client(fetch), True

    def _client(self, fetch: FetchOptions) -> SyncFeedClient:
        options = self.options
        client = SyncFeedClient(
            options.url,
            http=self._shared.http,
            fetch=fetch,
            limits=options.limits,
            retry=options.retry,
            v1_partitions=options.v1_partitions,
            any_payload=True,
        )
        client.info = self._info  # an outage from here on is not a wrong URL
        return client

    def __repr__(self) -> str:
        return f"<FeedConnection {self.client!r}>"


def _resolve_filters(wanted: Mapping[str, str], info: FeedInfo) -> dict[str, str]:
    """Return the filters under the names of the feed: Spark changes option names to lower case."""
    resolved = {}
    for name, value in wanted.items():
        matches = [offered for offered in info.filters if offered.lower() == name.lower()]
        if len(matches) > 1:
            raise OptionError(
                f"feedapi source: option filter.{name} matches several filters of the feed: "
                f"{', '.join(matches)}"
            )
        resolved[matches[0] if matches else name] = value
    return resolved
