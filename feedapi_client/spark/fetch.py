"""Reading one partition to a limit or to its end, with the rules on retries and progress (R3, R10, R13, R14). Imports no Spark."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from feedapi_client.client import SyncFeedClient
from feedapi_client.errors import (
    BufferLimitError,
    FeedError,
    NoProgressError,
    ProtocolError,
    RequestRefusedError,
)
from feedapi_client.http.transport import SyncTransport, backoff
from feedapi_client.model import LAST, FeedInfo
from feedapi_client.options import FetchOptions
from feedapi_client.protocol.decoder import CheckpointedEvents, PageDecoder
from feedapi_client.protocol.dialects import check_options
from feedapi_client.spark.auth import authorize
from feedapi_client.spark.options import OptionError, SourceOptions

_log = logging.getLogger(__name__)

_CONFLICT = 409
_SHARED_CLIENTS = 8
_SHORTEST_LINE = len(b'{"data":""}\n')


@dataclass(frozen=True, slots=True)
class Target:
    """A partition to read, and from where. `sequence` and `depth` go into the columns of the same name."""

    partition: int
    cursor: str
    closed: bool = False
    last_cursor: str | None = None
    sequence: int = 0
    depth: int = 0


@dataclass(slots=True)
class Outcome:
    """How far a read came. `ended`: a complete response without events ended on the cursor asked with (`asked_closed`: after a discovery that said
    closed), or the closed partition's last cursor was reached. `more`: events are known to follow. `refused` is the status of a refusal that asks for
    a discovery (0: the partition is not listed any more); `failed` an error that may pass, as text."""

    partition: int
    start: str
    cursor: str
    events: int = 0
    ended: bool = False
    asked_closed: bool = False
    more: bool = False
    refused: int | None = None
    failed: str | None = None


class _Enough(Exception):  # noqa: N818 - no error
    """The limit is reached; the rest of the response is not wanted."""


class Feed:
    """The connection of one process to one feed; may be used by several threads at once."""

    def __init__(
        self,
        options: SourceOptions,
        fetch: FetchOptions | None = None,
        info: FeedInfo | None = None,
    ) -> None:
        """`fetch` and `info` are what the driver resolved; without them `discover` resolves them. Raises `OptionError`."""
        self.options = options
        self._lock = threading.Lock()
        self._info = info
        self._http = shared_http(options)
        self._resolved = fetch is not None
        self.client = self._client(fetch or replace(options.fetch, filters={}))

    @property
    def url(self) -> str:
        """The feed's URL for messages."""
        return self.client.feed

    @property
    def info(self) -> FeedInfo:
        """The last discovery."""
        return self._info or self.discover()

    @property
    def fetch_options(self) -> FetchOptions:
        """What a fetch asks for, filters included: their names are known after a discovery."""
        if not self._resolved:
            self.discover()
        return self.client.options

    def discover(self, seen: FeedInfo | None = None) -> FeedInfo:
        """Discover, unless another thread did so since the caller had `seen`. Raises `FeedError`, `OptionError`."""
        with self._lock:
            if seen is not None and self._info is not seen and self._info is not None:
                return self._info
            info = self.client.discover()
            if not self._resolved:
                fetch = replace(self.options.fetch, filters=_resolve(self.options.filters, info))
                check_options(info, fetch, feed=self.url)
                self.client, self._resolved = self._client(fetch), True
            self._info = info
            return info

    def _client(self, fetch: FetchOptions) -> SyncFeedClient:
        options = self.options
        return SyncFeedClient(
            options.url,
            http=self._http,
            fetch=fetch,
            limits=options.limits,
            retry=options.retry,
            v1_partitions=options.v1_partitions,
        )


def _resolve(wanted: Mapping[str, str], info: FeedInfo) -> dict[str, str]:
    """Filter names as the feed spells them: Spark hands over option names in lower case."""
    offered: dict[str, list[str]] = {}
    for name in info.filters:
        offered.setdefault(name.lower(), []).append(name)
    resolved = {}
    for name, value in wanted.items():
        matches = offered.get(name.lower(), [])
        if len(matches) > 1:
            raise OptionError(
                f"feedapi source: option filter.{name} fits several filters of the feed: {', '.join(matches)}"
            )
        resolved[matches[0] if matches else name] = value
    return resolved


_http_clients: dict[Any, Any] = {}
_http_lock = threading.Lock()


def shared_http(options: SourceOptions) -> Any:
    """The `httpx.Client` of this process for such options, with fresh credentials.

    Python workers outlive a task: the next epoch finds its connections open, and need not load certificates again. Raises `OptionError`.
    """
    headers = tuple(tuple(sorted(pairs.items())) for pairs in (options.headers, options.header_env))
    key = (options.url, options.limits, headers, options.auth_env, options.auth_callable)
    with _http_lock:
        if key not in _http_clients:
            while len(_http_clients) >= _SHARED_CLIENTS:
                del _http_clients[next(iter(_http_clients))]
            _http_clients[key] = SyncTransport(options.url, limits=options.limits).client
        client = _http_clients[key]
    authorize(client, options)
    return client


def close_connections() -> None:
    """Close what this process holds open. Readers made before can't be used any more."""
    with _http_lock:
        while _http_clients:
            _http_clients.popitem()[1].close()


# ---------------------------------------------------------------------- reading


class PartitionReader:
    """Reads one partition; use once.

    `limit` bounds the events: whole checkpoints only, and at least one. `full` says, after each run, that enough was taken for another reason.
    `patience` is how long errors that may pass are retried without progress: what was read before is kept, and with nothing read the outcome says
    `failed`; None raises after `RetryPolicy.give_up_after` instead. A `probe` wants to know what there is now, and never holds a response open.
    """

    def __init__(
        self,
        feed: Feed,
        target: Target,
        *,
        limit: int | None = None,
        full: Callable[[], bool] = lambda: False,
        patience: float | None = None,
        probe: bool = False,
    ) -> None:
        self.feed = feed
        self.target = target
        self.outcome = Outcome(target.partition, target.cursor, target.cursor)
        self._limit = limit
        self._full = full
        self._patience = patience
        self._stream = False if probe else feed.options.fetch.streaming
        self._ready: deque[CheckpointedEvents] = deque()
        self._held: CheckpointedEvents | None = None
        self._stuck = 0
        self._conflicts = 0
        self._failing_since: float | None = None
        self._failures = 0

    def read(self, take: Callable[[CheckpointedEvents], object] = len) -> Outcome:
        """Read to the limit or to the end; `take` gets each run, in order. Raises `FeedError` for what no retry mends."""
        for run in self.runs():
            take(run)
        return self.outcome

    def runs(self) -> Iterator[CheckpointedEvents]:
        """The same, as an iterator: nothing is received while its caller is busy. `outcome` is complete at its end."""
        try:
            while not self._over():
                yield from self._request()
        except _Enough:
            pass
        yield from self._ready

    def _over(self) -> bool:
        outcome = self.outcome
        return outcome.ended or outcome.refused is not None or outcome.failed is not None

    def _request(self) -> Iterator[CheckpointedEvents]:
        info = self.feed.info
        if self.target.partition not in info.partitions:
            self.outcome.refused = 0
            return
        before = self.outcome.cursor
        try:
            yield from self._respond(info)
        except RequestRefusedError as error:
            self._refused(error, info)
        except FeedError as error:
            if self.outcome.cursor != before:
                self._progressed()
            self._retry(error)
        else:
            self._conflicts = 0

    def _respond(self, info: FeedInfo) -> Iterator[CheckpointedEvents]:
        asked = self.outcome.cursor
        with self.feed.client.open(
            info, self.target.partition, asked, stream=self._stream
        ) as response:
            decoder = response.decoder
            self._held = None
            try:
                for chunk in response.chunks():
                    self._feed(decoder, chunk, asked)
                    yield from self._drain()
                decoder.finish()
            finally:
                self._collect(decoder, asked)
        self._judge(decoder, asked, info)

    def _drain(self) -> Iterator[CheckpointedEvents]:
        while self._ready:
            yield self._ready.popleft()
            if self._full():
                raise _Enough

    # ------------------------------------------------------------------ one response

    def _feed(self, decoder: PageDecoder, chunk: bytes, asked: str) -> None:
        if self._limit is None or self._fits(decoder, chunk, self._limit - self.outcome.events):
            decoder.feed(chunk)
            self._collect(decoder, asked)
        else:
            # Near the limit: one line at a time, to see every checkpoint. The decoder hands over the latest only.
            for line in _lines(chunk):
                decoder.feed(line)
                self._collect(decoder, asked)
        self._check_bounds(decoder)

    def _fits(self, decoder: PageDecoder, chunk: bytes, room: int) -> bool:
        """Whether the events that are held or in the chunk are surely not too many; counting lines costs something, so that a guess comes first."""
        held = decoder.tail_bytes // _SHORTEST_LINE + 1
        return held + len(chunk) // _SHORTEST_LINE <= room or held + chunk.count(b"\n") <= room

    def _check_bounds(self, decoder: PageDecoder) -> None:
        held = decoder.tail_bytes + (self._held.size if self._held else 0)
        if held > self.feed.options.limits.max_buffered_bytes:
            raise BufferLimitError(
                f"{held} bytes came without a checkpoint to stage them by, and option maxBufferedBytes is {self.feed.options.limits.max_buffered_bytes}. "
                "Raise it, or ask the publisher for checkpoints more often",
                feed=self.feed.url,
                partition=self.target.partition,
            )

    def _collect(self, decoder: PageDecoder, asked: str) -> None:
        run = decoder.take()
        if run is None:
            return
        if self._held is not None:
            run, self._held = (
                CheckpointedEvents(
                    self._held.events + run.events, run.cursor, self._held.size + run.size
                ),
                None,
            )
        if run.events and run.cursor == asked:
            self._held = run  # the checkpoint does not move: deliver once a later one does (R13)
        elif run.events or run.cursor != self.outcome.cursor:
            self._accept(run)

    def _accept(self, run: CheckpointedEvents) -> None:
        outcome = self.outcome
        if (
            self._limit is not None
            and outcome.events
            and outcome.events + len(run.events) > self._limit
        ):
            outcome.more = True
            raise _Enough
        self._ready.append(run)
        outcome.events += len(run.events)
        outcome.cursor = run.cursor
        if self._reached_end():
            outcome.ended, outcome.asked_closed = True, True
            raise _Enough
        if self._limit is not None and outcome.events >= self._limit:
            raise _Enough

    def _reached_end(self) -> bool:
        listed = self.feed.info.partitions.get(self.target.partition)
        return listed is not None and listed.closed and listed.last_cursor == self.outcome.cursor

    def _judge(self, decoder: PageDecoder, asked: str, info: FeedInfo) -> None:
        closed = info.partitions[self.target.partition].closed
        if self.outcome.cursor != asked:
            self._progressed()
        elif self._held is not None or decoder.saw_events or (decoder.cursor is None and closed):
            self._no_progress(decoder.saw_events)
        else:
            self.outcome.ended, self.outcome.asked_closed = True, closed

    # ------------------------------------------------------------------ when it does not go on

    def _progressed(self) -> None:
        self._stuck = self._failures = 0
        self._failing_since = None

    def _no_progress(self, saw_events: bool) -> None:
        self._stuck += 1
        if self._stuck >= self.feed.options.limits.max_attempts_without_progress:
            what = (
                "brought events and no new cursor"
                if saw_events
                else "of a closed partition brought neither an event nor a cursor"
            )
            raise NoProgressError(
                f"{self._stuck} responses in a row {what}",
                feed=self.feed.url,
                partition=self.target.partition,
            )

    def _refused(self, error: RequestRefusedError, info: FeedInfo) -> None:
        """A new token is fetched here; all else is for the driver, which discovers again (R10)."""
        if error.status != _CONFLICT:
            self.outcome.refused = error.status
            return
        self._conflicts += 1
        if self._conflicts > self.feed.options.limits.max_attempts_without_progress:
            raise ProtocolError(
                "the fetch is answered 409 again and again, with a fresh token each time",
                feed=self.feed.url,
                partition=self.target.partition,
            ) from error
        if self._conflicts > 1:
            time.sleep(backoff(self.feed.options.retry, self._conflicts, error))
        try:
            self.feed.discover(seen=info)
        except FeedError as failed:
            self._retry(failed)

    def _retry(self, error: FeedError) -> None:
        policy = self.feed.options.retry
        if policy.decide(error) != "retry":
            raise error
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        self._failures += 1
        pause = backoff(policy, self._failures, error)
        give_up = policy.give_up_after if self._patience is None else self._patience
        if give_up is None or now + pause - self._failing_since < give_up:
            time.sleep(pause)
        elif self._patience is None:
            raise error
        elif self.outcome.cursor == self.outcome.start:
            self.outcome.failed = f"{type(error).__name__}: {error.message}"
        else:
            raise _Enough


def _lines(chunk: bytes) -> Iterator[bytes]:
    """The chunk's lines with their newlines; only ``\\n`` ends a line."""
    start = 0
    while start < len(chunk):
        end = chunk.find(b"\n", start) + 1 or len(chunk)
        yield chunk[start:end]
        start = end


def read_end(feed: Feed, partition: int) -> str:
    """The cursor behind the newest event of an open partition, by a fetch of ``_last``. Raises `FeedError`."""
    return (
        PartitionReader(feed, Target(partition, LAST), full=lambda: True, probe=True).read().cursor
    )
