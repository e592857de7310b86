"""One partition: fetch, decode, hand over.

A worker is plain state while it pauses, so that a feed may have all its 32,768 partitions; it runs in one of the scheduler's slots while it fetches.
What it reads it keeps until the application takes it, within its own bound and the budget of all partitions.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from enum import Enum
from typing import NamedTuple, Protocol

import anyio

from feedapi_client.client import FeedClient, Response
from feedapi_client.errors import BufferLimitError, FeedError, NoProgressError
from feedapi_client.model import Event, FeedInfo, Position
from feedapi_client.options import Limits
from feedapi_client.protocol.decoder import CheckpointedEvents, PageDecoder
from feedapi_client.runtime.buffer import Budget

HAND_OVER_BYTES = 256 * 1024
"""Within a page, handing over less than this at a time costs more than it brings forward."""
HAND_OVER_SECONDS = 0.05
"""Nothing that arrived waits longer than this for the rest of its page."""
PATIENCE_SECONDS = 5.0
"""How long a response is held open for a slow application while other partitions want its slot."""
EMPTY_PAGES_REPORTED = 100
"""So many responses in a row that only moved the cursor are worth a word."""


class Driver(Protocol):
    """What a worker needs of its session."""

    client: FeedClient
    info: FeedInfo
    limits: Limits
    budget: Budget
    feed: str

    def stream_for(self, worker: Worker) -> bool | int:
        """Ask for a long response, and for how long (milliseconds)."""

    def is_closed(self, partition: int) -> bool:
        """The last discovery said closed."""

    def slots_wanted(self) -> bool:
        """Other partitions are due and have no slot."""

    def deliverable(self, worker: Worker) -> None:
        """The worker holds something for the application."""

    def report(self, partition: int | None, text: str) -> None:
        """Tell the operator."""

    def unknown_command(self) -> None:
        """A line that is neither event nor checkpoint came by."""


class Outcome(Enum):
    """What a complete response came to."""

    PROGRESS = "the cursor moved"
    END = "no event, and the cursor asked with"
    IDLE = "nothing for so long that the stream is opened anew"
    STUCK = "events, or nothing at all, and no new cursor"


class SavedBatch(NamedTuple):
    """A commit that the planner has not been told of yet: the application may still roll it back. `durable`: it was no part of its transaction."""

    number: int
    position: Position
    durable: bool


class Crowded(Exception):  # noqa: N818 - not an error
    """The response was given up so that others can go on; what was checkpointed is kept."""


class Worker:
    """The reading side of one partition. Owned by one session; `fetch` is never run twice at once."""

    __slots__ = (
        "asked_closed", "asked_info", "batches", "committed", "contact", "delivered_cursor", "driver", "empty_pages", "end", "error", "events",
        "failing_since", "failures", "held", "in_hand", "last_event", "no_progress", "partition", "pending", "pending_bytes", "poll_delay", "queued",
        "read_cursor", "refusals", "refused_as", "reserved", "saves", "scope", "stopped", "streamed", "stuck", "taken", "ticket", "unread_bytes",
    )  # fmt: skip

    def __init__(self, partition: int, cursor: str, driver: Driver) -> None:
        self.partition = partition
        self.driver = driver
        self.read_cursor = cursor
        # towards the application
        self.delivered_cursor = cursor
        self.pending: deque[CheckpointedEvents] = deque()
        self.pending_bytes = 0
        self.held: CheckpointedEvents | None = None
        self.end: tuple[str, bool] | None = None
        self.in_hand = False
        self.queued = False
        self.batches = 0
        self.saves: list[SavedBatch] = []
        self.committed = 0
        self.taken: anyio.Event | None = None
        # towards the publisher
        self.ticket: int | None = None
        self.scope: anyio.CancelScope | None = None
        self.stopped = False
        self.asked_info: FeedInfo | None = None
        self.asked_closed = False
        self.streamed = False
        self.poll_delay = driver.limits.poll_interval
        self.empty_pages = 0
        self.unread_bytes = 0
        self.reserved = False
        self.no_progress = False
        self.stuck = 0
        self.refusals = 0
        self.refused_as: tuple[str, str | None] | None = None
        self.failures = 0
        self.failing_since: float | None = None
        self.error: FeedError | None = None
        # for people
        self.events = 0
        self.last_event: datetime | None = None
        self.contact: datetime | None = None

    def __repr__(self) -> str:
        doing = (
            "stopped"
            if self.stopped
            else "fetching"
            if self.scope
            else "retrying"
            if self.error
            else "waiting"
        )
        return f"<Worker of partition {self.partition}: {doing} at {self.read_cursor!r}, {self.pending_bytes} bytes pending>"

    # ------------------------------------------------------------------ towards the publisher

    async def fetch(self) -> Outcome:
        """One request. Raises `FeedError`, and `Crowded` when its slot or its bytes are needed elsewhere; what was checkpointed is kept all the same."""
        driver = self.driver
        asked, self.asked_info = self.read_cursor, driver.info
        self.asked_closed = driver.is_closed(self.partition)
        stream = driver.stream_for(self)
        self.streamed = bool(stream)
        async with driver.client.open(
            driver.info, self.partition, asked, stream=stream
        ) as response:
            self.contact = datetime.now(UTC)
            decoder = response.decoder
            try:
                with anyio.CancelScope() as idle:
                    await self._read(response, asked, idle)
                    decoder.finish()
            finally:
                self._collect(decoder, asked)
                self._drop_rest()
                if decoder.unknown_commands:
                    driver.unknown_command()
        return Outcome.IDLE if idle.cancelled_caught else self._judge(decoder, asked)

    async def _read(self, response: Response, asked: str, idle: anyio.CancelScope) -> None:
        """Read to the end of the response. A streamed one that brings nothing for too long is ended by `idle` (R15)."""
        decoder, limits, now = response.decoder, self.driver.limits, anyio.current_time
        hand_over = 1 if self.streamed else HAND_OVER_BYTES
        last = now()
        await self._make_room(decoder, asked)
        if self.streamed:
            idle.deadline = last + limits.stream_idle_timeout
        async for chunk in response.chunks():
            if self.streamed:
                idle.deadline = float("inf")
            try:
                decoder.feed(chunk)
            finally:
                self._account(decoder)
            if decoder.ready_bytes >= hand_over or (
                decoder.ready_bytes and now() - last > HAND_OVER_SECONDS
            ):
                self._collect(decoder, asked)
                last = now()
            if await self._make_room(decoder, asked):
                last = now()
            if self.streamed:
                idle.deadline = now() + limits.stream_idle_timeout

    async def _make_room(self, decoder: PageDecoder, asked: str) -> bool:
        """Have room for one more read; True when that took a wait."""
        limits, budget, waited = self.driver.limits, self.driver.budget, False
        while self.pending_bytes >= limits.max_batch_bytes or not budget.has_room:
            self._collect(decoder, asked)
            await self._wait_for_room()
            waited = True
        if not self.streamed:  # which may be silent for long, and would keep the room from others
            budget.reserve()
            self.reserved = True
        return waited

    async def _wait_for_room(self) -> None:
        """Stop reading from the socket until the application has taken something (R16)."""
        driver, budget = self.driver, self.driver.budget
        while not budget.has_room:
            own = self.unread_bytes + (self.held.size if self.held else 0)
            if budget.stuck and own >= budget.used:
                raise BufferLimitError(
                    f"{own} bytes came without a checkpoint to deliver them by, and Limits.max_buffered_bytes is {budget.limit}. "
                    "Raise it, or ask the publisher for checkpoints more often",
                    feed=driver.feed,
                    partition=self.partition,
                )
            if budget.stuck:
                raise Crowded
            await self._patiently(budget.changed())
        while self.pending_bytes >= driver.limits.max_batch_bytes:
            self.taken = anyio.Event()
            await self._patiently(self.taken)

    async def _patiently(self, event: anyio.Event) -> None:
        with anyio.move_on_after(PATIENCE_SECONDS):
            await event.wait()
        if not event.is_set() and self.driver.slots_wanted():
            raise Crowded

    def _account(self, decoder: PageDecoder) -> None:
        if self.reserved:
            self.reserved = False
            self.driver.budget.release()
        unread = decoder.ready_bytes + decoder.tail_bytes
        self.driver.budget.add(unread - self.unread_bytes)
        self.unread_bytes = unread

    def _collect(self, decoder: PageDecoder, asked: str) -> None:
        """Move what is checkpointed from the decoder to the application's side."""
        self._account(decoder)
        run = decoder.take()
        if run is None or self.scope is None or self.scope.cancel_called:
            return
        self.unread_bytes -= run.size
        if self.held is not None:
            run, self.held = _join(self.held, run), None
        if run.events and run.cursor == asked:
            self.held = run  # the checkpoint does not move: deliver once a later one does (R13)
        elif not run.events and run.cursor == self.read_cursor:
            self.driver.budget.free(run.size)
        else:
            self._put(run)

    def _put(self, run: CheckpointedEvents) -> None:
        self.read_cursor = run.cursor
        self.pending.append(run)
        self.pending_bytes += run.size
        self.driver.budget.deliverable += run.size
        if run.events:
            self.last_event = datetime.now(UTC)
        self.driver.deliverable(self)

    def _drop_rest(self) -> None:
        """The response is over: what no checkpoint closed is fetched again."""
        self.driver.budget.free(self.unread_bytes + (self.held.size if self.held else 0))
        self.unread_bytes, self.no_progress, self.held = 0, self.held is not None, None

    def _judge(self, decoder: PageDecoder, asked: str) -> Outcome:
        if self.read_cursor != asked:
            self.stuck = 0
            self._count_empty(decoder.saw_events)
            return Outcome.PROGRESS
        if self.no_progress or decoder.saw_events or (decoder.cursor is None and self.asked_closed):
            self._check_progress(decoder.saw_events)
            return Outcome.STUCK
        self.stuck = 0
        self.end = (asked, self.asked_closed)
        return Outcome.END

    def _count_empty(self, saw_events: bool) -> None:
        self.empty_pages = 0 if saw_events else self.empty_pages + 1
        if self.empty_pages and self.empty_pages % EMPTY_PAGES_REPORTED == 0:
            self.driver.report(
                self.partition,
                f"{self.empty_pages} responses in a row moved the cursor and held no event",
            )

    def _check_progress(self, saw_events: bool) -> None:
        self.stuck += 1
        if self.stuck >= self.driver.limits.max_attempts_without_progress:
            what = (
                "brought events and no new cursor"
                if saw_events
                else "of a closed partition brought neither an event nor a cursor"
            )
            raise NoProgressError(
                f"{self.stuck} responses in a row {what}",
                feed=self.driver.feed,
                partition=self.partition,
            )

    # ------------------------------------------------------------------ towards the application

    def take(self) -> tuple[list[Event], str]:
        """What is pending, coalesced up to `Limits.max_batch_bytes`, and the cursor behind it."""
        limit = self.driver.limits.max_batch_bytes
        run = self.pending.popleft()
        events, size = run.events, run.size
        while self.pending and size + self.pending[0].size <= limit:
            run = self.pending.popleft()
            events.extend(run.events)
            size += run.size
        self.pending_bytes -= size
        self.driver.budget.deliverable -= size
        self.driver.budget.free(size)
        self.in_hand = True
        self.delivered_cursor = run.cursor
        self.batches += 1
        self.events += len(events)
        if self.taken is not None:
            self.taken.set()
        return events, run.cursor

    def stop(self) -> None:
        """Stop fetching and drop what was not delivered."""
        self.stopped = True
        self.ticket = None
        if self.scope is not None:
            self.scope.cancel()
        self.driver.budget.deliverable -= self.pending_bytes
        self.driver.budget.free(self.pending_bytes)
        self.pending.clear()
        self.pending_bytes = 0
        self.end = None
        self.read_cursor = self.delivered_cursor

    @property
    def idle(self) -> bool:
        """Neither fetching nor queued nor pausing."""
        return self.scope is None and self.ticket is None


def _join(first: CheckpointedEvents, second: CheckpointedEvents) -> CheckpointedEvents:
    return CheckpointedEvents(first.events + second.events, second.cursor, first.size + second.size)
