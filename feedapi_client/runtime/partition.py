"""One partition at run time: its facts, and the phase that follows from them.

A partition is plain state while it pauses, so that a feed may have all its 32,768 partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from typing import NamedTuple

import anyio

from feedapi_client.lineage.states import Entry, State
from feedapi_client.model import FIRST, Event, Position
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.protocol.page import MOST_PASSED, CheckpointedEvents, EndEvidence, Progress
from feedapi_client.runtime.handling import Handling
from feedapi_client.runtime.loop import Clock
from feedapi_client.runtime.scheduling import Turn
from feedapi_client.runtime.trouble import Trouble

EVENT_BYTES = 128
"""What an event takes in memory beside its bytes."""
HEADERS_BYTES = 64
"""What the headers of an event (v1) take in addition. They are decoded when they are asked for."""
BATCH_BYTES = 384
"""What a batch takes beside its events: a batch, its cursor, a list and the page's own object."""
HELD_OPEN_SECONDS = 1.0
"""A streamed response that took longer was held open by the publisher: no gateway answered it."""
OVERDUE_SECONDS = 60.0
"""Evidence of an end that is late by so much is a problem (R6)."""
_AT_END = (State.CAUGHT_UP, State.DRAINED)  # here: to look up a member of an enum takes long


def memory_of(batch: CheckpointedEvents) -> int:
    """Return how many bytes of memory a batch takes.

    An event of 12 bytes on the wire takes 138 (CPython 3.11, msgspec 0.22, pages of 64 KiB): a
    record, its view of the page, a place in a list, and the page.
    """
    each = EVENT_BYTES
    if batch.events and batch.events[0]._headers is not None:
        each += HEADERS_BYTES
    return batch.size + len(batch.events) * each + BATCH_BYTES


class BufferBudget:
    """Counts the buffered bytes of all partitions, as memory (R16).

    Fetches wait for room before they read on. Code that takes bytes out of a buffer frees them.

    Arguments:
        limit: the bytes that may be counted at the same time.
        step: what one read brings at most, as far as is known before the first one.
    """

    def __init__(self, limit: int, step: int = 64 * 1024) -> None:
        self.limit = limit
        self.used = 0
        self.deliverable = 0
        """Number of the used bytes that the application can take."""
        self.reserved = 0
        self._largest_step = limit // 2
        self._step = min(step, self._largest_step)
        self._changed: anyio.Event | None = None

    def __repr__(self) -> str:
        return f"<BufferBudget {self.used} of {self.limit} bytes, {self.deliverable} deliverable>"

    @property
    def has_room(self) -> bool:
        taken = self.used + self.reserved
        return not taken or taken + self._step <= self.limit

    @property
    def stuck(self) -> bool:
        """Whether waiting can't free any space: nothing to take, and no read under way."""
        return not self.has_room and not self.deliverable and not self.reserved

    def reserve(self) -> int:
        """Set room for one read aside, so that many fetches don't all take the last of it."""
        self.reserved += self._step
        return self._step

    def unreserve(self, reserved: int) -> None:
        self.reserved -= reserved

    def learn(self, brought: int) -> None:
        self._step = max(self._step, min(brought, self._largest_step))

    def add(self, size: int, *, deliverable: bool = False) -> None:
        """Count bytes received, or dropped if negative; `deliverable`: closed by a checkpoint."""
        self.used += size
        if deliverable:
            self.deliverable += size
        if self._changed is not None and (self.has_room or self.stuck):
            self.look_again()

    def look_again(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def changed(self) -> anyio.Event:
        if self._changed is None:
            self._changed = anyio.Event()
        return self._changed


class ReadEnd(NamedTuple):
    """The end of a partition as a response showed it, the last item of a buffer.

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


class Phase(Enum):
    REQUEST = auto()
    """Its request is under way; the end of that comes back here."""
    STOPPED = auto()
    """Nothing: the planner does not let it be read."""
    LOOK = auto()
    """It is asked once whether an event came late."""
    PAUSED = auto()
    """It waits until the application resumes it."""
    DISCOVERY = auto()
    """Its request was refused: it waits for a discovery."""
    COMMIT = auto()
    """It is read to its end, and waits until that is committed."""
    ENDED = auto()
    """Its present end is enough: the consumer does not follow."""
    DELIVERY = auto()
    """It holds enough, and waits for the application to take that."""
    DUE = auto()
    """It is asked at its moment `until`, once it gets a turn."""


@dataclass(slots=True, eq=False, repr=False)
class RuntimePartition:
    """One partition of one session. `entry` is its state in the planner, read-only here."""

    entry: Entry
    budget: BufferBudget
    limits: InitVar[Limits]
    retry: InitVar[RetryPolicy]
    clock: InitVar[Clock]
    passed: InitVar[int] = MOST_PASSED

    # What is read.
    started: bool = False
    term: int = 0
    """How often what is pending was dropped, as by a stop. What a request of an earlier term brings
    does not count."""
    turn: Turn | None = None
    until: float = 0.0
    place: int | None = None
    looks: bool = False
    """Whether it is drained, and is to be asked once whether an event came late."""
    trouble: Trouble = field(init=False)
    readings: int = 0
    """How often it was read from its stored position, with nothing in flight before that."""
    read_cursor: str = field(init=False)
    progress: Progress = field(init=False)
    evidence: EndEvidence | None = None
    """The empty answers since it was found closed, where only they can show its end."""
    evidence_since: datetime | None = None
    """Since when it has seemed to be at its end, and nothing has shown it (R6)."""
    evidence_due: float = 0.0
    """When that could have been shown, on the clock of the event loop."""
    silent: bool = False
    unknown_commands: int = 0
    streamed: bool = False
    held_open: bool = False
    """Whether the last response lasted for so long."""
    _held_seconds: float = HELD_OPEN_SECONDS
    silent_stream: bool = False
    """Whether the last stream brought nothing. The next request is none (R14)."""
    stream_cut_short: bool = False
    """Whether it had little time, because others waited for its turn."""
    news: bool = False
    """Whether an event is known to be behind what is pending, for somebody else to read."""
    poll_delay: float = field(init=False)
    requested_at: float = 0.0
    # Buffer.
    pending: deque[CheckpointedEvents] = field(default_factory=deque)
    end: ReadEnd | None = None
    """The end that was seen. It is passed to the planner after the batches before it."""
    pending_bytes: int = 0
    """What is pending takes as many bytes of memory."""
    pending_size: int = 0
    """How many bytes what is pending had on the wire."""
    gave_way: bool = False
    """Whether others needed its turn or its room: what is pending is to be taken first."""
    announced: bool = False
    """Whether the application may have what is pending, once it has released its batch."""
    _taken: anyio.Event | None = None
    # Delivery and commits.
    queued: bool = False
    in_flight: int = 0
    delivered_cursor: str = field(init=False)
    marks: Sequence[tuple[int, str]] = ()
    """The checkpoints in what was delivered last, where batches are not joined."""
    batches: int = 0
    committed: int = 0
    """The number of the last committed batch that was passed to the planner."""
    committing: int = 0
    """Number of commits under way. A commit may take longer than its batch is in flight."""
    _saves: list[SavedBatch] = field(default_factory=list)
    _drawn: tuple[int, Position] | None = None
    _lost: int = 0
    """The number of the last batch before the lease was lost."""
    _base: str | None = None
    """The stored cursor that what was delivered since follows; None: it follows any."""
    loss_untold: bool = False
    """Whether a batch was lost uncommitted, and no commit has been refused since. A later cursor
    covers that batch, too: whoever has read it again has its effects (R5)."""
    # For people.
    handling: Handling = field(default_factory=Handling)
    events: int = 0
    last_event: datetime | None = None
    last_contact: datetime | None = None
    caught_up_at: datetime | None = None

    def __post_init__(self, limits: Limits, retry: RetryPolicy, clock: Clock, passed: int) -> None:
        self.trouble = Trouble(retry, clock)
        self.read_cursor = self.delivered_cursor = self.entry.cursor
        attempts = limits.max_attempts_without_progress
        self.progress = Progress(attempts, passed=passed, doubted_for=limits.settle_time)
        self.poll_delay = limits.poll_interval

    @property
    def id(self) -> int:
        return self.entry.id

    def __repr__(self) -> str:
        doing = "pausing"
        if not self.started:
            doing = "stopped"
        elif self.turn is not None:
            doing = "fetching"
        elif self.trouble.error is not None:
            doing = "retrying"
        return (
            f"<RuntimePartition {self.id}: {self.entry.state}, {doing} at {self.read_cursor!r}, "
            f"{self.pending_bytes} bytes pending{', in flight' if self.in_flight else ''}>"
        )

    def phase(self, limits: Limits, *, paused: bool, follow: bool, watches: bool) -> Phase:
        """Return what it does next. Derived from the facts, after each change of them.

        Arguments:
            paused: by the application.
            follow: it is asked again at its present end.
            watches: it is only asked if it has an event, from where others have read it to.
        """
        entry = self.entry
        if self.turn is not None:
            return Phase.REQUEST
        if not self.started:
            looks = self.looks and entry.state is State.DRAINED
            return Phase.STOPPED if not looks else Phase.PAUSED if paused else Phase.LOOK
        if not entry.running:
            return Phase.STOPPED  # its `Stop` is not carried out yet
        if paused:
            return Phase.PAUSED
        if self.trouble.refused:
            return Phase.DISCOVERY
        if entry.end is not None:
            return Phase.COMMIT
        if not follow and entry.state is State.CAUGHT_UP:
            return Phase.ENDED
        if self.pending or self.in_flight:
            if watches or (self.pending and (self.end is not None or self.gave_way)):
                return Phase.DELIVERY
            if self.pending_size >= limits.max_batch_bytes:
                return Phase.DELIVERY
        return Phase.DUE

    @property
    def failing(self) -> bool:
        return self.trouble.failing

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
        """Read from the cursor; after a stop, from where the application's batches end.

        One that is being read already goes on, even if an end was seen.
        """
        self.end, self.until = None, 0.0
        if self.started:
            return
        self.forget_empty_answers()
        self.evidence_since = None
        if self.batches == self._lost:
            self.read_cursor = self.delivered_cursor = cursor
        if self.batches == self._lost or self.is_settled:
            self.readings += 1
        self._base = cursor
        self.started = True
        self.trouble.started()

    def stop(self) -> None:
        self.started = False
        self.place = None
        if self.turn is not None:
            self.turn.scope.cancel()
        self.trouble.refused = False
        self.evidence_since = None
        self.drop_pending()

    def drop_pending(self) -> None:
        """Drop what was not delivered, and what the request under way still brings."""
        self.term += 1
        self.budget.add(-self.pending_bytes, deliverable=True)
        self.pending.clear()
        self.pending_bytes = self.pending_size = 0
        self.end, self.gave_way, self.announced = None, False, False
        self.news = self.news and self.in_flight > 0
        self.read_cursor = self.delivered_cursor
        self.forget_empty_answers()

    def lose(self) -> None:
        """Give up what was delivered so far: it may be read again, here or by another instance.

        The next start begins at the stored position.
        """
        if self.batches > max(self._last_saved, self._lost):
            self.loss_untold = True
        self._lost = self.batches
        self._base = None
        self._saves.clear()

    def is_lost(self, number: int) -> bool:
        return number <= self._lost

    @property
    def is_settled(self) -> bool:
        return not (self.in_flight or self.committing or self._saves)

    def requested(self, turn: Turn) -> None:
        self.turn, self.requested_at = turn, turn.began
        self.gave_way, self.place = False, None

    def request_ended(self) -> None:
        if self.turn is not None:
            self.held_open = self.turn.age > self._held_seconds
            self.turn = None

    def answered(self, *, stream: bool | int) -> None:
        """Record that a response has begun. `stream`: what was asked for, as in `FetchOptions`."""
        self.streamed = bool(stream)
        asked = HELD_OPEN_SECONDS if stream is True else stream / 2000
        self._held_seconds = min(HELD_OPEN_SECONDS, asked)
        self.trouble.answered()
        self.last_contact = datetime.now(UTC)

    def received(self, batch: CheckpointedEvents) -> None:
        self.read_cursor = batch.cursor
        self.pending.append(batch)
        size = memory_of(batch)
        self.pending_bytes += size
        self.pending_size += batch.size
        self.budget.add(size, deliverable=True)
        if batch.events:
            self.last_event = datetime.now(UTC)

    def received_news(self) -> None:
        self.news = True
        self.received(CheckpointedEvents([], self.read_cursor, 0))

    def read_elsewhere(self, cursor: str) -> None:
        self.news = False
        self.read_cursor = self.delivered_cursor = cursor

    def ask_at(self, until: float, *, place: int | None = None) -> None:
        self.until, self.place = until, place

    def look(self, until: float | None) -> None:
        """Let it be asked once, at a moment, whether an event came late; None: no more."""
        self.looks = until is not None
        if until is not None:
            self.until = until

    def progressed(self, limits: Limits) -> None:
        self.poll_delay = limits.poll_interval
        self.trouble.progressed()

    def polled(self, limits: Limits) -> None:
        if not (self.streamed and self.held_open):  # such a stream has done the waiting itself
            self.poll_delay = max(
                self.poll_delay, min(self.poll_delay * 2, limits.max_poll_interval)
            )

    # ------------------------------------------------------------------ its end

    def reached_end(self, end: ReadEnd) -> None:
        self.end = end
        self.evidence_since = None

    def take_end(self) -> ReadEnd | None:
        """Return the end, if it was seen and all before it is delivered, to tell the planner."""
        if self.pending:
            return None
        end, self.end = self.end, None
        return end

    def was_silent(self) -> bool:
        """Count an answer without a line. Return whether the one before was silent, too."""
        before, self.silent = self.silent, True
        return before

    def empty_answer(
        self, info: object, limits: Limits, *, now: float, since: float
    ) -> float | None:
        """Count an empty answer of the closed partition, see `EndEvidence.add`."""
        if self.evidence is None:
            self.evidence = EndEvidence(limits.settle_time, limits.poll_interval)
        since = max(since, self.trouble.failed_at)
        if self.evidence_since is None:
            self.evidence_since = datetime.now(UTC)
            self.evidence_due = max(now, since + limits.settle_time)
        return self.evidence.add(info, now=now, since=since)

    def lacks_discovery(self, info: object) -> bool:
        return self.evidence is not None and self.evidence.lacks_discovery(info)

    def is_end_overdue(self, now: float) -> bool:
        return self.evidence_since is not None and now >= self.evidence_due + OVERDUE_SECONDS

    def forget_empty_answers(self) -> None:
        """Let empty answers count anew: something else came, or the requests fail."""
        self.silent = False
        if self.evidence is not None:
            self.evidence.reset()

    def contradicted(self, now: float) -> None:
        """Record progress. Where empty answers came before it, what answers may lag: R6."""
        if self.evidence is not None and self.evidence.answers:
            self.trouble.failed_at = now
        self.forget_empty_answers()
        self.evidence_since = None

    @property
    def is_caught_up(self) -> bool:
        """Whether everything that the publisher had when it last answered is committed."""
        uncommitted = self.in_flight > 0 or self.entry.cursor != self.read_cursor
        return self.entry.state in _AT_END and not uncommitted

    def note_caught_up(self) -> None:
        if self.is_caught_up:
            self.caught_up_at = datetime.now(UTC)

    # ------------------------------------------------------------------ what is delivered

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
        self.announced = bool(self.pending)
        self.budget.add(-memory, deliverable=True)
        self.in_flight += 1
        self.delivered_cursor = batch.cursor
        self.batches += 1
        self.events += len(events)
        self.gave_way = self.gave_way and bool(self.pending)
        if self._taken is not None:
            self._taken.set()
        return events, batch.cursor

    def taken(self) -> anyio.Event:
        self._taken = anyio.Event()
        return self._taken

    def release(self) -> None:
        self.in_flight -= 1
        self.handling.released()

    # ------------------------------------------------------------------ what is committed

    @property
    def has_saves(self) -> bool:
        return bool(self._saves)

    @property
    def _last_saved(self) -> int:
        return self._saves[-1].number if self._saves else self.committed

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
        return number <= self.committed or self._last_saved > number

    def commits(self, by: int) -> None:
        self.committing += by

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
