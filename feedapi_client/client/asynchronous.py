"""`FeedClient`: one call for each operation of the protocol, asynchronous."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
import orjson

from feedapi_client.client.base_client import BaseClient, check_count, log_attempt
from feedapi_client.client.page_batches import Page, PageBatches, check_unused, page_of
from feedapi_client.errors import FeedError, NoProgressError, RequestRefusedError
from feedapi_client.http.async_transport import AsyncHTTP, ResponseStream, Transport
from feedapi_client.model import LAST, Batch, Decoder, FeedInfo
from feedapi_client.options import FetchOptions, Limits, RetryPolicy
from feedapi_client.protocol.decoder import CheckpointedEvents
from feedapi_client.protocol.page import Outcome, PageReader, Progress, unrecognized_error
from feedapi_client.retry import Backoff, retry

AskedEnd = Callable[[], Awaitable[CheckpointedEvents | None]]


class FeedClient(BaseClient):
    """Discovers a feed and fetches from it.

    An asynchronous context manager; its methods may run concurrently, on asyncio or trio.

    Arguments:
        url: the feed. Its query is sent with every request, credentials in it are used as basic
            auth; neither is ever shown.
        http: the caller's client, for authentication, TLS, proxies or HTTP/2. It is used as it is
            and stays open.
        v1_partitions: the number of partitions of a feed of dialect v1 (ZeroEventHub), which can't
            say it.
        fetch, limits: what to ask for, and how much of everything.
        retry: for `discover` only; a fetch is not retried.
        decoder: what `Event.json` uses.

    Raises ValueError for an impossible `v1_partitions`, `NegotiationError` for a URL that can't be
    a feed's.
    """

    def __init__(
        self,
        url: str,
        *,
        http: AsyncHTTP | None = None,
        v1_partitions: int | None = None,
        fetch: FetchOptions | None = None,
        retry: RetryPolicy | None = None,
        limits: Limits | None = None,
        decoder: Decoder = orjson.loads,
    ) -> None:
        limits = limits or Limits()
        self.transport = Transport(url, http=http, limits=limits)
        self._discovering = anyio.Lock()
        super().__init__(self.transport, v1_partitions, fetch, retry, limits, decoder)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections, unless the http client is the caller's."""
        await self.transport.aclose()

    async def discover(self) -> FeedInfo:
        """Negotiate (R1, at each call anew: R2) and validate what was found.

        Retried as the policy says; a `HostError` only once a discovery has succeeded. Raises
        `NegotiationError`, `AuthenticationError`, `FeedUnavailableError`, `TornResponseError`,
        `ProtocolError`, `LineageError`; `info` then stays what it was.
        """
        backoff = Backoff.of(self._discovery_policy(), clock=anyio.current_time)
        return await retry(self.discover_once, backoff, sleep=anyio.sleep, on_retry=log_attempt)

    async def discover_once(self) -> FeedInfo:
        """Discover without a retry. Raises what `discover` does."""
        limit = self.limits.max_discovery_bytes
        return self._understand(*await self.transport.get("", [], max_bytes=limit))

    def open(
        self,
        info: FeedInfo,
        partition: int,
        cursor: str,
        *,
        stream: bool | int = False,
        progress: Progress | None = None,
    ) -> FetchResponse:
        """The plainest fetch: feed the chunks to the reader yourself.

        ``async with client.open(...) as response``, then feed `response.chunks()` to
        `response.reader`. With `stream` (True, or milliseconds) the response is held open where the
        feed offers that. Entering raises `RequestRefusedError`, `AuthenticationError`,
        `FeedUnavailableError`, `ProtocolError`; the chunks raise `TornResponseError`.
        """
        dialect, params, idle_timeout = self._plan(info, partition, cursor, stream)
        stream_of_bytes = self.transport.stream(
            dialect.suffix, params, partition=partition, idle_timeout=idle_timeout
        )
        reader = self._page_reader(info, partition, cursor, progress)
        return FetchResponse(stream_of_bytes, reader, info)

    def fetch(self, partition: int, cursor: str) -> Fetch:
        """One fetch: await it for a `Page`, or iterate for each `Batch` as its checkpoint arrives.

        Discovers first when nothing is known. Not retried; raises what `open` does, and
        `TornResponseError`, `LineTooLongError`, `ProtocolError` or `BufferLimitError` behind what
        was checkpointed. When iterated, it asks for a streamed response if `fetch.stream` says so;
        to leave it early, enter it (``async with client.fetch(...) as batches``).
        """
        return Fetch(self, partition, cursor)

    async def end_of(
        self,
        partition: int,
        *,
        within: Callable[[AskedEnd], Awaitable[CheckpointedEvents | None]] | None = None,
    ) -> str:
        """Return the cursor of the partition's present end: the first checkpoint behind `_last`.

        Events before that checkpoint came after the question, as from a publisher that waits for
        news: the question is asked again (R7).

        Retried as the policy says; raises what `open` does, and `NoProgressError` when the
        publisher gives no cursor, or none without events, again and again. `within` awaits each
        request, and may wait before it.
        """

        async def ask() -> str:
            info = self.info or await self.discover()
            checkpoint = partial(self._first_checkpoint, info, partition)
            try:
                end = await retry(
                    checkpoint if within is None else partial(within, checkpoint),
                    Backoff.of(self.retry, clock=anyio.current_time),
                    sleep=anyio.sleep,
                    on_retry=log_attempt,
                )
            except RequestRefusedError:
                await self._discover_after(info)
                raise
            if end is None or end.events:
                raise NoProgressError(
                    "the publisher answers a fetch from _last "
                    f"{'without a cursor of its own' if end is None else 'with events'}: a "
                    "consumer can't start at its end. 'feedapi cursors skip' reads to the end "
                    "without delivering",
                    feed=self.feed,
                    partition=partition,
                )
            return end.cursor

        backoff = Backoff(
            base_delay=self.retry.base_delay,
            max_delay=self.retry.max_delay,
            attempts=self.limits.max_attempts_without_progress,
            retry_if=lambda error: isinstance(error, (RequestRefusedError, NoProgressError)),
        )
        return await retry(ask, backoff, sleep=anyio.sleep)

    async def _discover_after(self, asked_of: FeedInfo) -> None:
        """Discover, unless it was done since `asked_of`: thousands may be refused at once."""
        async with self._discovering:
            if self.info is asked_of:
                await self.discover()

    async def _first_checkpoint(self, info: FeedInfo, partition: int) -> CheckpointedEvents | None:
        async with self.open(info, partition, LAST) as response:
            reader = response.reader
            async for chunk in response.chunks():
                # Line by line: the first checkpoint counts, and a chunk may hold several.
                for line in chunk.splitlines(keepends=True):
                    for batch in reader.feed(line):
                        return batch
                reader.check()
            finished = reader.finish()
            if finished.outcome is Outcome.UNRECOGNIZED:
                raise unrecognized_error(feed=self.feed, partition=partition)
        return finished.batches[0] if finished.batches else None


class FetchResponse:
    """A response, open while it is entered. Feed its chunks to `reader`."""

    __slots__ = ("_info", "_stream", "reader")

    def __init__(self, stream: ResponseStream, reader: PageReader, info: FeedInfo) -> None:
        self._stream = stream
        self.reader = reader
        self._info = info

    async def __aenter__(self) -> Self:
        try:
            await self._stream.__aenter__()
        except RequestRefusedError as error:
            check_count(error, self._info)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stream.__aexit__(kind, error, traceback)

    def chunks(self) -> ResponseStream:
        """The body's bytes as they arrive, content encodings undone.

        Raises `TornResponseError` when the body breaks off.
        """
        return self._stream


class Fetch:
    """One fetch: await it, `read` it, or iterate over it, once. See `FeedClient.fetch`."""

    def __init__(self, client: FeedClient, partition: int, cursor: str) -> None:
        self._client = client
        self._partition = partition
        self._cursor = cursor
        self._response: FetchResponse | None = None
        self._batches: PageBatches | None = None

    def __await__(self) -> Generator[Any, Any, Page]:
        return self.read().__await__()

    async def read(self) -> Page:
        """Return the whole response."""
        await self._begin(stream=False)
        return page_of([batch async for batch in self], self._partition, self._cursor)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the request. Does nothing when it has ended."""
        response, self._response = self._response, None
        if response is not None:
            await response.__aexit__(None, None, None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        try:
            batches = self._batches
            if batches is None:
                batches = await self._begin(stream=self._client.options.streaming)
            while (batch := batches.next()) is None:
                if batches.over:
                    raise StopAsyncIteration
                await self._receive(batches)
        except BaseException:
            await self.aclose()
            raise
        return batch

    async def _begin(self, *, stream: bool | int) -> PageBatches:
        check_unused(self._batches)
        info = self._client.info or await self._client.discover()
        response = self._client.open(info, self._partition, self._cursor, stream=stream)
        await response.__aenter__()
        self._response = response
        self._batches = PageBatches(response.reader, self._partition)
        return self._batches

    async def _receive(self, batches: PageBatches) -> None:
        assert self._response is not None
        try:
            chunk = await anext(self._response.chunks(), None)
        except FeedError as error:
            batches.broke(error)
        else:
            if chunk is None:
                batches.complete()
            else:
                batches.feed(chunk)
