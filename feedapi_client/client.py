"""One call for each operation of the protocol, without scheduling, retries of fetches, or cursors kept: that is `FeedConsumer`'s.

`FeedClient` is asynchronous, `SyncFeedClient` its twin over `httpx.Client`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import anyio
import orjson

from feedapi_client.errors import BufferLimitError, FeedError, NoProgressError, RequestRefusedError
from feedapi_client.http.transport import (
    Answer,
    AsyncHTTP,
    SyncAnswer,
    SyncHTTP,
    SyncTransport,
    Transport,
    backoff,
    retrying,
    retrying_sync,
)
from feedapi_client.lineage import graph
from feedapi_client.model import LAST, Batch, Decoder, Event, FeedInfo
from feedapi_client.options import FetchOptions, Limits, RetryPolicy
from feedapi_client.protocol.decoder import PageDecoder
from feedapi_client.protocol.dialects import DIALECTS, Dialect, Params, check_options
from feedapi_client.protocol.negotiation import check_v1_partitions, negotiate


@dataclass(frozen=True, slots=True)
class Page:
    """A whole response: its events up to the last checkpoint, and that checkpoint (None when there was none). `asked` is the cursor asked with."""

    partition: int
    asked: str
    events: list[Event]
    cursor: str | None

    @property
    def caught_up(self) -> bool:
        """Whether the response says that the cursor asked with is the present end of the partition."""
        return not self.events and self.cursor == self.asked


class _Client:
    """What both clients share."""

    feed: str
    transport: Transport | SyncTransport

    def __init__(
        self,
        v1_partitions: int | None,
        fetch: FetchOptions | None,
        retry: RetryPolicy | None,
        limits: Limits,
        decoder: Decoder,
    ) -> None:
        check_v1_partitions(v1_partitions)
        self.v1_partitions = v1_partitions
        self.options = fetch or FetchOptions()
        self.retry = retry or RetryPolicy()
        self.limits = limits
        self.decoder = decoder
        self.info: FeedInfo | None = None
        """The last discovery."""

    def check(self, info: FeedInfo) -> None:
        """Raise `LineageError` when the partitions make no valid graph, `ProtocolError` when the options select events as the feed can't."""
        graph.validate(info, feed=self.feed)
        check_options(info, self.options, feed=self.feed)

    def _plan(
        self, info: FeedInfo, partition: int, cursor: str, stream: bool | int
    ) -> tuple[Dialect, Params, float | None]:
        dialect = DIALECTS[info.dialect]
        # A reader that keeps its own idle time, as the consumer does, ends the response before the transport calls it broken.
        idle_timeout = (
            self.limits.stream_idle_timeout + self.limits.request_timeout
            if stream is not False and info.stream
            else None
        )
        return (
            dialect,
            dialect.fetch_params(info, partition, cursor, self.options, stream=stream),
            idle_timeout,
        )

    def _page_decoder(self, dialect: Dialect, partition: int) -> PageDecoder:
        return PageDecoder(
            dialect,
            feed=self.feed,
            partition=partition,
            decoder=self.decoder,
            max_line_bytes=self.limits.max_line_bytes,
            quote=self.transport.quote,
        )

    def _no_end(self, partition: int) -> NoProgressError:
        return NoProgressError(
            "the publisher answers a fetch from _last without a cursor",
            feed=self.feed,
            partition=partition,
        )

    def __repr__(self) -> str:
        known = (
            "not discovered yet"
            if self.info is None
            else f"{self.info.dialect}, {len(self.info.partitions)} partitions"
        )
        return f"<{type(self).__name__} {self.feed}: {known}>"


class FeedClient(_Client):
    """Discovers a feed and fetches from it. An asynchronous context manager; its methods may run concurrently, on asyncio or trio.

    Args:
        url: the feed. Its query is sent with every request, credentials in it are used as basic auth; neither is ever shown.
        http: the caller's client, for authentication, TLS, proxies or HTTP/2. It is used as it is and stays open.
        v1_partitions: the number of partitions, for a feed of dialect v1 (ZeroEventHub), which can't say it.
        fetch, limits: what to ask for, and how much of everything. `retry` is for `discover` only; a fetch is not retried.
        decoder: what `Event.json` uses.

    Raises ValueError for an impossible `v1_partitions`, `NegotiationError` for a URL that can't be one of a feed.
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
        super().__init__(v1_partitions, fetch, retry, limits or Limits(), decoder)
        self.transport: Transport = Transport(url, http=http, limits=self.limits)
        self.feed = self.transport.feed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections, unless the http client is the caller's."""
        await self.transport.aclose()

    async def discover(self) -> FeedInfo:
        """Negotiate (R1, at each call anew: R2) and validate what was found.

        Retried as the policy says. Raises `NegotiationError`, `AuthenticationError`, `ProtocolError`, `LineageError`; `info` then stays what it was.
        """
        info = await retrying(self.retry, self._discover)
        self.check(info)
        self.info = info
        return info

    async def _discover(self) -> FeedInfo:
        status, body = await self.transport.get("", [], max_bytes=self.limits.max_discovery_bytes)
        return negotiate(
            status,
            body,
            feed=self.feed,
            v1_partitions=self.v1_partitions,
            quote=self.transport.quote,
        )

    def open(
        self, info: FeedInfo, partition: int, cursor: str, *, stream: bool | int = False
    ) -> Response:
        """The plainest fetch: ``async with client.open(...) as response``, then feed `response.chunks()` to `response.decoder`.

        With `stream` (True, or milliseconds) the response is held open where the feed offers that. Entering raises `RequestRefusedError`,
        `AuthenticationError`, `FeedUnavailableError`, `ProtocolError`; the chunks raise `TornResponseError`.
        """
        dialect, params, idle_timeout = self._plan(info, partition, cursor, stream)
        return Response(
            self.transport.stream(
                dialect.suffix, params, partition=partition, idle_timeout=idle_timeout
            ),
            self._page_decoder(dialect, partition),
        )

    def fetch(self, partition: int, cursor: str) -> Fetch:
        """One fetch, to be awaited for a `Page`, or iterated for each `Batch` as its checkpoint arrives. Discovers first when nothing is known.

        Not retried; raises what `open` does, and `TornResponseError`, `LineTooLongError`, `ProtocolError` or `BufferLimitError` behind what was
        checkpointed. When iterated, it asks for a streamed response if `fetch.stream` says so; to leave it early, enter it
        (``async with client.fetch(...) as batches``).
        """
        return Fetch(self, partition, cursor)

    async def end_of(self, partition: int) -> str:
        """The cursor of the partition's present end: of the first checkpoint behind `_last`.

        Retried as the policy says; raises what `open` does, and `NoProgressError` when the publisher gives no cursor again and again.
        """
        for attempt in range(1, self.limits.max_attempts_without_progress + 1):
            try:
                cursor = await retrying(self.retry, lambda: self._first_cursor(partition))
            except RequestRefusedError:
                if attempt == self.limits.max_attempts_without_progress:
                    raise
                await self.discover()
            else:
                if cursor is not None:
                    return cursor
            await anyio.sleep(backoff(self.retry, attempt))
        raise self._no_end(partition)

    async def _first_cursor(self, partition: int) -> str | None:
        info = self.info or await self.discover()
        async with self.open(info, partition, LAST) as response:
            async for chunk in response.chunks():
                if _feed_to_cursor(response.decoder, chunk):
                    return response.decoder.cursor
            response.decoder.finish()
        return response.decoder.cursor


def _feed_to_cursor(decoder: PageDecoder, chunk: bytes) -> bool:
    """Feed line by line up to the first checkpoint; True once there is one."""
    for line in chunk.splitlines(keepends=True):
        decoder.feed(line)
        if decoder.cursor is not None:
            return True
    return False


class Response:
    """An answer under way, while it is entered. `decoder` is what its chunks are to be fed to."""

    __slots__ = ("_answer", "decoder")

    def __init__(self, answer: Answer, decoder: PageDecoder) -> None:
        self._answer = answer
        self.decoder = decoder

    async def __aenter__(self) -> Self:
        await self._answer.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._answer.__aexit__(kind, error, traceback)

    def chunks(self) -> Answer:
        """The body's bytes as they arrive, content encodings undone. Raises `TornResponseError` when the body breaks off."""
        return self._answer


class _Reading:
    """A response on its way to batches, without I/O: errors come behind what was checkpointed before them."""

    def __init__(self, decoder: PageDecoder, partition: int, limits: Limits, feed: str) -> None:
        self._decoder = decoder
        self._partition = partition
        self._limit = limits.max_buffered_bytes
        self._feed = feed
        self._error: FeedError | None = None
        self.over = False

    def feed(self, chunk: bytes) -> None:
        try:
            self._decoder.feed(chunk)
            if self._decoder.tail_bytes > self._limit:
                raise BufferLimitError(
                    f"{self._decoder.tail_bytes} bytes came without a checkpoint: raise Limits.max_buffered_bytes ({self._limit}), "
                    "or ask the publisher for checkpoints more often",
                    feed=self._feed,
                    partition=self._partition,
                )
        except FeedError as error:
            self.broke(error)

    def complete(self) -> None:
        self.over = True
        try:
            self._decoder.finish()
        except FeedError as error:
            self.broke(error)

    def broke(self, error: FeedError) -> None:
        self.over = True
        self._error = error

    def batch(self) -> Batch | None:
        """The next batch; None when there is none now, which is the end once the reading is over. Raises the error that ended it."""
        run = self._decoder.take()
        if run is not None:
            return Batch(self._partition, run.events, run.cursor)
        if self._error is not None:
            raise self._error
        return None


def _page(batches: list[Batch], partition: int, asked: str) -> Page:
    return Page(
        partition,
        asked,
        [event for batch in batches for event in batch.events],
        batches[-1].cursor if batches else None,
    )


class Fetch:
    """One fetch: await it, or iterate over it, once. See `FeedClient.fetch`."""

    def __init__(self, client: FeedClient, partition: int, cursor: str) -> None:
        self._client = client
        self._partition = partition
        self._cursor = cursor
        self._response: Response | None = None
        self._reading: _Reading | None = None

    def __await__(self) -> Generator[Any, Any, Page]:
        return self._whole().__await__()

    async def _whole(self) -> Page:
        await self._begin(stream=False)
        return _page([batch async for batch in self], self._partition, self._cursor)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the request. Nothing happens when it has ended."""
        response, self._response = self._response, None
        if response is not None:
            await response.__aexit__(None, None, None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        try:
            reading = self._reading or await self._begin(stream=self._client.options.streaming)
            while (batch := reading.batch()) is None:
                if reading.over:
                    raise StopAsyncIteration
                await self._receive(reading)
        except BaseException:
            await self.aclose()
            raise
        return batch

    async def _begin(self, *, stream: bool | int) -> _Reading:
        if self._reading is not None:
            raise RuntimeError("a fetch can be read once: call fetch() again")
        client = self._client
        info = client.info or await client.discover()
        response = client.open(info, self._partition, self._cursor, stream=stream)
        await response.__aenter__()
        self._response = response
        self._reading = _Reading(response.decoder, self._partition, client.limits, client.feed)
        return self._reading

    async def _receive(self, reading: _Reading) -> None:
        assert self._response is not None
        try:
            chunk = await anext(self._response.chunks(), None)
        except FeedError as error:
            reading.broke(error)
        else:
            if chunk is None:
                reading.complete()
            else:
                reading.feed(chunk)


class SyncFeedClient(_Client):
    """`FeedClient` over `httpx.Client`, for threads and executors. A context manager; its methods may be called from several threads."""

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
    ) -> None:
        super().__init__(v1_partitions, fetch, retry, limits or Limits(), decoder)
        self.transport: SyncTransport = SyncTransport(url, http=http, limits=self.limits)
        self.feed = self.transport.feed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, unless the http client is the caller's."""
        self.transport.close()

    def discover(self) -> FeedInfo:
        """See `FeedClient.discover`."""
        info = retrying_sync(self.retry, self._discover)
        self.check(info)
        self.info = info
        return info

    def _discover(self) -> FeedInfo:
        status, body = self.transport.get("", [], max_bytes=self.limits.max_discovery_bytes)
        return negotiate(
            status,
            body,
            feed=self.feed,
            v1_partitions=self.v1_partitions,
            quote=self.transport.quote,
        )

    def open(
        self, info: FeedInfo, partition: int, cursor: str, *, stream: bool | int = False
    ) -> SyncResponse:
        """See `FeedClient.open`."""
        dialect, params, idle_timeout = self._plan(info, partition, cursor, stream)
        return SyncResponse(
            self.transport.stream(
                dialect.suffix, params, partition=partition, idle_timeout=idle_timeout
            ),
            self._page_decoder(dialect, partition),
        )

    def fetch(self, partition: int, cursor: str) -> SyncFetch:
        """One fetch: `read()` it for a `Page`, or iterate over it for each `Batch`. Otherwise as `FeedClient.fetch`."""
        return SyncFetch(self, partition, cursor)


class SyncResponse:
    """See `Response`."""

    __slots__ = ("_answer", "decoder")

    def __init__(self, answer: SyncAnswer, decoder: PageDecoder) -> None:
        self._answer = answer
        self.decoder = decoder

    def __enter__(self) -> Self:
        self._answer.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._answer.__exit__(kind, error, traceback)

    def chunks(self) -> SyncAnswer:
        """See `Response.chunks`."""
        return self._answer


class SyncFetch:
    """One fetch: `read` it, or iterate over it, once. See `SyncFeedClient.fetch`."""

    def __init__(self, client: SyncFeedClient, partition: int, cursor: str) -> None:
        self._client = client
        self._partition = partition
        self._cursor = cursor
        self._response: SyncResponse | None = None
        self._reading: _Reading | None = None

    def read(self) -> Page:
        """The whole response."""
        self._begin(stream=False)
        return _page(list(self), self._partition, self._cursor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the request. Nothing happens when it has ended."""
        response, self._response = self._response, None
        if response is not None:
            response.__exit__(None, None, None)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        try:
            reading = self._reading or self._begin(stream=self._client.options.streaming)
            while (batch := reading.batch()) is None:
                if reading.over:
                    raise StopIteration
                self._receive(reading)
        except BaseException:
            self.close()
            raise
        return batch

    def _begin(self, *, stream: bool | int) -> _Reading:
        if self._reading is not None:
            raise RuntimeError("a fetch can be read once: call fetch() again")
        client = self._client
        info = client.info or client.discover()
        response = client.open(info, self._partition, self._cursor, stream=stream)
        response.__enter__()
        self._response = response
        self._reading = _Reading(response.decoder, self._partition, client.limits, client.feed)
        return self._reading

    def _receive(self, reading: _Reading) -> None:
        assert self._response is not None
        try:
            chunk = next(self._response.chunks(), None)
        except FeedError as error:
            reading.broke(error)
        else:
            if chunk is None:
                reading.complete()
            else:
                reading.feed(chunk)
