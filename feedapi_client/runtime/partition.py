"""One partition at run time: all that is known of it, and a method for each change.

A partition is plain state while it pauses, so that a feed may have all its 32,768 partitions. No
other module writes its fields; `Fetching`, `Delivery` and `Driver` call its methods.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import anyio

from feedapi_client.errors import FeedError, RequestRefusedError
from feedapi_client.lineage.planner import Entry, State
from feedapi_client.model import Event, Position
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.protocol.decoder import CheckpointedEvents
from feedapi_client.protocol.page import Progress
from feedapi_client.retry import Backoff
from feedapi_client.runtime.buffer import BufferBudget
from feedapi_client.status import PartitionState, PartitionStatus

LAG_REPORTED_SECONDS = 5.0
"""After which a closed partition that does not reach its end is reported (R6)."""


class ReadEnd(NamedTuple):
    """The end of a partition as a response showed it.

    `closed`: the discovery before the request listed the partition as closed.
    """

    cursor: str
    closed: bool


class SavedBatch(NamedTuple):
    """A commit that the planner was not told of yet: the application may still roll it back.

    `durable`: it was not part of a transaction of the application's.
    """

    number: int
    position: Position
    durable: bool


class RuntimePartition:
    """One partition of one session. `entry` is what the planner holds of it, read only here."""

    __slots__ = (
        "_announced",
        "_buffer",
        "_failures",
        "_lag",
        "_lag_reported",
        "_no_progress",
        "_refusals",
        "_retry",
        "_saves",
        "_scope",
        "_taken",
        "at_end",
        "batches",
        "caught_up_at",
        "committed",
        "committing",
        "delivered_cursor",
        "end",
        "entry",
        "error",
        "events",
        "in_flight",
        "last_contact",
        "last_event",
        "pending",
        "pending_bytes",
        "poll_delay",
        "progress",
        "queued",
        "read_cursor",
        "refused",
        "refused_as",
        "retry_at",
        "since",
        "started",
        "streamed",
    )

    def __init__(
        self,
        entry: Entry,
        *,
        buffer: BufferBudget,
        limits: Limits,
        retry: RetryPolicy,
    ) -> None:
        self.entry = entry
        self._buffer = buffer
        self._retry = retry
        # What is read.
        self.started = False
        self.read_cursor = entry.cursor
        self.progress = Progress(limits.max_attempts_without_progress)
        self.streamed = False
        self.end: ReadEnd | None = None
        """The end that was seen and not told to the planner yet, since batches come before it."""
        self.poll_delay = limits.poll_interval
        self._scope: anyio.CancelScope | None = None
        # What is buffered.
        self.pending: deque[CheckpointedEvents] = deque()
        self.pending_bytes = 0
        self._announced = False
        self._taken: anyio.Event | None = None
        # What is delivered and committed.
        self.queued = False
        """In the queue of partitions that have something for the application."""
        self.in_flight = False
        """The application has a batch and did not ask for the next one yet."""
        self.at_end = False
        """Read to the end of a closed partition, which is not committed."""
        self.delivered_cursor = entry.cursor
        self.batches = 0
        self.committed = 0
        """The number of the last batch that the planner knows to be committed."""
        self.committing = 0
        """Commits under way. One may outlast the release of its batch."""
        self._saves: list[SavedBatch] = []
        # What fails.
        self.error: FeedError | None = None
        self.since: datetime | None = None
        self.retry_at: datetime | None = None
        self.refused = False
        """Its request was refused: it waits for a discovery that begins after that."""
        self.refused_as: tuple[str, str | None] | None = None
        self._failures: Backoff | None = None
        self._refusals: Backoff | None = None
        self._no_progress: Backoff | None = None
        self._lag: Backoff | None = None
        self._lag_reported = False
        # For people.
        self.events = 0
        self.last_event: datetime | None = None
        self.last_contact: datetime | None = None
        self.caught_up_at: datetime | None = None

    @property
    def id(self) -> int:
        """The partition's number."""
        return self.entry.id

    @property
    def fetching(self) -> bool:
        """A request is under way, or was cancelled and is not over yet."""
        return self._scope is not None

    @property
    def failing(self) -> bool:
        """The last request failed by an error that is retried."""
        return self._failures is not None

    @property
    def deliverable(self) -> bool:
        """Holds what the application should take now."""
        return self._announced and not self.in_flight

    def __repr__(self) -> str:
        doing = "pausing"
        if not self.started:
            doing = "stopped"
        elif self.fetching:
            doing = "fetching"
        elif self.error is not None:
            doing = "retrying"
        return (
            f"<RuntimePartition {self.id}: {self.entry.state}, {doing} at {self.read_cursor!r}, "
            f"{self.pending_bytes} bytes pending{', in flight' if self.in_flight else ''}>"
        )

    # ------------------------------------------------------------------ what is read

    def start(self, cursor: str) -> None:
        """Read from the cursor; after a stop, from where the application's batches end."""
        if not self.batches:
            self.read_cursor = self.delivered_cursor = cursor
        self.started = True
        self.error = self.since = None
        self.end = None

    def read_on(self) -> None:
        """Ask again, whatever end was seen."""
        self.end = None

    def stop(self) -> None:
        """Stop reading and drop what was not delivered."""
        self.started = False
        self.refused = False
        self.at_end = False
        self.end = None
        self.cancel_request()
        self._buffer.free(self.pending_bytes, deliverable=True)
        self.pending.clear()
        self.pending_bytes = 0
        self._announced = False
        self.read_cursor = self.delivered_cursor

    def begin_request(self, scope: anyio.CancelScope) -> None:
        """A request begins, which `cancel_request` can end."""
        self._scope = scope

    def end_request(self, scope: anyio.CancelScope) -> None:
        """That request is over. Does nothing when another one has begun since."""
        if self._scope is scope:
            self._scope = None

    def cancel_request(self) -> None:
        """Cancel the request under way; it is over once its task has unwound."""
        if self._scope is not None:
            self._scope.cancel()

    def answered(self, *, streamed: bool) -> None:
        """The publisher has begun to answer."""
        self.streamed = streamed
        self.last_contact = datetime.now(UTC)

    def received(self, batch: CheckpointedEvents) -> None:
        """Buffer events that a checkpoint closed."""
        self.read_cursor = batch.cursor
        self.pending.append(batch)
        self.pending_bytes += batch.size
        self._buffer.add(batch.size, deliverable=True)
        if batch.events:
            self.last_event = datetime.now(UTC)

    def reached_end(self, end: ReadEnd) -> None:
        """A complete response showed the end; it counts behind what is pending."""
        self.end = end

    def take_end(self) -> ReadEnd:
        """The end to tell the planner, once nothing is pending before it."""
        assert self.end is not None
        end, self.end = self.end, None
        return end

    def end_uncommitted(self, end: ReadEnd) -> None:
        """The end of a closed partition was told to the planner, and is not committed yet."""
        self.end = end
        self.at_end = True

    def note_caught_up(self) -> None:
        """Remember the time, if everything that the publisher has is committed."""
        if self.is_caught_up:
            self.caught_up_at = datetime.now(UTC)

    @property
    def is_caught_up(self) -> bool:
        """Whether everything that the publisher had when it last answered is committed."""
        uncommitted = self.in_flight or self.entry.cursor != self.read_cursor
        return self.entry.state in (State.CAUGHT_UP, State.DRAINED) and not uncommitted

    def polled(self, limits: Limits) -> None:
        """Nothing new came: wait longer before the next poll (R15)."""
        if not self.streamed:  # a stream has done the waiting itself
            self.poll_delay = max(
                self.poll_delay, min(self.poll_delay * 2, limits.max_poll_interval)
            )

    def progressed(self, limits: Limits) -> None:
        """Something new came: poll quickly again."""
        self.poll_delay = limits.poll_interval
        self._no_progress = None

    # ------------------------------------------------------------------ what is delivered

    def announce(self) -> None:
        """Let the application take what is pending."""
        self._announced = bool(self.pending)

    def queue(self) -> None:
        """It was put into the queue of partitions that hold something for the application."""
        self.queued = True

    def unqueue(self) -> None:
        """It was taken off that queue."""
        self.queued = False

    def take(self, max_bytes: int) -> tuple[list[Event], str]:
        """Deliver what is pending, coalesced up to `max_bytes`, and the cursor behind it."""
        batch = self.pending.popleft()
        events, size = batch.events, batch.size
        while self.pending and size + self.pending[0].size <= max_bytes:
            batch = self.pending.popleft()
            events.extend(batch.events)
            size += batch.size
        self.pending_bytes -= size
        self._announced = bool(self.pending)
        self._buffer.free(size, deliverable=True)
        self.in_flight = True
        self.delivered_cursor = batch.cursor
        self.batches += 1
        self.events += len(events)
        if self._taken is not None:
            self._taken.set()
        return events, batch.cursor

    def taken(self) -> anyio.Event:
        """An event that is set when the application takes something."""
        self._taken = anyio.Event()
        return self._taken

    def release(self) -> None:
        """The application is done with the batch in flight."""
        self.in_flight = False

    # ------------------------------------------------------------------ what is committed

    @property
    def has_saves(self) -> bool:
        """A commit was made that the planner was not told of yet."""
        return bool(self._saves)

    def position_before(self, number: int) -> Position | None:
        """What was saved for the batch before `number`, as far as the planner doesn't have it."""
        earlier = self._saves_before(number)
        return earlier[-1].position if earlier else None

    def is_saved(self, number: int, *, durably: bool = False) -> bool:
        """Whether batch `number` was saved and not acknowledged yet."""
        return any(save.number == number and (save.durable or not durably) for save in self._saves)

    def is_overtaken(self, number: int) -> bool:
        """Whether batch `number` can't be committed: it or a later one was."""
        if number <= self.committed:
            return True
        return bool(self._saves) and self._saves[-1].number > number

    def begin_commit(self) -> None:
        """A batch is being saved: until `end_commit` its position is for nobody else to save."""
        self.committing += 1

    def end_commit(self) -> None:
        """That save is through, or has failed."""
        self.committing -= 1

    def saved(self, number: int, position: Position, *, durable: bool) -> None:
        """Batch `number` was saved; an earlier save of it, rolled back since, is forgotten."""
        self._saves = [*self._saves_before(number), SavedBatch(number, position, durable)]

    def acknowledge(self) -> Position | None:
        """The position to tell the planner: of the last save, which counts from now on (R5)."""
        if not self._saves:
            return None
        last = self._saves[-1]
        self.committed = last.number
        self._saves.clear()
        return last.position

    def _saves_before(self, number: int) -> list[SavedBatch]:
        return [save for save in self._saves if save.number < number]

    # ------------------------------------------------------------------ what fails

    def recovered(self) -> None:
        """A request succeeded, or brought something before it failed."""
        self._failures = self._refusals = self._lag = None
        self._lag_reported = False
        self.error = self.since = self.retry_at = None

    def failed(self, error: FeedError) -> float:
        """A request failed: return the seconds until the next one.

        Raises the error itself when it is fatal, or when requests have failed for too long.
        """
        self.fails_by(error)
        if self._failures is None:
            self._failures = Backoff.of(self._retry, clock=anyio.current_time)
        return self._retry_in(self._failures.pause(error))

    def fails_by(self, error: FeedError) -> None:
        """Show an error in the status, with the time of the first in a row."""
        self.error = error
        if self.since is None:
            self.since = datetime.now(UTC)

    def refuse(self, error: RequestRefusedError, asked_as: tuple[str, str | None]) -> int:
        """A request was refused: wait for a discovery. Return the refusals in a row.

        `asked_as` are the dialect and the token of the request.
        """
        self.fails_by(error)
        self.refused = True
        self.refused_as = asked_as
        if self._refusals is None:
            self._refusals = self._unlimited()
        self._retry_in(self._refusals.pause(error))
        return self._refusals.failures

    def ask_again(self) -> float:
        """A discovery that began after the refusal is there: seconds until the next request."""
        self.refused = False
        if self._refusals is None or self._refusals.failures <= 1 or self.retry_at is None:
            return 0.0
        return max(0.0, (self.retry_at - datetime.now(UTC)).total_seconds())

    def pause_without_progress(self, error: Exception) -> float:
        """Seconds before another request after a response without progress (R13)."""
        if self._no_progress is None:
            self._no_progress = self._unlimited()
        return self._no_progress.pause(error)

    def lags(self, error: FeedError) -> float:
        """A replica does not reach the end yet: seconds until the next request (R6).

        Raises the error itself when that has lasted for `RetryPolicy.give_up_after`.
        """
        self.fails_by(error)
        if self._lag is None:
            policy = self._retry
            self._lag = Backoff(
                base_delay=policy.base_delay,
                max_delay=policy.max_delay,
                give_up_after=policy.give_up_after,
                clock=anyio.current_time,
            )
        return self._retry_in(self._lag.pause(error))

    def lags_for_long(self) -> bool:
        """Return whether the lag is to be reported: once, after 5 seconds."""
        if self._lag is None or self._lag_reported or self._lag.elapsed < LAG_REPORTED_SECONDS:
            return False
        self._lag_reported = True
        return True

    @property
    def attempts(self) -> int:
        """Failed requests in a row."""
        return self._failures.failures if self._failures else 0

    def _unlimited(self) -> Backoff:
        """For what is limited by the number of attempts elsewhere, not by time."""
        policy = self._retry
        return Backoff(base_delay=policy.base_delay, max_delay=policy.max_delay)

    def _retry_in(self, seconds: float) -> float:
        self.retry_at = datetime.now(UTC) + timedelta(seconds=seconds)
        return seconds


def partition_status(
    entry: Entry, partition: RuntimePartition | None, since: datetime | None
) -> PartitionStatus:
    """A snapshot of what planner and runtime know of one partition.

    `partition` is None for one that was never read in this session, `since` the time of its error.
    """
    error = entry.error or (partition.error if partition else None)
    status = PartitionStatus(
        partition=entry.id,
        state=_state(entry, error),
        cursor=entry.position.cursor if entry.position else None,
        waits_for=entry.waits_for if entry.state is State.WAITING else (),
        caught_up=entry.state is State.DRAINED or None,
        error=str(error) if error else None,
        since=since if error else None,
    )
    if partition is None:
        return status
    caught_up = None
    if error is None and (partition.last_contact or entry.state is State.DRAINED):
        caught_up = partition.is_caught_up
    return replace(
        status,
        caught_up=caught_up,
        caught_up_at=partition.caught_up_at,
        retry_at=partition.retry_at if partition.error is not None else None,
        events=partition.events,
        last_event=partition.last_event,
        last_contact=partition.last_contact,
    )


def _state(entry: Entry, error: FeedError | None) -> PartitionState:
    """The planner's state; a partition that is read and fails is retrying."""
    if entry.running and error is not None:
        return PartitionState.RETRYING
    return PartitionState(entry.state.value)
