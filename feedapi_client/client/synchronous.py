"""`SyncFeedClient`: the same calls over `httpx.Client`."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import orjson

from feedapi_client.client.base_client import BaseClient, check_count, log_attempt
from feedapi_client.client.page_batches import Page, PageBatches, check_unused, page_of
from feedapi_client.errors import FeedError, RequestRefusedError
from feedapi_client.http.sync_transport import SyncHTTP, SyncResponseStream, SyncTransport
from feedapi_client.model import Batch, Decoder, FeedInfo
from feedapi_client.options import FetchOptions, Limits, RetryPolicy
from feedapi_client.protocol.page import PageReader, Progress
from feedapi_client.retry import Backoff, retry_sync


class SyncFeedClient(BaseClient):
    """`FeedClient` over `httpx.Client`, for threads and executors.

    A context manager; its methods may be called from several threads. With `any_payload` a payload
    that the protocol forbids (a list, a number, a boolean, null) is an event like others.
    """

    def __init__(
        self,
        url: str,
        *,
        http: SyncHTTP | None = None,
        v1_partitions: int | None = None,
        fetch: FetchOptions | None = None,
        retry: RetryPolicy | None = None,
        limits: Limits | None = None,
        decoder: Decoder = orjson.loads,
        any_payload: bool = False,
    ) -> None:
        limits = limits or Limits()
        self.transport = SyncTransport(url, http=http, limits=limits)
        super().__init__(self.transport, v1_partitions, fetch, retry, limits, decoder, any_payload)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, unless the http client is the caller's."""
        self.transport.close()

    def discover(self) -> FeedInfo:
        """See `FeedClient.discover`."""
        backoff = Backoff.of(self._discovery_policy())
        return retry_sync(self.discover_once, backoff, on_retry=log_attempt)

    def discover_once(self) -> FeedInfo:
        """See `FeedClient.discover_once`."""
        limit = self.limits.max_discovery_bytes
        return self._understand(*self.transport.get("", [], max_bytes=limit))

    def open(
        self,
        info: FeedInfo,
        partition: int,
        cursor: str,
        *,
        stream: bool | int = False,
        progress: Progress | None = None,
    ) -> SyncFetchResponse:
        """See `FeedClient.open`."""
        dialect, params, idle_timeout = self._plan(info, partition, cursor, stream)
        stream_of_bytes = self.transport.stream(
            dialect.suffix, params, partition=partition, idle_timeout=idle_timeout
        )
        reader = self._page_reader(info, partition, cursor, progress)
        return SyncFetchResponse(stream_of_bytes, reader, info)

    def fetch(self, partition: int, cursor: str) -> SyncFetch:
        """One fetch: `read()` it for a `Page`, or iterate over it for each `Batch`.

        Otherwise as `FeedClient.fetch`.
        """
        return SyncFetch(self, partition, cursor)


class SyncFetchResponse:
    """See `FetchResponse`."""

    __slots__ = ("_info", "_stream", "reader")

    def __init__(self, stream: SyncResponseStream, reader: PageReader, info: FeedInfo) -> None:
        self._stream = stream
        self.reader = reader
        self._info = info

    def __enter__(self) -> Self:
        try:
            self._stream.__enter__()
        except RequestRefusedError as error:
            check_count(error, self._info)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stream.__exit__(kind, error, traceback)

    def chunks(self) -> SyncResponseStream:
        """See `FetchResponse.chunks`."""
        return self._stream


class SyncFetch:
    """One fetch: `read` it, or iterate over it, once. See `SyncFeedClient.fetch`."""

    def __init__(self, client: SyncFeedClient, partition: int, cursor: str) -> None:
        self._client = client
        self._partition = partition
        self._cursor = cursor
        self._response: SyncFetchResponse | None = None
        self._batches: PageBatches | None = None

    def read(self) -> Page:
        """Return the whole response."""
        self._begin(stream=False)
        return page_of(list(self), self._partition, self._cursor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the request. Does nothing when it has ended."""
        response, self._response = self._response, None
        if response is not None:
            response.__exit__(None, None, None)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        try:
            batches = self._batches or self._begin(stream=self._client.options.streaming)
            while (batch := batches.next()) is None:
                if batches.over:
                    raise StopIteration
                self._receive(batches)
        except BaseException:
            self.close()
            raise
        return batch

    def _begin(self, *, stream: bool | int) -> PageBatches:
        check_unused(self._batches)
        info = self._client.info or self._client.discover()
        response = self._client.open(info, self._partition, self._cursor, stream=stream)
        response.__enter__()
        self._response = response
        self._batches = PageBatches(response.reader, self._partition)
        return self._batches

    def _receive(self, batches: PageBatches) -> None:
        assert self._response is not None
        try:
            chunk = next(self._response.chunks(), None)
        except FeedError as error:
            batches.broke(error)
        else:
            if chunk is None:
                batches.complete()
            else:
                batches.feed(chunk)
