"""Reads one partition as far as it goes: to a limit, to its end, or to what stops it (R3, R14).

`feedapi_client.protocol.page.PageReader` has the rules of one response. `Fetch` waits for nothing:
what is no progress ends it. The driver of a stream has the patience, in its triggers, and for a
batch read `PatientFetch`. Imports no Spark.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from feedapi_client.errors import (
    BufferLimitError,
    CursorRejectedError,
    FeedError,
    FeedUnavailableError,
    LineTooLongError,
    NoProgressError,
    ProtocolError,
    RequestRefusedError,
)
from feedapi_client.model import LAST
from feedapi_client.protocol.page import (
    CheckpointedEvents,
    EndEvidence,
    Outcome,
    PageReader,
    Progress,
    outcome_error,
)
from feedapi_client.retry import Backoff, gives_up_after
from feedapi_client.runtime.trouble import is_refusal, refusal_backoff
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.fixed_end import MAX_FOLLOWING, FixedEnd

_CONFLICT = 409
_MAX_THREADS = 16
_LONGEST_PAUSE = 1.0
"""Seconds before the second attempt of a read. Other partitions of the task wait for it (R14)."""


@dataclass(frozen=True, slots=True)
class Target:
    """A partition to read from a cursor. `required`: it is an error where no place is the `end`."""

    partition: int
    cursor: str
    sequence: int = 0
    depth: int = 0
    end: str | None = None
    required: bool = False


@dataclass(slots=True)
class FetchResult:
    partition: int
    start: str
    cursor: str
    """The cursor behind the last event that was read."""
    events: int = 0
    reached: bool = False
    more: bool = False
    """Events are known to follow."""


class _Stop(Exception):  # noqa: N818 - not an error
    """Enough was read; the rest of the response is not needed."""


class Fetch:
    """One read of a partition. Use it once.

    Arguments:
        limit: maximum number of events. Only whole batches are read, and at least one.
        full: called after each batch; True stops the read.
        patience: seconds that a response may take to its next checkpoint (R14).
        hurried: whether the read is over with the first batch after that time: others wait for the
            slowest read of an epoch.
        end: what recognizes the end of the read; None reads until the partition is caught up.
        progress: of the reads before this one.
        clock: seconds on any monotonic clock.
    """

    def __init__(
        self,
        connection: FeedConnection,
        target: Target,
        *,
        limit: int | None = None,
        full: Callable[[], bool] = lambda: False,
        patience: float | None = None,
        hurried: bool = False,
        end: FixedEnd | None = None,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = connection.options.limits
        self.connection = connection
        self.result = FetchResult(target.partition, target.cursor, target.cursor)
        self.result.reached = end is not None and end.reached
        self.error: FeedError | None = None  # what stopped the read
        self.lags = False  # whether that is a replica that lags
        # Whether the end was reached: a complete response without events, or the last cursor of a
        # closed partition. Unproven: discovery lists no end, and only this response shows it (R6).
        self.ended = self.unproven = False
        self.silent = False  # whether that response held no cursor
        self._limit, self._full = limit, full
        self._patience = limits.slot_timeout if patience is None else patience
        self._hurried, self._end, self._clock = hurried, end, clock
        self._progress = progress or Progress(limits.max_attempts_without_progress)
        self._began = self._moved = clock()

    def batches(self) -> Iterator[CheckpointedEvents]:
        """`result` and `error` are complete at the end. Raises for an event that is too large."""
        result, asked = self.result, self.result.cursor
        try:
            while not (self.ended or result.reached):
                asked = result.cursor
                yield from self._request()
        except _Stop:
            pass
        except (BufferLimitError, LineTooLongError):
            raise
        except FeedError as error:
            self.error = error
            if result.cursor != asked:
                self._progress.moved(result.cursor, events=True)

    def _request(self) -> Iterator[CheckpointedEvents]:
        info, result, asked = self.connection.info, self.result, self.result.cursor
        if result.partition not in info.partitions:
            raise changed(self.connection, result, "it is not listed any more")
        client = self.connection.client
        with client.open(info, result.partition, asked, progress=self._progress) as response:
            reader = response.reader
            self._moved = self._clock()
            for lines in response:
                for some in self._as_fed(reader, lines):
                    yield from self._deliver(reader.feed(some))
                reader.check()
                self._check_pace()
            finished = reader.finish()
            yield from self._deliver(finished.batches)
        self._take_outcome(finished.outcome, reader, asked)

    def _check_pace(self) -> None:
        """Raise where no checkpoint came for too long, whatever else did (R14)."""
        if self._clock() - self._moved > self._patience:
            raise FeedUnavailableError(
                f"no checkpoint came within {self._patience:g} s: if that is to be expected, raise "
                "option slotTimeout",
                feed=self.connection.url,
                partition=self.result.partition,
            )

    def _as_fed(self, reader: PageReader, lines: list[bytes]) -> Iterable[list[bytes]]:
        """Return the lines together, or one by one near the limit or the fixed end.

        A `PageReader` coalesces the batches of what it is fed. There each one has to be seen.
        """
        near_end = self._end is not None and self._end.may_be_in(b"".join(lines))
        held = reader.unclosed_events + 1
        room = math.inf if self._limit is None else self._limit - self.result.events - held
        return ([line] for line in lines) if near_end or len(lines) > room else (lines,)

    def _deliver(self, batches: list[CheckpointedEvents]) -> Iterator[CheckpointedEvents]:
        result, limit, end = self.result, self._limit, self._end
        for came in batches:
            batch: CheckpointedEvents | None = came
            if limit is not None and result.events and result.events + len(came.events) > limit:
                result.more = True
                raise _Stop
            if end is not None:
                batch = end.take(came, result.cursor)
                result.reached = end.reached
            if batch is not None:
                result.events += len(batch.events)
                result.cursor = batch.cursor
                self.ended = self._at_last_cursor()
                yield batch
            self._moved = self._clock()
            late = self._hurried and self._moved - self._began > self._patience
            enough = limit is not None and result.events >= limit
            if late or enough or self.ended or result.reached or self._full():
                raise _Stop

    def _at_last_cursor(self) -> bool:
        listed = self.connection.info.partitions.get(self.result.partition)
        if listed is None or not listed.closed or self.connection.fetch_options.selection():
            return False
        return listed.last_cursor == self.result.cursor

    def _take_outcome(self, outcome: Outcome, reader: PageReader, asked: str) -> None:
        feed, partition = self.connection.url, self.result.partition
        if self._end is not None and outcome is Outcome.PROGRESS:
            if not self._end.response_over():
                raise ProtocolError(
                    "grows while it is read, and no end of it can be found: no checkpoint lies at "
                    "the end that was fixed. Read it as a stream, with the trigger availableNow",
                    feed=feed,
                    partition=partition,
                )
        elif outcome in (Outcome.END, Outcome.EMPTY, Outcome.SILENT):
            self.ended = True
            self.silent = outcome is not Outcome.END and reader.last_checkpoint is None
            self.unproven = outcome is not Outcome.END and reader.closed
        elif outcome in (Outcome.LAGGING, Outcome.BEHIND, Outcome.UNRECOGNIZED):
            self.lags = self.lags or outcome is not Outcome.UNRECOGNIZED
            raise outcome_error(outcome, asked, reader.last_cursor, feed=feed, partition=partition)


# ---------------------------------------------------------------------- reads of a task


def fetch(
    connection: FeedConnection,
    target: Target,
    *,
    limit: int | None = None,
    full: Callable[[], bool] = lambda: False,
    receive: Callable[[CheckpointedEvents], object] = len,
    clock: Callable[[], float] = time.monotonic,
) -> FetchResult:
    """Read for a task; where nothing was read, twice. Raises where no further attempt helps."""
    backoff = Backoff.of(connection.options.retry)
    patience = connection.options.limits.slot_timeout
    for attempt in (1, 2):
        one = Fetch(
            connection,
            target,
            limit=limit,
            full=full,
            patience=patience * attempt,
            hurried=True,
            end=fixed_end(connection, target, cut=False),
            clock=clock,
        )
        for batch in one.batches():
            receive(batch)
        result, error = one.result, one.error
        if error is None or is_refusal(error) or one.lags:
            break
        pause = backoff.pause(error)
        if attempt == 2 or result.cursor != result.start or pause >= _LONGEST_PAUSE:
            break
        time.sleep(pause)
    return result


def changed(connection: FeedConnection, result: FetchResult, why: str) -> CursorRejectedError:
    return CursorRejectedError(
        f"the publisher refused a fetch from {result.cursor!r} ({why}): the partitions changed "
        "while they were read. Read again",
        feed=connection.url,
        partition=result.partition,
    )


# ---------------------------------------------------------------------- reads with all patience


class PatientFetch:
    """Reads a partition to its end, however long that takes. Use it once."""

    def __init__(
        self,
        connection: FeedConnection,
        target: Target,
        *,
        end: FixedEnd | None = None,
        full: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._limits, policy = connection.options.limits, connection.options.retry
        self.connection = connection
        self.result = FetchResult(target.partition, target.cursor, target.cursor)
        self._target, self._end, self._full = target, end, full
        self._failures = Backoff.of(policy)
        self._lag = Backoff(
            base_delay=policy.base_delay,
            max_delay=policy.max_delay,
            give_up_after=gives_up_after(policy),
        )
        self._conflicts = refusal_backoff(policy, give_up_after=policy.refused_for)
        self._evidence = EndEvidence(self._limits.settle_time, self._limits.poll_interval)
        self._closed_since: float | None = None
        self._reads = 0
        self._silent = False

    def batches(self) -> Iterator[CheckpointedEvents]:
        """Yield what is read. `result` is complete at the end. Raises `FeedError` (R10)."""
        progress, goes_on = Progress(self._limits.max_attempts_without_progress), True
        while goes_on:
            self._note_if_closed()
            at = replace(self._target, cursor=self.result.cursor)
            one = Fetch(
                self.connection,
                at,
                full=self._full,
                patience=self._limits.slot_timeout * 2.0 ** min(self._failures.failures, 16),
                end=self._end,
                progress=progress,
                clock=self._clock,
            )
            yield from one.batches()
            goes_on = self._goes_on(one)

    def _note_if_closed(self) -> None:
        listed = self.connection.info.partitions.get(self._target.partition)
        if listed is None or not listed.closed:
            self._closed_since = None
        elif self._closed_since is None:
            first = not self._reads
            self._closed_since = self.connection.began if first else time.monotonic()

    def _goes_on(self, one: Fetch) -> bool:
        before, result = self.result, one.result
        result.start, result.events = before.start, before.events + result.events
        self._reads += 1
        self.result = result
        if result.cursor != before.cursor or one.error is None:
            self._failures.reset()
            self._conflicts.reset()
            self._lag.reset()
        if result.cursor != before.cursor and self._evidence.answers:
            self._doubt()  # what came behind empty responses shows that they may lag
        if one.error is not None:
            return self._waits(one, one.error)
        return one.ended and not result.reached and self._seems_to_end(one)

    def _waits(self, one: Fetch, error: FeedError) -> bool:
        """Sleep until the next attempt. A new token is all that a conflict needs at first."""
        if isinstance(error, RequestRefusedError):
            if error.status != _CONFLICT:
                raise changed(self.connection, self.result, f"status {error.status}") from error
            try:
                pause = self._conflicts.pause(error)
            except FeedError:
                raise ProtocolError(
                    "the fetch is answered 409 again and again, with a fresh token each time",
                    feed=self.connection.url,
                    partition=self._target.partition,
                ) from error
            time.sleep(pause if self._conflicts.failures > 1 else 0.0)
            self.connection.discover(seen=self.connection.info)
            return True
        self._doubt()
        time.sleep((self._lag if one.lags else self._failures).pause(error))
        return True

    def _seems_to_end(self, one: Fetch) -> bool:
        """Return whether, after an empty response, another one has to show the end (R6)."""
        info, pause = self.connection.info, None
        was_silent, self._silent = self._silent, one.silent
        if self._target.cursor == LAST:
            return False
        if one.unproven:
            assert self._closed_since is not None
            since = max(self._closed_since, self.connection.failed_at)
            pause = self._evidence.add(info, now=time.monotonic(), since=since)
        elif one.silent and not was_silent:
            pause = self._limits.silent_pause
        if pause is None:
            return False
        time.sleep(pause)
        if one.unproven and self._evidence.lacks_discovery(self.connection.info):
            self.connection.discover(seen=info)
        return True

    def _doubt(self) -> None:
        """Let empty responses count anew: the feed fails."""
        self._evidence.reset()
        self._silent, self.connection.failed_at = False, time.monotonic()


# ---------------------------------------------------------------------- ends


def fixed_end(connection: FeedConnection, target: Target, *, cut: bool) -> FixedEnd | None:
    if target.end is None:
        return None

    def look(cursor: str, size: int | None) -> list[CheckpointedEvents]:
        there, asked = Target(target.partition, cursor), connection
        if size is not None:
            fetch = replace(connection.fetch_options, page_size_hint=size)
            asked = FeedConnection(connection.options, fetch, connection.info)
        batches: list[CheckpointedEvents] = []
        with suppress(FeedError):
            batches.extend(Fetch(asked, there, limit=size or MAX_FOLLOWING).batches())
        return batches

    end = FixedEnd(target.end, look, cut=cut)
    end.reached = target.end == target.cursor
    return end


def fix_ends(connection: FeedConnection, partitions: Collection[int]) -> dict[int, str | None]:
    """None where no end can be fixed: the read ends when the partition is caught up."""
    if not partitions:
        return {}
    threads = min(_MAX_THREADS, connection.options.limits.max_concurrent_fetches, len(partitions))
    with ThreadPoolExecutor(threads, "feedapi-ends") as pool:
        ends = pool.map(partial(_fix_end, connection), partitions)
        return dict(zip(partitions, ends, strict=True))


def _fix_end(connection: FeedConnection, partition: int) -> str | None:
    listed = connection.info.partitions.get(partition)
    if listed is None or listed.closed:
        return None
    if listed.last_cursor is not None and not connection.fetch_options.selection():
        return listed.last_cursor
    cursor = fetch(connection, Target(partition, LAST), full=lambda: True).cursor
    return None if cursor == LAST else cursor


def read_end(connection: FeedConnection, partition: int) -> str:
    """Return the cursor behind the newest event of an open partition, by a fetch of ``_last``."""
    answer = "with events, again and again"
    for _ in range(connection.options.limits.max_attempts_without_progress):
        read = PatientFetch(connection, Target(partition, LAST), full=lambda: True)
        if any(batch.events for batch in read.batches()):
            continue  # they came after the question: behind them they would be skipped (R7)
        if read.result.cursor != LAST:
            return read.result.cursor
        answer = "without a cursor"
        break
    raise NoProgressError(
        f"the publisher answers a fetch from _last {answer}: option startingCursors can't be last. "
        "Give a cursor, or start at first",
        feed=connection.url,
        partition=partition,
    )
