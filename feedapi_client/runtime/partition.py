"""One partition at run time: its whole state, and a method for each change.

A partition is plain state while it pauses, so that a feed may have all its 32,768 partitions. No
other module writes its fields; `Fetching`, `Delivery` and `Driver` call its methods.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import anyio

from feedapi_client.errors import FeedError
from feedapi_client.lineage.planner import Entry, State
from feedapi_client.model import FIRST, Event, Position
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.protocol.page import MOST_PASSED, CheckpointedEvents, EndEvidence, Progress
from feedapi_client.runtime.buffer import BufferBudget, memory_of
from feedapi_client.runtime.failures import Failures
from feedapi_client.runtime.handling import Handling
from feedapi_client.runtime.slots import HELD_OPEN_SECONDS, Slot

OVERDUE_SECONDS = 60.0
"""Evidence of an end that is late by so much is a problem (R6)."""
_AT_END = (State.CAUGHT_UP, State.DRAINED)  # here: to look up a member of an enum takes long


class ReadEnd(NamedTuple):
    """The end of a partition as a response showed it.

    `closed`: the discovery before the request listed the partition as closed.
    """

    cursor: str
    closed: bool


class SavedBatch(NamedTuple):
    """A commit not yet passed to the planner: the application may still roll it back.

    `durable`: it was not part of a transaction of the application.
    """

    number: int
    position: Position
    durable: bool


class RuntimePartition:
    """One partition of one session. `entry` is its state in the planner, read-only here."""

    __slots__ = (
        "_announced",
        "_base",
        "_buffer",
        "_drawn",
        "_held_seconds",
        "_loss_untold",
        "_lost",
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
        "events",
        "evidence",
        "evidence_due",
        "evidence_since",
        "failures",
        "handling",
        "held_open",
        "in_flight",
        "last_contact",
        "last_event",
        "marks",
        "news",
        "pending",
        "pending_bytes",
        "pending_size",
        "poll_delay",
        "progress",
        "queued",
        "read_cursor",
        "readings",
        "requested_at",
        "silent",
        "silent_stream",
        "slot",
        "started",
        "stream_cut_short",
        "streamed",
        "unknown_commands",
    )

    def __init__(
        self,
        entry: Entry,
        *,
        buffer: BufferBudget,
        limits: Limits,
        retry: RetryPolicy,
        passed: int = MOST_PASSED,
    ) -> None:
        self.entry = entry
        self._buffer = buffer
        self._drawn: tuple[int, Position] | None = None
        self.failures = Failures(retry)
        """What fails, and when it is asked again."""
        self.handling = Handling()
        """What the application does with its batches."""
        # What is read.
        self.started = False
        self.readings = 0
        """How often it was read from its stored position, with nothing in flight before that."""
        self.read_cursor = entry.cursor
        attempts = limits.max_attempts_without_progress
        self.progress = Progress(attempts, passed=passed, doubted_for=limits.settle_time)
        self.evidence: EndEvidence | None = None
        """The empty answers since it was found closed, where only they can show its end."""
        self.evidence_since: datetime | None = None
        """Since when it has seemed to be at its end, and nothing has shown it (R6)."""
        self.evidence_due = 0.0
        """When that could have been shown, on the clock of the event loop."""
        self.silent = False
        """Whether the last response held no cursor and no event."""
        self.unknown_commands = 0
        """Lines that were neither an event nor a checkpoint."""
        self.streamed = False
        self.held_open = False
        """Whether the last response lasted for so long."""
        self._held_seconds = HELD_OPEN_SECONDS
        self.silent_stream = False
        """Whether the last stream brought nothing. The next request is none (R14)."""
        self.stream_cut_short = False
        """Whether it had little time, because others waited for its slot."""
        self.end: ReadEnd | None = None
        """The end that was seen. It is passed to the planner after the batches before it."""
        self.news = False
        """Whether an event is known to be behind what is pending, for somebody else to read."""
        self.poll_delay = limits.poll_interval
        self._scope: anyio.CancelScope | None = None
        self.slot: Slot | None = None
        """The slot of the request under way."""
        self.requested_at = 0.0
        """When the last request began, on the clock of the event loop."""
        # Buffer.
        self.pending: deque[CheckpointedEvents] = deque()
        self.pending_bytes = 0
        """What is pending takes as many bytes of memory."""
        self.pending_size = 0
        """How many bytes what is pending had on the wire."""
        self._announced = False
        self._taken: anyio.Event | None = None
        # Delivery and commits.
        self.queued = False
        """Whether it is in the queue of partitions that have something to deliver."""
        self.in_flight = 0
        """How many batches are delivered and not released yet."""
        self.at_end = False
        """Whether it is closed and read to its end, and the end is not committed yet."""
        self.delivered_cursor = entry.cursor
        self.marks: Sequence[tuple[int, str]] = ()
        """The checkpoints in what was delivered last, where batches are not joined."""
        self.batches = 0
        self.committed = 0
        """The number of the last committed batch that was passed to the planner."""
        self.committing = 0
        """Number of commits under way. A commit may take longer than its batch is in flight."""
        self._saves: list[SavedBatch] = []
        self._lost = 0
        """The number of the last batch before the lease was lost."""
        self._base: str | None = None
        """The stored cursor that what was delivered since follows; None: it follows any."""
        self._loss_untold = False
        """Whether the application may hold effects of a batch that was lost, and does not know."""
        # For `status()`.
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
        """Whether a request is under way. A cancelled one counts until its task has ended."""
        return self._scope is not None

    @property
    def failing(self) -> bool:
        """The last request failed by an error that is retried, or brought nothing in its time."""
        return self.failures.failing

    @property
    def error(self) -> FeedError | None:
        """Why it is retried, or can't go on."""
        return self.failures.error

    @property
    def announced(self) -> bool:
        """Whether the application may have what is pending, once it has released its batch."""
        return self._announced

    @property
    def deliverable(self) -> bool:
        """Whether it holds a batch that can be delivered now."""
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

    def follows(self, cursor: str) -> bool:
        """Whether what was delivered follows the stored `cursor`.

        The invariant of each start: what a partition is read from is its stored position, or comes
        after batches that were delivered from there on.
        """
        return self._base is None or self._base in (cursor, self.entry.cursor)

    @property
    def began_without_position(self) -> bool:
        """Whether it was read from its first event, and nothing of it was committed since."""
        return self._base == FIRST and self.committed == 0

    def start(self, cursor: str) -> None:
        """Read from the cursor; after a stop, from where the application's batches end."""
        self.forget_empty_answers()
        self.evidence_since = None
        if self.batches == self._lost:
            self.read_cursor = self.delivered_cursor = cursor
        if self.batches == self._lost or self.is_settled:
            self.readings += 1
        self._base = cursor
        self.started = True
        self.failures.started()
        self.end = None

    def read_on(self) -> None:
        """Fetch again, even if an end was seen."""
        self.end = None

    def stop(self) -> None:
        """Stop reading and drop what was not delivered."""
        self.started = False
        self.failures.stopped()
        self.at_end = False
        self.evidence_since = None
        self.end = None
        self.cancel_request()
        self._buffer.free(self.pending_bytes, deliverable=True)
        self.pending.clear()
        self.pending_bytes = self.pending_size = 0
        self._announced = False
        self.news = self.news and self.in_flight > 0
        self.read_cursor = self.delivered_cursor

    def lose(self) -> None:
        """Give up what was delivered so far: it may be read again, here or by another instance.

        The next start begins at the stored position.
        """
        if self.batches > max(self._last_saved, self._lost):
            self._loss_untold = True
        self._lost = self.batches
        self._base = None
        self._saves.clear()

    @property
    def loss_untold(self) -> bool:
        """Whether a batch was lost uncommitted, and no commit has been refused since.

        A later cursor covers that batch, too: whoever has read it again has its effects (R5).
        """
        return self._loss_untold

    def tell_loss(self) -> None:
        """Record that the application learns of the loss: a commit is refused."""
        self._loss_untold = False

    @property
    def _last_saved(self) -> int:
        return self._saves[-1].number if self._saves else self.committed

    def is_lost(self, number: int) -> bool:
        """Whether the lease of batch `number` was lost since it was delivered."""
        return number <= self._lost

    @property
    def is_settled(self) -> bool:
        """Whether no batch is in flight, and no commit under way or unknown to the planner."""
        return not (self.in_flight or self.committing or self._saves)

    def begin_request(self, scope: anyio.CancelScope, slot: Slot | None = None) -> None:
        """Record that a request begins. `cancel_request` cancels `scope`."""
        self._scope = scope
        self.slot = slot
        if slot is not None:
            self.requested_at = slot.seen

    def end_request(self, scope: anyio.CancelScope) -> None:
        """Record that the request of `scope` is over, unless another one has begun since."""
        if self._scope is scope:
            self.held_open = self.slot is not None and self.slot.age > self._held_seconds
            self._scope = self.slot = None

    def cancel_request(self) -> None:
        """Cancel the request under way. It is over when its task has called `end_request`."""
        if self.slot is not None:
            self.slot.stopped = True
        if self._scope is not None:
            self._scope.cancel()

    def answered(self, *, stream: bool | int) -> None:
        """Record that a response has begun. `stream`: what was asked for, as in `FetchOptions`."""
        self.streamed = bool(stream)
        asked = HELD_OPEN_SECONDS if stream is True else stream / 2000
        self._held_seconds = min(HELD_OPEN_SECONDS, asked)
        self.failures.answered()
        self.last_contact = datetime.now(UTC)

    def stream_was_silent(self, *, cut_short: bool = False) -> None:
        """Record that a stream brought nothing, and did not end by itself.

        `cut_short`: it had little time, because others waited for its slot.
        """
        self.silent_stream, self.stream_cut_short = True, cut_short

    def asked_without_stream(self) -> None:
        """Record that the request after a silent stream was answered."""
        self.silent_stream = self.stream_cut_short = False

    def received(self, batch: CheckpointedEvents) -> None:
        """Buffer events that a checkpoint closed."""
        self.read_cursor = batch.cursor
        self.pending.append(batch)
        size = memory_of(batch)
        self.pending_bytes += size
        self.pending_size += batch.size
        self._buffer.add(size, deliverable=True)
        if batch.events:
            self.last_event = datetime.now(UTC)

    def received_news(self) -> None:
        """Record that an event follows, which somebody else is to read."""
        self.news = True
        self.received(CheckpointedEvents([], self.read_cursor, 0))

    def read_elsewhere(self, cursor: str) -> None:
        """Record how far somebody else has read it, behind the batch in flight."""
        self.news = False
        self.read_cursor = self.delivered_cursor = cursor

    def reached_end(self, end: ReadEnd) -> None:
        """Record the end that a complete response showed. It counts after all pending batches."""
        self.end = end
        self.evidence_since = None

    def empty_answer(
        self, info: object, limits: Limits, *, now: float, since: float
    ) -> float | None:
        """Count an empty answer of the closed partition, see `EndEvidence.add`."""
        if self.evidence is None:
            self.evidence = EndEvidence(limits.settle_time, limits.poll_interval)
        since = max(since, self.failures.failed_at)
        if self.evidence_since is None:
            self.evidence_since = datetime.now(UTC)
            self.evidence_due = max(now, since + limits.settle_time)
        return self.evidence.add(info, now=now, since=since)

    def is_end_overdue(self, now: float) -> bool:
        """Whether its end could have been shown long ago, and was not."""
        return self.evidence_since is not None and now >= self.evidence_due + OVERDUE_SECONDS

    def lacks_discovery(self, info: object) -> bool:
        """Whether its empty answers need another discovery than `info`, the present one."""
        return self.evidence is not None and self.evidence.lacks_discovery(info)

    def was_silent(self) -> bool:
        """Count an answer without a line. Return whether the one before was silent, too."""
        before, self.silent = self.silent, True
        return before

    def forget_empty_answers(self) -> None:
        """Let empty answers count anew: something else came, or the requests fail."""
        self.silent = False
        if self.evidence is not None:
            self.evidence.reset()

    def contradicted(self, now: float) -> None:
        """Record progress. Where empty answers came before it, what answers may lag: R6."""
        if self.evidence is not None and self.evidence.answers:
            self.failures.failed_at = now
        self.forget_empty_answers()
        self.evidence_since = None

    def commands_came(self, count: int) -> None:
        """Count lines that were neither an event nor a checkpoint."""
        self.unknown_commands += count

    def take_end(self) -> ReadEnd:
        """Return the end, to be passed to the planner when no batch is pending."""
        assert self.end is not None
        end, self.end = self.end, None
        return end

    def end_uncommitted(self, end: ReadEnd) -> None:
        """Record that the planner has the end of the closed partition, uncommitted so far."""
        self.end = end
        self.at_end = True

    def note_caught_up(self) -> None:
        """Record the time if everything that the publisher has is committed."""
        if self.is_caught_up:
            self.caught_up_at = datetime.now(UTC)

    @property
    def is_caught_up(self) -> bool:
        """Whether everything that the publisher had when it last answered is committed."""
        uncommitted = self.in_flight > 0 or self.entry.cursor != self.read_cursor
        return self.entry.state in _AT_END and not uncommitted

    def polled(self, limits: Limits) -> None:
        """Increase the delay before the next poll, after a response with nothing new (R15)."""
        if not (self.streamed and self.held_open):  # such a stream has done the waiting itself
            self.poll_delay = max(
                self.poll_delay, min(self.poll_delay * 2, limits.max_poll_interval)
            )

    def progressed(self, limits: Limits) -> None:
        """Reset the delay before the next poll, after a response with something new (R15)."""
        self.poll_delay = limits.poll_interval
        self.failures.progressed()

    # ------------------------------------------------------------------ what is delivered

    def announce(self) -> None:
        """Make the pending events deliverable."""
        self._announced = bool(self.pending)

    def queue(self) -> None:
        """Record that it is in the queue of partitions with something to deliver."""
        self.queued = True

    def unqueue(self) -> None:
        """Record that it was taken off that queue."""
        self.queued = False

    def take(self, max_bytes: int, max_events: int | None = None) -> tuple[list[Event], str]:
        """Return pending events, coalesced up to these bounds, and the cursor after them."""
        batch = self.pending.popleft()
        events, size, memory = batch.events, batch.size, memory_of(batch)
        self.marks = batch.marks
        while self.pending and size + self.pending[0].size <= max_bytes:
            if max_events is not None and len(events) + len(self.pending[0].events) > max_events:
                break
            batch = self.pending.popleft()
            memory += memory_of(batch)
            events.extend(batch.events)
            size += batch.size
        self.pending_bytes -= memory
        self.pending_size -= size
        self._announced = bool(self.pending)
        self._buffer.free(memory, deliverable=True)
        self.in_flight += 1
        self.delivered_cursor = batch.cursor
        self.batches += 1
        self.events += len(events)
        if self._taken is not None:
            self._taken.set()
        return events, batch.cursor

    def taken(self) -> anyio.Event:
        """Return an event that is set when the next batch is delivered."""
        self._taken = anyio.Event()
        return self._taken

    def release(self) -> None:
        """Record that the application is done with the oldest batch in flight."""
        self.in_flight -= 1
        self.handling.released()

    # ------------------------------------------------------------------ what is committed

    @property
    def has_saves(self) -> bool:
        """Whether a commit was not passed to the planner yet."""
        return bool(self._saves)

    def position_before(self, number: int) -> Position | None:
        """Return what was saved before batch `number`; None when the planner has it."""
        earlier = self._saves_before(number)
        return earlier[-1].position if earlier else None

    def drawn(self, number: int, position: Position) -> Position:
        """Return what an earlier attempt to commit batch `number` has saved, or `position`.

        A save whose end nobody saw is known by its revision.
        """
        if self._drawn is not None and self._drawn[0] == number:
            known = self._drawn[1]
            same = known.replaces == position.replaces and known.cursor == position.cursor
            if same and known.status in ("open", position.status):
                return known
        self._drawn = number, position
        return position

    def is_saved(
        self, number: int, *, durably: bool = False, position: Position | None = None
    ) -> bool:
        """Whether batch `number` was saved, at this position, and not acknowledged yet."""
        return any(
            save.number == number
            and (save.durable or not durably)
            and position in (None, save.position)
            for save in self._saves
        )

    def is_overtaken(self, number: int) -> bool:
        """Whether batch `number` can't be committed: it or a later one was."""
        if number <= self.committed:
            return True
        return bool(self._saves) and self._saves[-1].number > number

    def begin_commit(self) -> None:
        """Block other saves of this position until `end_commit`: a batch is being saved."""
        self.committing += 1

    def end_commit(self) -> None:
        """Record that the save has succeeded or failed."""
        self.committing -= 1

    def saved(self, number: int, position: Position, *, durable: bool) -> None:
        """Record the save of batch `number`. It replaces an earlier one that was rolled back."""
        if self.is_lost(number):
            return  # the store has it; what is stored is loaded again
        self._saves = [*self._saves_before(number), SavedBatch(number, position, durable)]
        self.handling.saved()

    def acknowledge(self) -> Position | None:
        """Return the position of the last save, which can't be rolled back any more (R5)."""
        if not self._saves:
            return None
        last = self._saves[-1]
        self.committed = last.number
        self._base = last.position.cursor
        self._saves.clear()
        return last.position

    def _saves_before(self, number: int) -> list[SavedBatch]:
        return [save for save in self._saves if save.number < number]
