"""One call for each operation of the protocol.

`FeedClient` is asynchronous, `SyncFeedClient` its twin over `httpx.Client`. Neither schedules,
retries fetches or keeps cursors: `FeedConsumer` does that.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import anyio
import orjson

from feedapi_client.errors import (
    FeedError,
    NoProgressError,
    ProtocolError,
    RequestRefusedError,
)
from feedapi_client.http.exchange import Endpoint
from feedapi_client.http.sync import SyncHTTP, SyncResponseStream, SyncTransport
from feedapi_client.http.transport import AsyncHTTP, ResponseStream, Transport
from feedapi_client.lineage import graph
from feedapi_client.model import LAST, Batch, Decoder, Event, FeedInfo
from feedapi_client.options import (
    FetchOptions,
    Limits,
    RetryPolicy,
    default_decision,
    entry_decision,
)
from feedapi_client.protocol.decoder import CheckpointedEvents, PageDecoder
from feedapi_client.protocol.dialects import DIALECTS, Dialect, Params, check_options
from feedapi_client.protocol.negotiation import check_v1_partitions, negotiate
from feedapi_client.protocol.page import PageReader, Progress
from feedapi_client.retry import Backoff, retry, retry_sync

log = logging.getLogger("feedapi_client")

_WRONG_COUNT = re.compile(r"partition count (mismatch|does ?n.t match)", re.IGNORECASE)
"""What publishers of dialect v1 say when `n` is not their number of partitions."""


@dataclass(frozen=True, slots=True)
class Page:
    """A whole response: its events up to the last checkpoint, and that checkpoint.

    `asked` is the cursor asked with, `cursor` None when there was no checkpoint.
    """

    partition: int
    asked: str
    events: list[Event]
    cursor: str | None

    @property
    def caught_up(self) -> bool:
        """Whether the response says that the cursor asked with is the partition's present end."""
        return not self.events and self.cursor == self.asked


class _Client:
    """Options and checks that both clients share."""

    def __init__(
        self,
        endpoint: Endpoint[Any],
        v1_partitions: int | None,
        fetch: FetchOptions | None,
        retry: RetryPolicy | None,
        limits: Limits,
        decoder: Decoder,
    ) -> None:
        check_v1_partitions(v1_partitions)
        self.feed = endpoint.feed
        """The feed's URL without credentials and query."""
        self._quote = endpoint.quote
        self.v1_partitions = v1_partitions
        self.options = fetch or FetchOptions()
        self._selects_events = bool(self.options.selection())
        self.retry = retry or RetryPolicy()
        self.limits = limits
        self.decoder = decoder
        self.info: FeedInfo | None = None
        """The last discovery."""

    def check(self, info: FeedInfo) -> None:
        """Check a discovery against this client's options.

        Raises `LineageError` when the partitions make no valid graph, `ProtocolError` when the
        options select events in a way that the feed can't carry.
        """
        graph.validate(info, feed=self.feed)
        check_options(info, self.options, feed=self.feed)

    def _negotiate(self, status: int, body: bytes) -> FeedInfo:
        return negotiate(
            status,
            body,
            feed=self.feed,
            v1_partitions=self.v1_partitions,
            quote=self._quote,
        )

    def _discovery_policy(self) -> RetryPolicy:
        """Before anything is known, a wrong URL is likelier than an outage of DNS (R14)."""
        if self.info is None and self.retry.decide is default_decision:
            return replace(self.retry, decide=entry_decision)
        return self.retry

    def _plan(
        self, info: FeedInfo, partition: int, cursor: str, stream: bool | int
    ) -> tuple[Dialect, Params, float | None]:
        dialect = DIALECTS[info.dialect]
        idle_timeout = None
        if stream is not False and info.stream:
            # A reader that keeps its own idle time, as the consumer does, ends the response before
            # the transport calls it broken.
            idle_timeout = self.limits.stream_idle_timeout + self.limits.request_timeout
        params = dialect.fetch_params(info, partition, cursor, self.options, stream=stream)
        return dialect, params, idle_timeout

    def _page_reader(
        self, info: FeedInfo, partition: int, cursor: str, progress: Progress | None
    ) -> PageReader:
        listed = info.partitions.get(partition)
        decoder = PageDecoder(
            DIALECTS[info.dialect],
            feed=self.feed,
            partition=partition,
            decoder=self.decoder,
            max_line_bytes=self.limits.max_line_bytes,
            quote=self._quote,
        )
        return PageReader(
            decoder,
            feed=self.feed,
            partition=partition,
            asked=cursor,
            closed=listed is not None and listed.closed,
            last_cursor=None if listed is None or self._selects_events else listed.last_cursor,
            progress=progress,
            max_unclosed_bytes=self.limits.max_buffered_bytes,
        )

    def __repr__(self) -> str:
        known = "not discovered yet"
        if self.info is not None:
            known = f"{self.info.dialect}, {len(self.info.partitions)} partitions"
        return f"<{type(self).__name__} {self.feed}: {known}>"


class FeedClient(_Client):
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
        info = await retry(self._discover, backoff, sleep=anyio.sleep, on_retry=log_attempt)
        return self._checked(info)

    async def discover_once(self) -> FeedInfo:
        """Discover without a retry. Raises what `discover` does."""
        return self._checked(await self._discover())

    def _checked(self, info: FeedInfo) -> FeedInfo:
        self.check(info)
        self.info = info
        return info

    async def _discover(self) -> FeedInfo:
        limit = self.limits.max_discovery_bytes
        return self._negotiate(*await self.transport.get("", [], max_bytes=limit))

    def open(
        self,
        info: FeedInfo,
        partition: int,
        cursor: str,
        *,
        stream: bool | int = False,
        progress: Progress | None = None,
    ) -> Response:
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
        return Response(stream_of_bytes, reader, info)

    def fetch(self, partition: int, cursor: str) -> Fetch:
        """One fetch: await it for a `Page`, or iterate for each `Batch` as its checkpoint arrives.

        Discovers first when nothing is known. Not retried; raises what `open` does, and
        `TornResponseError`, `LineTooLongError`, `ProtocolError` or `BufferLimitError` behind what
        was checkpointed. When iterated, it asks for a streamed response if `fetch.stream` says so;
        to leave it early, enter it (``async with client.fetch(...) as batches``).
        """
        return Fetch(self, partition, cursor)

    async def end_of(self, partition: int) -> str:
        """Return the cursor of the partition's present end: the first checkpoint behind `_last`.

        Retried as the policy says; raises what `open` does, and `NoProgressError` when the
        publisher gives no cursor again and again.
        """

        async def ask() -> str:
            try:
                cursor = await retry(
                    lambda: self._first_cursor(partition),
                    Backoff.of(self.retry, clock=anyio.current_time),
                    sleep=anyio.sleep,
                    on_retry=log_attempt,
                )
            except RequestRefusedError:
                await self.discover()
                raise
            if cursor is None:
                raise NoProgressError(
                    "the publisher answers a fetch from _last without a cursor: a consumer can't "
                    "start at its end. 'feedapi cursors skip' reads to the end without delivering",
                    feed=self.feed,
                    partition=partition,
                )
            return cursor

        backoff = Backoff(
            base_delay=self.retry.base_delay,
            max_delay=self.retry.max_delay,
            attempts=self.limits.max_attempts_without_progress,
            retry_if=lambda error: isinstance(error, (RequestRefusedError, NoProgressError)),
        )
        return await retry(ask, backoff, sleep=anyio.sleep)

    async def _first_cursor(self, partition: int) -> str | None:
        info = self.info or await self.discover()
        async with self.open(info, partition, LAST) as response:
            reader = response.reader
            async for chunk in response.chunks():
                # Line by line: the first checkpoint counts, and a chunk may hold several.
                for line in chunk.splitlines(keepends=True):
                    reader.feed(line)
                    if reader.last_checkpoint is not None:
                        return reader.last_checkpoint
                reader.check()
            reader.finish()
        return reader.last_checkpoint


class Response:
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
            _check_count(error, self._info)
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


class _PageBatches:
    """A response as batches, without I/O: errors come behind what was checkpointed before them."""

    def __init__(self, reader: PageReader, partition: int) -> None:
        self._reader = reader
        self._partition = partition
        self._ready: deque[Batch] = deque()
        self._error: FeedError | None = None
        self._gave_any = False
        self.over = False

    def feed(self, chunk: bytes) -> None:
        """Read the next bytes."""
        self._add(self._reader.feed(chunk))
        try:
            self._reader.check()
        except FeedError as error:
            self.broke(error)

    def complete(self) -> None:
        """Record that the body is complete."""
        self.over = True
        try:
            finished = self._reader.finish()
        except FeedError as error:
            self._add(self._reader.rest())
            self.broke(error)
            return
        self._add(finished.batches)
        held, cursor = self._reader.held, self._reader.last_checkpoint
        if held is not None:
            self._add([held])  # a single fetch shows what was sent, whatever the cursor
        elif not self._gave_any and cursor is not None:
            self._add([CheckpointedEvents([], cursor, 0)])

    def broke(self, error: FeedError) -> None:
        """Record that the body ended with an error."""
        self.over = True
        self._error = error

    def next(self) -> Batch | None:
        """The next batch; None when there is none yet, or, once it is `over`, none any more.

        Raises the error that ended it, behind the last batch.
        """
        if self._ready:
            return self._ready.popleft()
        if self._error is not None:
            raise self._error
        return None

    def _add(self, batches: list[CheckpointedEvents]) -> None:
        self._gave_any = self._gave_any or bool(batches)
        self._ready.extend(Batch(self._partition, b.events, b.cursor) for b in batches)


def _page(batches: list[Batch], partition: int, asked: str) -> Page:
    events = [event for batch in batches for event in batch.events]
    return Page(partition, asked, events, batches[-1].cursor if batches else None)


class Fetch:
    """One fetch: await it, `read` it, or iterate over it, once. See `FeedClient.fetch`."""

    def __init__(self, client: FeedClient, partition: int, cursor: str) -> None:
        self._client = client
        self._partition = partition
        self._cursor = cursor
        self._response: Response | None = None
        self._batches: _PageBatches | None = None

    def __await__(self) -> Generator[Any, Any, Page]:
        return self.read().__await__()

    async def read(self) -> Page:
        """Return the whole response."""
        await self._begin(stream=False)
        return _page([batch async for batch in self], self._partition, self._cursor)

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

    async def _begin(self, *, stream: bool | int) -> _PageBatches:
        _check_unused(self._batches)
        info = self._client.info or await self._client.discover()
        response = self._client.open(info, self._partition, self._cursor, stream=stream)
        await response.__aenter__()
        self._response = response
        self._batches = _PageBatches(response.reader, self._partition)
        return self._batches

    async def _receive(self, batches: _PageBatches) -> None:
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


class SyncFeedClient(_Client):
    """`FeedClient` over `httpx.Client`, for threads and executors.

    A context manager; its methods may be called from several threads.
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
    ) -> None:
        limits = limits or Limits()
        self.transport = SyncTransport(url, http=http, limits=limits)
        super().__init__(self.transport, v1_partitions, fetch, retry, limits, decoder)

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
        info = retry_sync(self._discover, backoff, on_retry=log_attempt)
        self.check(info)
        self.info = info
        return info

    def _discover(self) -> FeedInfo:
        limit = self.limits.max_discovery_bytes
        return self._negotiate(*self.transport.get("", [], max_bytes=limit))

    def open(
        self,
        info: FeedInfo,
        partition: int,
        cursor: str,
        *,
        stream: bool | int = False,
        progress: Progress | None = None,
    ) -> SyncResponse:
        """See `FeedClient.open`."""
        dialect, params, idle_timeout = self._plan(info, partition, cursor, stream)
        stream_of_bytes = self.transport.stream(
            dialect.suffix, params, partition=partition, idle_timeout=idle_timeout
        )
        reader = self._page_reader(info, partition, cursor, progress)
        return SyncResponse(stream_of_bytes, reader, info)

    def fetch(self, partition: int, cursor: str) -> SyncFetch:
        """One fetch: `read()` it for a `Page`, or iterate over it for each `Batch`.

        Otherwise as `FeedClient.fetch`.
        """
        return SyncFetch(self, partition, cursor)


class SyncResponse:
    """See `Response`."""

    __slots__ = ("_info", "_stream", "reader")

    def __init__(self, stream: SyncResponseStream, reader: PageReader, info: FeedInfo) -> None:
        self._stream = stream
        self.reader = reader
        self._info = info

    def __enter__(self) -> Self:
        try:
            self._stream.__enter__()
        except RequestRefusedError as error:
            _check_count(error, self._info)
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
        """See `Response.chunks`."""
        return self._stream


class SyncFetch:
    """One fetch: `read` it, or iterate over it, once. See `SyncFeedClient.fetch`."""

    def __init__(self, client: SyncFeedClient, partition: int, cursor: str) -> None:
        self._client = client
        self._partition = partition
        self._cursor = cursor
        self._response: SyncResponse | None = None
        self._batches: _PageBatches | None = None

    def read(self) -> Page:
        """Return the whole response."""
        self._begin(stream=False)
        return _page(list(self), self._partition, self._cursor)

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

    def _begin(self, *, stream: bool | int) -> _PageBatches:
        _check_unused(self._batches)
        info = self._client.info or self._client.discover()
        response = self._client.open(info, self._partition, self._cursor, stream=stream)
        response.__enter__()
        self._response = response
        self._batches = _PageBatches(response.reader, self._partition)
        return self._batches

    def _receive(self, batches: _PageBatches) -> None:
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


def _check_count(error: RequestRefusedError, info: FeedInfo) -> None:
    """Raise ProtocolError where a v1 publisher refuses our number of partitions.

    No discovery and no other cursor repairs that.
    """
    if info.dialect == "v1" and error.status == 400 and _WRONG_COUNT.search(error.message):
        raise ProtocolError(
            f"{error.message}. The feed has another number of partitions than "
            f"v1_partitions={len(info.partitions)}: give the number that its publisher documents",
            feed=error.feed,
            partition=error.partition,
        ) from error


def _check_unused(batches: _PageBatches | None) -> None:
    if batches is not None:
        raise RuntimeError("a fetch can be read once: call fetch() again")


def log_attempt(error: Exception, attempt: int, pause: float) -> None:
    """Log that a request is about to be repeated."""
    log.warning("%s; attempt %d in %.1f s", error, attempt, pause)
