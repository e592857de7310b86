"""Reads one partition to a limit or to its end (R3, R10, R13, R14). Imports no Spark.

`feedapi_client.protocol.page.PageReader` has the rules of one response. Here are the limit on the
events, and what happens between two responses: retries, refusals, the end.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from feedapi_client.errors import (
    AuthenticationError,
    BufferLimitError,
    FeedError,
    FeedUnavailableError,
    LineTooLongError,
    NoProgressError,
    ProtocolError,
    RequestRefusedError,
)
from feedapi_client.model import LAST, FeedInfo
from feedapi_client.protocol.page import (
    CheckpointedEvents,
    EndEvidence,
    Outcome,
    PageReader,
    Progress,
    behind_error,
    lagging_error,
    unrecognized_error,
)
from feedapi_client.retry import Backoff, gives_up_after
from feedapi_client.runtime.failures import is_refusal, refusal_backoff
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.fixed_end import EndWatch, MayHoldEnd, fingerprints
from feedapi_client.spark.source_options import with_option_names

CONFLICT = 409
DENIED = 401
"""Stands for 403 as well."""
_NOT_LISTED = 0
_END_GRACE_PERIOD = 2.0
_MAX_LOOKS = 100
"""Batches that a look behind the fixed end reads, at most."""
_SHORTEST_LINE = len(b'{"data":""}\n')


@dataclass(frozen=True, slots=True)
class Target:
    """A partition to read, and the cursor to start from.

    `sequence` and `depth` are for the columns of the same names. `end` is the cursor of a fixed end
    (see `feedapi_client.spark.fixed_end`); None reads until the partition is caught up. With
    `resumable` the end may also be recognized by the events behind it: where the publisher repeats
    a part of its events, that is too early, and only another read brings the rest. With `required`
    it is an error where no checkpoint has that cursor.
    """

    partition: int
    cursor: str
    closed: bool = False
    last_cursor: str | None = None
    sequence: int = 0
    depth: int = 0
    end: str | None = None
    resumable: bool = False
    required: bool = False


@dataclass(slots=True)
class FetchResult:
    """How far a read of one partition came."""

    partition: int
    start: str
    """The cursor that the read started from."""
    cursor: str
    """The cursor behind the last event that was read."""
    events: int = 0
    ended: bool = False
    """The end was reached: a complete response without events whose cursor is the one asked with,
    or the last cursor of a closed partition."""
    asked_closed: bool = False
    """The discovery before the last request listed the partition as closed."""
    unproven: bool = False
    """It is closed, discovery lists no end, and only this empty response shows one (R6)."""
    silent: bool = False
    """That response held no cursor."""
    reached: bool = False
    """The fixed end of the read was reached."""
    more: bool = False
    """Events are known to follow."""
    refused: int | None = None
    """Status of a refusal that calls for a discovery; 0: the partition is no longer listed."""
    refusal: str = ""
    """What the publisher said with it."""
    conflict: bool = False
    """A token was refused (409): the partitions have changed."""
    unknown_commands: bool = False
    """Lines were there that an extension of the protocol may know: the partitions may have
    changed."""
    failed: str | None = None
    """A temporary error, as text."""
    requests: int = 0
    retries: int = 0
    """Requests that failed or were refused, and were or will be made again."""


class _Stop(Exception):  # noqa: N818 - not an error
    """Enough was read; the rest of the response is not needed."""


class PartitionReader:
    """Reads one partition. Use it once.

    Arguments:
        limit: maximum number of events. Only whole batches are read, and at least one.
        full: called after each batch; True stops the read.
        grace_period: seconds without progress for which temporary errors are retried. What was
            read before them is kept; when nothing was read, the result says `failed`. With None
            the error is raised after `RetryPolicy.give_up_after`.
        page_size: what to ask for as ``pageSizeHint``, in place of the option.
        clock: seconds on any monotonic clock.
    """

    def __init__(
        self,
        connection: FeedConnection,
        target: Target,
        *,
        limit: int | None = None,
        full: Callable[[], bool] = lambda: False,
        grace_period: float | None = None,
        page_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connection = connection
        self.target = target
        self.result = FetchResult(target.partition, target.cursor, target.cursor)
        self._page_size = page_size
        self._watch = EndWatch(target, Looks(connection, target.partition), feed=connection.url)
        self._limit = limit
        self._full = full
        self._grace_period = grace_period
        limits, policy = connection.options.limits, connection.options.retry
        self._progress = Progress(limits.max_attempts_without_progress)
        self._evidence = EndEvidence(limits.settle_time, limits.poll_interval)
        self._silent = False
        self._closed_since: float | None = None
        self._failed_at = float("-inf")
        self._failures = Backoff.of(policy, give_up_after=grace_period, clock=clock)
        self._clock = clock
        self._began = self._moved = clock()
        self._allowed = limits.slot_timeout
        """Seconds that a response may take to its next checkpoint. Others wait for the slowest read
        of an epoch: it ends with the first checkpoint after that time, too."""
        self._lag = Backoff(
            base_delay=policy.base_delay,
            max_delay=policy.max_delay,
            give_up_after=gives_up_after(policy) if grace_period is None else grace_period,
        )
        self._conflicts = refusal_backoff(
            policy, give_up_after=policy.refused_for if grace_period is None else grace_period
        )

    def read(self, receive: Callable[[CheckpointedEvents], object] = len) -> FetchResult:
        """Read to the limit or the end; `receive` gets each batch, in order. Raises `FeedError`."""
        for batch in self.batches():
            receive(batch)
        return self.result

    def batches(self) -> Iterator[CheckpointedEvents]:
        """Yield the same batches. Nothing is received while the caller is busy with one.

        `result` is complete at the end. Raises what `read` raises.
        """
        try:
            while not self._over():
                try:
                    yield from self._request()
                except MayHoldEnd as found:
                    for page in self._watch.pages_to_end(found, self.result.cursor):
                        yield from self._deliver(page)
        except _Stop:
            pass
        self.result.reached = self._watch.reached

    def _over(self) -> bool:
        result = self.result
        over = result.ended or self._watch.reached
        return over or result.refused is not None or result.failed is not None

    def _request(self) -> Iterator[CheckpointedEvents]:
        info = self.connection.info
        if self.target.partition not in info.partitions:
            self.result.refused = _NOT_LISTED
            return
        if not info.partitions[self.target.partition].closed:
            self._closed_since = None
        elif self._closed_since is None:
            first = not self.result.requests
            self._closed_since = self.connection.began if first else time.monotonic()
        asked = self.result.cursor
        self.result.requests += 1
        try:
            yield from self._read_response(info, asked)
        except FeedError as error:
            self.connection.answered(failed=not isinstance(error, RequestRefusedError))
            if isinstance(error, (BufferLimitError, LineTooLongError)):
                raise self._in_option_names(error) from error
            if self._is_refusal(error):
                denied = isinstance(error, AuthenticationError)
                self._refused(error, DENIED if denied else int(getattr(error, "status", 0)), info)
                return
            if self.result.cursor != asked:
                self._progress.moved(self.result.cursor, events=True)
                self._failures.reset()
            self._retry(self._in_option_names(error) if type(error) is ProtocolError else error)
        else:
            self.connection.answered(failed=False)
            self._conflicts.reset()

    # ------------------------------------------------------------------ one response

    def _read_response(self, info: FeedInfo, asked: str) -> Iterator[CheckpointedEvents]:
        client = self.connection.client_for(self._page_size)
        partition, progress = self.target.partition, self._progress
        opened = client.open(info, partition, asked, progress=progress)
        with opened as response:
            reader = response.reader
            self._moved = self._clock()
            try:
                for chunk in response.chunks():
                    for piece in self._pieces(reader, chunk):
                        yield from self._deliver(reader.feed(piece))
                    reader.check()
                    self._check_pace()
                finished = reader.finish()
                yield from self._deliver(finished.batches)
            finally:
                self.result.unknown_commands |= reader.unknown_commands > 0
        self._take_outcome(finished.outcome, info, reader, asked)

    def _check_pace(self) -> None:
        """Raise where no checkpoint came for too long, whatever else did (R14)."""
        allowed = self._allowed
        if self._clock() - self._moved <= allowed:
            return
        self._allowed *= 2
        raise FeedUnavailableError(
            f"no checkpoint came within {allowed:g} s: if that is to be expected, raise option "
            "slotTimeout",
            feed=self.connection.url,
            partition=self.target.partition,
        )

    def _take_outcome(
        self, outcome: Outcome, info: FeedInfo, reader: PageReader, asked: str
    ) -> None:
        """Act on a complete response. Raises `FeedError` for one that says nothing."""
        feed, partition = self.connection.url, self.target.partition
        if outcome is not Outcome.LAGGING and outcome is not Outcome.BEHIND:
            self._lag.reset()
        if outcome is Outcome.PROGRESS:
            if self._evidence.answers:
                self._doubt()  # what came behind empty responses shows that they may lag
            self._failures.reset()
            self._watch.response_over(self.result.cursor)
        elif outcome is Outcome.END:
            self.result.ended, self.result.asked_closed = True, reader.closed
        elif outcome in (Outcome.EMPTY, Outcome.SILENT):
            self._seems_to_end(info, reader, silent=reader.last_checkpoint is None)
        elif outcome is Outcome.LAGGING:
            error = lagging_error(asked, reader.last_cursor, feed=feed, partition=partition)
            self._wait_for_replica(error)
        elif outcome is Outcome.BEHIND:
            self._wait_for_replica(behind_error(asked, feed=feed, partition=partition))
        elif outcome is Outcome.UNRECOGNIZED:
            raise unrecognized_error(feed=feed, partition=partition)

    def _pieces(self, reader: PageReader, chunk: bytes) -> Iterator[bytes]:
        """Yield the chunk whole, or by line near the limit or the fixed end.

        A `PageReader` coalesces the batches of a chunk. There each one has to be seen.
        """
        near_end = self._watch.may_be_in(chunk)
        held = reader.unclosed_events + 1
        room = math.inf if self._limit is None else self._limit - self.result.events - held
        # Counting lines takes time, so an estimate from the number of bytes comes first.
        fits = len(chunk) // _SHORTEST_LINE <= room or chunk.count(b"\n") <= room
        # Only "\n" ends a line of BytesIO.
        yield from (chunk,) if fits and not near_end else io.BytesIO(chunk)

    def _deliver(self, batches: list[CheckpointedEvents]) -> Iterator[CheckpointedEvents]:
        result, limit = self.result, self._limit
        for batch in batches:
            if limit is not None and result.events and result.events + len(batch.events) > limit:
                result.more = True
                raise _Stop
            self._watch.check(batch)
            result.events += len(batch.events)
            result.cursor = batch.cursor
            if self._at_last_cursor():
                result.ended, result.asked_closed = True, True
            self._watch.delivered(batch)
            yield batch
            self._moved = self._clock()
            late = self._grace_period is not None and self._moved - self._began > self._allowed
            if (
                late
                or result.ended
                or self._watch.reached
                or (limit is not None and result.events >= limit)
                or self._full()
            ):
                raise _Stop

    def _at_last_cursor(self) -> bool:
        listed = self.connection.info.partitions.get(self.target.partition)
        if listed is None or not listed.closed or self.connection.fetch_options.selection():
            return False
        return listed.last_cursor == self.result.cursor

    def _in_option_names(self, error: ProtocolError) -> ProtocolError:
        return type(error)(
            with_option_names(error.message), feed=error.feed, partition=error.partition
        )

    # ------------------------------------------------------------------ between two responses

    def _is_refusal(self, error: FeedError) -> bool:
        """Whether the driver is to discover. A batch read asks for other credentials at once."""
        return isinstance(error, RequestRefusedError) or (
            self._grace_period is not None and is_refusal(error)
        )

    def _refused(self, error: FeedError, status: int, info: FeedInfo) -> None:
        """Get a new token after a conflict; leave other refusals to the driver, which discovers."""
        self.result.retries += 1
        pause: float | None = None
        if status == CONFLICT:
            self.result.conflict = True
            try:
                pause = self._conflicts.pause(error)
            except FeedError:
                if self._grace_period is None:
                    raise ProtocolError(
                        "the fetch is answered 409 again and again, with a fresh token each time",
                        feed=self.connection.url,
                        partition=self.target.partition,
                    ) from error
        if pause is None:
            self.result.refused, self.result.refusal = status, error.message
            return
        if self._conflicts.failures > 1:  # the first time, a new token is all that is needed
            time.sleep(pause)
        try:
            self.connection.discover(seen=info)
        except FeedError as failed:
            self._retry(failed)

    def _seems_to_end(self, info: FeedInfo, reader: PageReader, *, silent: bool) -> None:
        """Take an empty response. A read that has the time to find out if it is the end does (R6).

        The driver of a streaming query counts such responses over its triggers.
        """
        result, limits = self.result, self.connection.options.limits
        was_silent, self._silent = self._silent, silent
        pause: float | None = None
        if self._grace_period is None and reader.asked != LAST:
            if reader.closed:
                assert self._closed_since is not None
                since = max(self._closed_since, self._failed_at, self.connection.failed_at)
                pause = self._evidence.add(info, now=time.monotonic(), since=since)
            elif silent and not was_silent:
                pause = limits.silent_pause
        if pause is None:
            result.ended, result.asked_closed, result.silent = True, reader.closed, silent
            result.unproven = reader.closed and self._grace_period is not None
            return
        time.sleep(pause)
        if reader.closed and self._evidence.lacks_discovery(self.connection.info):
            self.connection.discover(seen=info)

    def _wait_for_replica(self, error: FeedError) -> None:
        """Sleep until a replica that lags may have the rest, or give up."""
        self._doubt()
        try:
            pause = self._lag.pause(error)
        except FeedError:
            if self._grace_period is None:
                raise
            self._give_up(error)
            return
        time.sleep(pause)

    def _doubt(self) -> None:
        """Let empty responses count anew: the feed fails."""
        self._evidence.reset()
        self._silent, self._failed_at = False, time.monotonic()

    def _retry(self, error: FeedError) -> None:
        """Sleep until the next attempt, or give up."""
        self.result.retries += 1
        self._doubt()
        if self._grace_period is None or not self.connection.options.retry.retries(error):
            time.sleep(self._failures.pause(error))
            return
        try:
            pause = self._failures.pause(error)
        except FeedError:
            self._give_up(error)
            return
        if self._failures.elapsed + pause < self._grace_period:
            time.sleep(pause)
        else:  # other partitions of the task would have to wait for it (R14)
            self._give_up(error)

    def _give_up(self, error: FeedError) -> None:
        if self.result.cursor != self.result.start:
            raise _Stop
        self.result.failed = f"{type(error).__name__}: {error.message}"


class Looks:
    """Short reads beside the one that is watched, which end at the first failure.

    Each of them raises `FeedError` when no retry helps.
    """

    def __init__(self, connection: FeedConnection, partition: int) -> None:
        self._connection = connection
        self._partition = partition

    def page(self, cursor: str, size: int) -> list[CheckpointedEvents]:
        """Return up to `size` events behind the cursor, asked for with that page size."""
        batches: list[CheckpointedEvents] = []
        self._reader(cursor, limit=size, page_size=size).read(batches.append)
        return batches

    def fingerprints(self, cursor: str, limit: int) -> list[int]:
        """Return the fingerprints of up to `limit` events behind the cursor."""
        batches: list[CheckpointedEvents] = []

        def full() -> bool:
            return len(batches) >= _MAX_LOOKS or len(fingerprints(batches)) >= limit

        self._reader(cursor, full=full).read(batches.append)
        return fingerprints(batches)[:limit]

    def present_end(self) -> str | None:
        """Return the cursor of the present end; None where there is none to be had."""
        return fix_end(self._connection, self._partition, listed_end=False)

    def _reader(self, cursor: str, **bounds: Any) -> PartitionReader:
        target = Target(self._partition, cursor)
        return PartitionReader(self._connection, target, grace_period=0.0, **bounds)


def fix_end(connection: FeedConnection, partition: int, *, listed_end: bool = True) -> str | None:
    """Return the present end of a partition, where a read that starts now ends.

    None where the partition is closed, or no end can be fixed: the read then ends when the
    partition is caught up. With `listed_end` the end that discovery lists will do. Raises
    `FeedError` where no retry helps.
    """
    listed = connection.info.partitions.get(partition)
    if listed is None or listed.closed:
        return None
    if listed_end and listed.last_cursor is not None and not connection.fetch_options.selection():
        return listed.last_cursor
    cursor = _ask_for_end(connection, partition, _END_GRACE_PERIOD).cursor
    return None if cursor == LAST else cursor


def read_end(connection: FeedConnection, partition: int) -> str:
    """Return the cursor behind the newest event of an open partition, by a fetch of ``_last``.

    Raises:
        NoProgressError: the publisher gives no cursor.
        FeedError: as `PartitionReader.read`.
    """
    answer = "with events, again and again"
    for _ in range(connection.options.limits.max_attempts_without_progress):
        result = _ask_for_end(connection, partition, None)
        if result.events:
            continue  # they came after the question: behind them they would be skipped (R7)
        if result.cursor != LAST:
            return result.cursor
        answer = "without a cursor"
        break
    raise NoProgressError(
        f"the publisher answers a fetch from _last {answer}: option startingCursors can't be last. "
        "Give a cursor, or start at first",
        feed=connection.url,
        partition=partition,
    )


def _ask_for_end(
    connection: FeedConnection, partition: int, grace_period: float | None
) -> FetchResult:
    reader = PartitionReader(
        connection,
        Target(partition, LAST),
        full=lambda: True,
        grace_period=grace_period,
    )
    return reader.read()
