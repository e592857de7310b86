"""`SyncFeedClient`: the same calls over `httpx.Client`. It runs the coroutines of `FeedClient`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

import orjson

from feedapi_client.client.feed_client import FeedClient, Page
from feedapi_client.http.io import BlockingIO, SyncHTTP, run_now
from feedapi_client.model import Batch, Decoder, FeedInfo
from feedapi_client.options import FetchOptions, Limits, RetryPolicy
from feedapi_client.protocol.page import PageReader, Progress

T = TypeVar("T")


class _BlockingFeedClient(FeedClient):
    """Its coroutines don't suspend."""

    _io: ClassVar[Any] = BlockingIO


class SyncFeedClient:
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
        self._client = client = _BlockingFeedClient(
            url,
            http=cast("Any", http),
            v1_partitions=v1_partitions,
            fetch=fetch,
            retry=retry,
            limits=limits,
            decoder=decoder,
        )
        client._any_payload = any_payload
        self.feed = client.feed
        """The feed's URL without credentials and query."""
        self.options = client.options
        self.retry = client.retry
        self.limits = client.limits
        self.transport = client.transport

    @property
    def info(self) -> FeedInfo | None:
        """The last discovery."""
        return self._client.info

    @info.setter
    def info(self, info: FeedInfo | None) -> None:
        self._client.info = info

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, unless the http client is the caller's."""
        run_now(self._client.aclose())

    def discover(self) -> FeedInfo:
        """See `FeedClient.discover`."""
        return run_now(self._client.discover())

    def discover_once(self) -> FeedInfo:
        """See `FeedClient.discover_once`."""
        return run_now(self._client.discover_once())

    def check(self, info: FeedInfo) -> None:
        """See `FeedClient.check`."""
        self._client.check(info)

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
        return SyncFetchResponse(
            self._client.open(info, partition, cursor, stream=stream, progress=progress)
        )

    def fetch(self, partition: int, cursor: str) -> SyncFetch:
        """One fetch: `read()` it for a `Page`, or iterate over it for each `Batch`.

        Otherwise as `FeedClient.fetch`.
        """
        return SyncFetch(self._client.fetch(partition, cursor))

    def __repr__(self) -> str:
        return repr(self._client).replace(type(self._client).__name__, type(self).__name__, 1)


class _Blocking(Generic[T]):
    """An asynchronous iterator and context manager whose coroutines don't suspend."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __enter__(self) -> Self:
        run_now(self._inner.__aenter__())
        return self

    def __exit__(self, *exc: object) -> None:
        run_now(self._inner.__aexit__(*exc))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            item: T = run_now(self._inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None
        return item


class SyncFetchResponse(_Blocking[list[bytes]]):
    """See `FetchResponse`."""

    @property
    def reader(self) -> PageReader:
        """What the chunks are fed to."""
        reader: PageReader = self._inner.reader
        return reader

    def chunks(self) -> Iterator[bytes]:
        """See `FetchResponse.chunks`."""
        return map(b"".join, self)


class SyncFetch(_Blocking[Batch]):
    """One fetch: `read` it, or iterate over it, once. See `SyncFeedClient.fetch`."""

    def read(self) -> Page:
        """Return the whole response."""
        page: Page = run_now(self._inner.read())
        return page

    def close(self) -> None:
        """End the request. Does nothing when it has ended."""
        run_now(self._inner.aclose())
