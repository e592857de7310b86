"""`FeedClient`: one call for each operation of the protocol."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Generator, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, ClassVar, Self

import orjson

from feedapi_client.arguments import check_function, check_instance
from feedapi_client.errors import FeedError, ProtocolError, RequestRefusedError
from feedapi_client.http.io import AsyncHTTP, AsyncIO
from feedapi_client.http.transport import Endpoint, Exchange
from feedapi_client.lineage.graph import Graph
from feedapi_client.model import Batch, Decoder, Event, FeedInfo
from feedapi_client.options import (
    FetchOptions,
    Limits,
    RetryPolicy,
    default_decision,
    entry_decision,
)
from feedapi_client.protocol.decoder import PART_BYTES, PageDecoder
from feedapi_client.protocol.dialects import DIALECTS, check_options
from feedapi_client.protocol.negotiation import check_v1_partitions, negotiate
from feedapi_client.protocol.page import CheckpointedEvents, PageReader, Progress
from feedapi_client.retry import Backoff, retry

log = logging.getLogger(__name__)

# What publishers of dialect v1 say when `n` is not their number of partitions.
WRONG_COUNT = re.compile(r"partition count (mismatch|does ?n.t match)", re.IGNORECASE)


class FeedClient:
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

    _io: ClassVar[Any] = AsyncIO

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
        self.transport = Endpoint(url, self._io(url, http, limits))
        check_v1_partitions(v1_partitions)
        check_instance("fetch", fetch, FetchOptions, "FetchOptions or None")
        check_instance("retry", retry, RetryPolicy, "a RetryPolicy or None")
        check_function("decoder", decoder)
        self.feed = self.transport.feed
        """The feed's URL without credentials and query."""
        self.v1_partitions = v1_partitions
        self.options = fetch or FetchOptions()
        self._selects_events = bool(self.options.selection())
        self.retry = retry or RetryPolicy()
        self.limits = self.transport.limits
        self.decoder = decoder
        self._any_payload = False
        self.info: FeedInfo | None = None
        """The last discovery."""
        # Digest of the last response that was understood, and what it said.
        self._known: tuple[bytes, FeedInfo] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections, unless the http client is the caller's."""
        await self.transport.io.aclose()

    async def discover(self) -> FeedInfo:
        """Negotiate (R1, at each call anew: R2) and validate what was found.

        Retried as the policy says; a `HostError` only once a discovery has succeeded. Raises
        `NegotiationError`, `AuthenticationError`, `FeedUnavailableError`, `TornResponseError`,
        `ProtocolError`, `LineageError`; `info` then stays what it was.
        """
        policy, io = self.retry, self.transport.io
        if self.info is None and policy.decide is default_decision:
            # Before anything is known, a wrong URL is likelier than an outage of DNS (R14).
            policy = replace(policy, decide=entry_decision)
        backoff = Backoff.of(policy, clock=io.now)
        return await retry(self.discover_once, backoff, sleep=io.sleep, on_retry=log_attempt)

    async def discover_once(self) -> FeedInfo:
        """Discover without a retry. Raises what `discover` does.

        One that says the same as the last, as most do, is not read again, which for 32,768
        partitions would take some 20 ms. It is a `FeedInfo` of its own: there was a discovery.
        """
        most = self.limits.max_discovery_bytes
        status, body = await Exchange(self.transport, "", []).discovery(most)
        digest = sha256(b"%d %b" % (status, body)).digest()
        if self._known is None or self._known[0] != digest:
            read = partial(self._read, status, body)
            self._known = digest, await self.transport.io.aside(read, len(body))
        self.info = replace(self._known[1])
        return self.info

    def _read(self, status: int, body: bytes) -> FeedInfo:
        info = negotiate(status, body, feed=self.feed, v1_partitions=self.v1_partitions)
        self.check(info)
        return info

    def check(self, info: FeedInfo) -> None:
        """Raise `LineageError` when the partitions of a discovery make no valid graph, and
        `ProtocolError` when this client's options select events in a way that it can't carry.
        """
        Graph(info.partitions, feed=self.feed)
        check_options(info, self.options, feed=self.feed)

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
        dialect, limits = DIALECTS[info.dialect], self.limits
        # A reader that keeps its own idle time, as the consumer does, ends a stream before the
        # transport calls it broken.
        streamed = stream is not False and info.stream
        idle = limits.stream_idle_timeout + limits.request_timeout if streamed else None
        params = dialect.fetch_params(info, partition, cursor, self.options, stream=stream)
        listed = info.partitions.get(partition)
        decoder = PageDecoder(
            dialect,
            feed=self.feed,
            partition=partition,
            decoder=self.decoder,
            max_line_bytes=limits.max_line_bytes,
            any_payload=self._any_payload,
        )
        reader = PageReader(
            decoder,
            feed=self.feed,
            partition=partition,
            asked=cursor,
            closed=listed is not None and listed.closed,
            last_cursor=listed.last_cursor if listed and not self._selects_events else None,
            progress=progress,
            max_unclosed_bytes=limits.max_buffered_bytes,
        )
        return FetchResponse(reader, info, self.transport, dialect.suffix, params, partition, idle)

    def asking_for_one(self) -> Self:
        """Return a client that asks for one event at a time and takes any payload.

        It shares the connections and the last discovery of this one.
        """
        client = copy(self)
        client.options = replace(self.options, page_size_hint=1, stream=False)
        client._any_payload = True
        return client

    def fetch(self, partition: int, cursor: str) -> Fetch:
        """One fetch: await it for a `Page`, or iterate for each `Batch` as its checkpoint arrives.

        Discovers first when nothing is known. Not retried; raises what `open` does, and
        `TornResponseError`, `LineTooLongError`, `ProtocolError` or `BufferLimitError` behind what
        was checkpointed. When iterated, it asks for a streamed response if `fetch.stream` says so;
        to leave it early, enter it (``async with client.fetch(...) as batches``).
        """
        return Fetch(self, partition, cursor)

    def __repr__(self) -> str:
        known = "not discovered yet"
        if self.info is not None:
            known = f"{self.info.dialect}, {len(self.info.partitions)} partitions"
        return f"<{type(self).__name__} {self.feed}: {known}>"


class FetchResponse(Exchange):
    """A response, open while it is entered. Feed its chunks, or its lines, to `reader`."""

    __slots__ = ("_info", "_parts", "_since", "reader")

    def __init__(self, reader: PageReader, info: FeedInfo, *request: Any) -> None:
        super().__init__(*request)
        self._parts: Iterator[list[bytes]] = iter(())
        self._since = 0.0
        self.reader, self._info = reader, info

    async def __aenter__(self) -> Self:
        try:
            return await super().__aenter__()
        except RequestRefusedError as error:
            _check_count(error, self._info)
            raise

    async def __anext__(self) -> list[bytes]:  # type: ignore[override]
        """The next lines; the last may be incomplete."""
        part = next(self._parts, None)
        if part is None:
            self._parts = self.reader.parts(await super().__anext__())
            part = next(self._parts, [])
            if self.reader.kept_bytes < PART_BYTES:
                self._since = self._io.now()
                return part
            self._since = 0.0
        await self._io.others(self._since)  # to read a chunk, or a long line, may take long
        self._since = self._io.now()
        return part

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes as they arrive, content encodings undone.

        Raises `TornResponseError` when the body breaks off.
        """
        async for lines in self:
            yield b"".join(lines)


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


class Fetch:
    """One fetch: await it, `read` it, or iterate over it, once. See `FeedClient.fetch`."""

    def __init__(self, client: FeedClient, partition: int, cursor: str) -> None:
        self._client, self._partition, self._cursor = client, partition, cursor
        self._batches: Any = None

    def __await__(self) -> Generator[Any, Any, Page]:
        return self.read().__await__()

    async def read(self) -> Page:
        """Return the whole response. Raises RuntimeError when it was read already."""
        if self._batches is not None:
            raise RuntimeError("a fetch can be read once: call fetch() again")
        self._batches = self._read(stream=False)
        batches = [batch async for batch in self]
        events = [event for batch in batches for event in batch.events]
        cursor = batches[-1].cursor if batches else None
        return Page(self._partition, self._cursor, events, cursor)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the request. Does nothing when it has ended."""
        if self._batches is not None:
            await self._batches.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        if self._batches is None:
            self._batches = self._read(stream=self._client.options.streaming)
        batch: Batch = await anext(self._batches)
        return batch

    async def _read(self, *, stream: bool | int) -> AsyncIterator[Batch]:
        """Errors come behind what was checkpointed before them."""
        client, partition = self._client, self._partition
        info, gave = client.info or await client.discover(), False
        async with client.open(info, partition, self._cursor, stream=stream) as response:
            reader = response.reader
            async for lines in response:
                for events in reader.feed(lines):
                    gave = True
                    yield self._batch(events)
                reader.check()
            last: list[CheckpointedEvents]
            failed = None
            try:
                last = reader.finish().batches
                held, cursor = reader.held, reader.last_checkpoint
                if held is not None:
                    last = [*last, held]  # it shows what was sent, whatever the cursor
                elif not gave and not last and cursor is not None:
                    last = [CheckpointedEvents([], cursor, 0)]
            except FeedError as error:
                last, failed = reader.rest(), error
            for events in last:
                yield self._batch(events)
            if failed is not None:
                raise failed

    def _batch(self, events: CheckpointedEvents) -> Batch:
        return Batch(self._partition, events.events, events.cursor)


def _check_count(error: RequestRefusedError, info: FeedInfo) -> None:
    # No discovery and no other cursor repairs a wrong number of v1 partitions.
    if info.dialect == "v1" and error.status == 400 and WRONG_COUNT.search(error.message):
        raise ProtocolError(
            f"{error.message}. The feed has another number of partitions than "
            f"v1_partitions={len(info.partitions)}: give the number that its publisher documents",
            feed=error.feed,
            partition=error.partition,
        ) from error


def log_attempt(error: Exception, attempt: int, pause: float) -> None:
    log.warning("%s; attempt %d in %.1f s", error, attempt, pause)
