"""`FeedClient`: one call for each operation of the protocol."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, ClassVar, Self

import orjson

from feedapi_client.arguments import check_function, check_instance
from feedapi_client.errors import ProtocolError, RequestRefusedError
from feedapi_client.http.io import AsyncHTTP, AsyncIO
from feedapi_client.http.transport import Endpoint, Exchange
from feedapi_client.lineage.graph import Graph
from feedapi_client.model import Decoder, Event, FeedInfo
from feedapi_client.options import (
    FetchOptions,
    Limits,
    RetryPolicy,
    default_decision,
    entry_decision,
)
from feedapi_client.protocol.decoder import PageDecoder
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
            info = negotiate(status, body, feed=self.feed, v1_partitions=self.v1_partitions)
            self.check(info)
            self._known = digest, info
        self.info = replace(self._known[1])
        return self.info

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
        """Fetch chunk by chunk: ``async with client.open(...) as response``, and feed each chunk to
        `response.reader`. With `stream` (True, or milliseconds) the response is held open where the
        feed offers that.

        Entering raises `RequestRefusedError`, `AuthenticationError`, `FeedUnavailableError` and
        `ProtocolError`, the chunks `TornResponseError`.
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

    async def fetch(self, partition: int, cursor: str) -> Page:
        """Fetch one whole response. Discovers first when nothing is known. Not retried.

        Raises what `open` does, `TornResponseError`, `LineTooLongError`, `ProtocolError` and
        `BufferLimitError`.
        """
        info = self.info or await self.discover()
        batches: list[CheckpointedEvents] = []
        async with self.open(info, partition, cursor) as response:
            reader = response.reader
            async for chunk in response:
                batches += reader.feed(chunk)
                reader.check()
            batches += reader.finish().batches
        if reader.held is not None:
            batches.append(reader.held)  # it shows what was sent, whatever the cursor
        last = batches[-1].cursor if batches else reader.last_checkpoint
        return Page(partition, cursor, [event for each in batches for event in each.events], last)

    def __repr__(self) -> str:
        known = "not discovered yet"
        if self.info is not None:
            known = f"{self.info.dialect}, {len(self.info.partitions)} partitions"
        return f"<{type(self).__name__} {self.feed}: {known}>"


class FetchResponse(Exchange):
    """A response, open while it is entered. Iterate over its chunks, and feed them to `reader`."""

    def __init__(self, reader: PageReader, info: FeedInfo, *request: Any) -> None:
        super().__init__(*request)
        self._parts: Iterator[bytes] = iter(())
        self.reader, self._info = reader, info

    async def __aenter__(self) -> Self:
        try:
            return await super().__aenter__()
        except RequestRefusedError as error:
            _check_count(error, self._info)
            raise

    async def __anext__(self) -> bytes:
        part = next(self._parts, None)
        if part is not None:
            await self._io.others()  # to read a chunk may take long
            return part
        self._parts = self.reader.parts(await super().__anext__())
        return next(self._parts, b"")


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
