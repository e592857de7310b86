"""`Fetching`: one request after the other for each partition, and what follows from each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import anyio

from feedapi_client.client import FeedClient, FetchResponse
from feedapi_client.errors import (
    AuthenticationError,
    CursorRejectedError,
    FeedError,
    FeedUnavailableError,
    ProtocolError,
    RequestRefusedError,
    TornResponseError,
    TransportError,
)
from feedapi_client.lineage.states import State
from feedapi_client.model import FIRST, LAST, FeedInfo
from feedapi_client.notifications import FetchEnded, FetchRetried, error_text
from feedapi_client.options import default_decision
from feedapi_client.protocol.page import (
    CheckpointedEvents,
    Outcome,
    PageReader,
    outcome_error,
)
from feedapi_client.protocol.text import excerpt
from feedapi_client.runtime.late import LateEvents
from feedapi_client.runtime.loop import running_task
from feedapi_client.runtime.pace import limits_requests
from feedapi_client.runtime.partition import (
    EVENT_BYTES,
    BufferBudget,
    Phase,
    ReadEnd,
    RuntimePartition,
)
from feedapi_client.runtime.planning import Planning
from feedapi_client.runtime.scheduling import Turn
from feedapi_client.runtime.topology import Topology
from feedapi_client.runtime.trouble import (
    AskedAs,
    Kind,
    is_of_gateway,
    is_refusal,
)

CURSOR_REFUSALS = (400, 404, 405, 410, 421)
"""Statuses that the cursor of a request may be the reason for."""
DELIVERY_BYTES = 256 * 1024
"""Minimum bytes to deliver before a page is complete. Smaller batches cost too much."""
DELIVERY_SECONDS = 0.05
"""Maximum time that events wait for `DELIVERY_BYTES`, checked when the next bytes arrive."""
_PARTS = 8
"""The parts of `Limits.max_batch_events` that are read, and joined, one by one."""
_LINES_BY_KEY = 32
"""By key the last checkpoint of so many lines is kept: a cursor may be saved there at a stop."""
SHARED_STREAM_MILLISECONDS = 5000
"""How long a streamed response lasts when more partitions want to be read than there are turns."""
POLLED_SECONDS = 600.0
"""Once a proxy has held a stream back, the feed is polled for so long: a proxy may be mended."""


class GaveWay(Exception):  # noqa: N818 - not an error
    """The request was given up so that others can go on; what was checkpointed is kept.

    Attributes:
        silent: the publisher is to blame: it sent no checkpoint while its request had a turn.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self.silent = silent


Result = Outcome | GaveWay | FeedError | None
"""What a request came to; None for a stream that ended while it was idle."""


class Request(Turn):
    def __init__(self, fetching: Fetching, p: RuntimePartition, info: FeedInfo) -> None:
        clock = fetching.clock
        super().__init__(clock, doublings=p.trouble.doublings, failing=p.failing)
        self.task = running_task()
        self.info = info
        self.asked, self.term = p.read_cursor, p.term
        self.failure: FeedError | None = None
        self._fetching = fetching
        self._planning = fetching.planning
        self._iteration = fetching.planning.iteration
        self._budget = fetching.budget
        self._p = p
        self._stream = self._streamed()
        self._idle_stream = False
        self._heard = False
        self._cut = False
        """The connection was cut while the stream was idle: that is its end (R15). Or its request
        failed, as it does where a gateway does not wait for the first byte of a quiet stream."""
        self._open_since: float | None = None
        """When the first event came that no checkpoint of the stream has closed yet."""
        self._brought_events = False
        self._news = False
        """Whether an event came that others are to read: the rest is not needed."""
        self._unclosed = 0
        self._reserved = 0
        self._undelivered: int | None = None
        """Bytes that came and are not announced; a cursor alone takes none. None: nothing came."""
        self._delivered_at = 0.0

    def _streamed(self) -> bool | int:
        """Return whether to ask for a long response, or for how many milliseconds.

        The end of a closed partition, and of all without `follow`, shows only in a complete
        response.
        """
        settings, p = self._iteration.settings, self._p
        stream = settings.stream
        if not stream or not settings.follow or not self.info.stream or self._planning.watches:
            return False
        if self._planning.planner.is_closed(p.id) or p.silent_stream:
            return False
        if self.began < self._fetching.polls_until:
            return False
        if not self._fetching.shared:
            return stream
        if stream is True:
            return SHARED_STREAM_MILLISECONDS
        return min(stream, SHARED_STREAM_MILLISECONDS)

    @property
    def counts(self) -> bool:
        """Whether nothing was dropped of the partition since the request began."""
        return self.term == self._p.term

    async def run(self) -> Result:
        """Read the response; None when a stream ended while it was idle, or it was cancelled.

        Checkpointed events are in the partition's buffer even after an error.
        """
        result: Result = None
        try:
            with self.scope:
                result = await self._run()
        except (GaveWay, FeedError) as error:
            self._cut |= isinstance(error, FeedUnavailableError)
            result = error
        self._note_silence()
        if self.scope.cancelled_caught and self.given_back:
            innocent = self.brought or self.waits_for_room or self._idle_stream
            result = GaveWay(silent=not innocent)
        return result

    async def _run(self) -> Outcome | None:
        """Read the response. A stream that brings nothing for too long is ended (R15).

        Otherwise there is no scope: it takes longer to enter one than to read most pages.
        """
        if not self._stream:
            return await self._respond(None)
        timeout = self._iteration.limits.stream_idle_timeout
        with anyio.CancelScope(deadline=self._clock() + timeout) as idle:
            return await self._respond(idle)
        return None

    async def _respond(self, idle: anyio.CancelScope | None) -> Outcome | None:
        p, outcome = self._p, None
        async with self._open() as response:
            p.answered(stream=self._stream)
            now, limits = self._clock(), self._iteration.limits
            self._planning.agenda.pace.passed()
            self.answering, self.seen = True, now
            self.silence = limits.stream_idle_timeout if self._stream else 0.0
            self._idle_stream = idle is not None
            reader = response.reader
            try:
                await self._read(response, idle)
                if self._news:
                    outcome = Outcome.PROGRESS
                elif not self._cut:
                    outcome = self._finish(reader)
            finally:
                self._close(reader)
        if outcome is Outcome.END and self.counts:
            p.reached_end(ReadEnd(reader.asked, reader.closed))
        return outcome

    def _open(self) -> FetchResponse:
        p = self._p
        try:
            return self._fetching.client.open(
                self.info, p.id, p.read_cursor, stream=self._stream, progress=p.progress
            )
        except UnicodeError as error:
            raise ProtocolError(
                "its cursor can't be sent: it is not text that UTF-8 can carry",
                feed=self._iteration.feed,
                partition=p.id,
            ) from error

    async def _read(self, response: FetchResponse, idle: anyio.CancelScope | None) -> None:
        p, reader, budget, limits = self._p, response.reader, self._budget, self._iteration.limits
        self._delivered_at = self._clock()
        await self._make_room(reader)
        if idle is not None:
            idle.deadline = self._clock() + limits.stream_idle_timeout
        waits = True
        try:
            async for lines in response:
                waits = False
                if idle is not None:
                    idle.deadline = math.inf
                    self._heard = True
                self.seen = self._clock()
                if self._stream and not budget.stuck:  # others may have taken the room meanwhile
                    await self._make_room(reader)
                before = p.pending_bytes + self._unclosed
                self._take(reader, lines)
                if self._news:
                    return
                self._update_buffer(reader)
                budget.learn(p.pending_bytes + self._unclosed - before)
                self._idle_stream = bool(self._stream) and not reader.kept_bytes
                reader.check()
                self._deliver_in_time()
                await self._make_room(reader)
                if idle is not None:
                    now = self._clock()
                    if not reader.unclosed_events:
                        self._open_since = None
                    elif self._open_since is None:
                        self._open_since = now
                    since = now if self._open_since is None else self._open_since
                    idle.deadline = since + limits.stream_idle_timeout
                waits = True
        except TornResponseError:
            if not waits or not self._idle_stream:
                raise
            self._cut = True

    def _take(self, reader: PageReader, lines: list[bytes]) -> None:
        most = self._iteration.limits.max_batch_events
        for part in _parts(lines, most and max(most // _PARTS, 1)):
            if self._planning.overlaps:
                few = _parts(part, _LINES_BY_KEY)
                batches = _marked([batch for each in few for batch in reader.feed(each)])
            else:
                batches = reader.feed(part)
            for batch in batches:
                self._receive(batch)

    def _finish(self, reader: PageReader) -> Outcome:
        finished = reader.finish(self._clock())
        for batch in finished.batches:
            self._receive(batch)
        self._heard = True
        if self._p.silent_stream and not self._stream:
            self._compare_with_stream()
        return Outcome.PROGRESS if self._news else finished.outcome

    def _close(self, reader: PageReader) -> None:
        """Keep checkpointed events, and drop the others: they are fetched again."""
        for batch in reader.rest():
            self._receive(batch)
        self._budget.unreserve(self._reserved)
        self._budget.add(-self._unclosed)
        self._reserved = self._unclosed = 0
        self._deliver()
        if reader.unknown_commands:
            self._p.unknown_commands += reader.unknown_commands
            self._planning.timer.perhaps()  # perhaps "list the partitions again" (R10)

    # ------------------------------------------------------------------ silent streams (R14)

    def _note_silence(self) -> None:
        """A stream that brought nothing at all, for long: ask once without it.

        So is one that was ended early because others wait for the turn: if a proxy holds streams
        back, each of them is ended before the proxy passes anything on.
        """
        limits, p = self._iteration.limits, self._p
        if not self._stream or (self.scope.cancelled_caught and not self.given_back):
            return
        if self._cut and not self._heard:
            p.silent_stream = p.stream_cut_short = True
        elif self._heard:
            since = self._open_since
            if since is not None and self._clock() >= since + limits.stream_idle_timeout:
                p.silent_stream, p.stream_cut_short = True, False
        else:
            cut_short = self.age < min(limits.slot_timeout, limits.stream_idle_timeout)
            if not cut_short or (self.given_back and self.answering):
                p.silent_stream, p.stream_cut_short = True, cut_short

    def _compare_with_stream(self) -> None:
        """Compare a response with the silent stream before it.

        A stream that was ended early proves nothing: events may have come since. Nor does one where
        partitions wait for turns, as this request did.
        """
        fetching, p, now = self._fetching, self._p, self._clock()
        proves_nothing = p.stream_cut_short or fetching.shared
        p.silent_stream = p.stream_cut_short = False
        if not self._brought_events or proves_nothing or now < fetching.polls_until:
            return
        fetching.polls_until = now + POLLED_SECONDS
        self._iteration.report(
            p.id,
            "a streamed response brought nothing, and the same request without stream brought "
            "events at once: a proxy buffers responses (with nginx, proxy_buffering off ends "
            "that), or no checkpoint comes before their end. The feed is polled instead; streams "
            f"are tried again in {POLLED_SECONDS / 60:.0f} minutes",
        )

    # ------------------------------------------------------------------ towards the application

    def _receive(self, batch: CheckpointedEvents) -> None:
        if not self.counts or self._news:
            return  # the partition was stopped: it reads again from what was delivered
        if self._planning.watches and batch.events:
            self._news = True
            self._p.received_news()
        else:
            self._p.received(batch)
        self._brought_events |= bool(batch.events)
        self._planning.agenda.brought(self)
        self._undelivered = (self._undelivered or 0) + batch.size

    def _deliver_in_time(self) -> None:
        if self._undelivered is None:
            return
        enough = bool(self._stream) or self._undelivered >= DELIVERY_BYTES
        if enough or self.seen - self._delivered_at > DELIVERY_SECONDS:
            self._deliver()

    def _deliver(self) -> None:
        self._undelivered = None
        self._delivered_at = self._clock()
        self._planning.announce(self._p)

    # ------------------------------------------------------------------ back-pressure (R16)

    def _update_buffer(self, reader: PageReader) -> None:
        self._budget.unreserve(self._reserved)
        self._reserved = 0
        unclosed = reader.kept_bytes + reader.unclosed_events * EVENT_BYTES
        self._budget.add(unclosed - self._unclosed)
        self._unclosed = unclosed

    async def _make_room(self, reader: PageReader) -> None:
        limits, budget, p = self._iteration.limits, self._budget, self._p
        while p.pending_size >= limits.max_batch_bytes or not budget.has_room:
            self._deliver()
            self.waits_for_room = True
            await self._wait_for_room(reader)
            self.waits_for_room = False
            self.seen = self._clock()
        if not self._stream:  # which may be silent for long, and would keep the room from others
            self._reserved = budget.reserve()

    async def _wait_for_room(self, reader: PageReader) -> None:
        limits, budget, p = self._iteration.limits, self._budget, self._p
        while not budget.has_room:
            if self._planning.drop_paused():
                continue
            if budget.stuck and self._unclosed >= budget.used:
                raise reader.too_much_unclosed()
            if budget.stuck:
                raise GaveWay
            await budget.changed().wait()
        while p.pending_size >= limits.max_batch_bytes:
            await p.taken().wait()


class Fetching:
    def __init__(
        self, planning: Planning, client: FeedClient, topology: Topology, budget: BufferBudget
    ) -> None:
        self.planning = planning
        self.client = client
        self.topology = topology
        self.budget = budget
        self.polls_until = -math.inf
        """No stream is asked for before this moment: a proxy holds them back (R14)."""
        self.late = LateEvents(planning, client, topology)
        self._iteration = planning.iteration
        self._limits = planning.iteration.limits
        self.clock = planning.iteration.clock

    @property
    def shared(self) -> bool:
        """Whether more partitions want to be read than there are turns."""
        return len(self.planning.partitions) > self._limits.max_concurrent_fetches

    def watch(self) -> None:
        self.planning.watches = True
        self.client = self.late.client = self.client.asking_for_one()

    async def turn(self, p: RuntimePartition, place: int) -> None:
        planning, phase = self.planning, self.planning.phase(p)
        if phase is Phase.LOOK:
            await self._look(p)
            return
        if phase is not Phase.DUE:
            return  # its `Stop` is not carried out yet
        request = Request(self, p, self.topology.known)
        p.requested(request)
        planning.agenda.hold(request)
        try:
            result = await request.run()
        finally:
            planning.agenda.release(request)
            p.request_ended()
        if request.failure is not None and request.scope.cancelled_caught:
            result = request.failure
        elif request.scope.cancelled_caught and not request.given_back:
            planning.advance(p)  # paused, or on an old token: it is asked again
            return
        if request.counts:
            self._react(p, request, result, place)
        planning.advance(p)

    async def _look(self, p: RuntimePartition) -> None:
        p.requested(Turn(self.clock))
        try:
            await self.late.look(p)
        finally:
            p.request_ended()
        self.planning.advance(p)
        self._iteration.wake()

    # ------------------------------------------------------------------ what follows

    def _react(self, p: RuntimePartition, request: Request, result: Result, place: int) -> None:
        iteration = self._iteration
        now = self.clock()
        if p.read_cursor != request.asked:
            p.trouble.recovered()
            iteration.sound_at = now
        self._note(p, request, result)
        if isinstance(result, GaveWay):
            self._gave_way(p, request, silent=result.silent)
        elif isinstance(result, FeedError):
            self._failed(p, request, result, place)
        elif result is Outcome.LAGGING:
            end = request.info.partitions[p.id].last_cursor
            error = outcome_error(result, p.read_cursor, end, feed=iteration.feed, partition=p.id)
            self._lags(p, error, ends=True, report=iteration.report)
        elif result is Outcome.UNRECOGNIZED or result is Outcome.BEHIND:
            self._without_evidence(p, result, request.asked)
        else:
            p.trouble.recovered()
            iteration.sound_at = now
            if request.held < self._limits.slot_timeout / 2:
                p.trouble.answered_quickly()
            self._answered(p, request, result)

    def _note(self, p: RuntimePartition, request: Request, result: Result) -> None:
        failure = result if isinstance(result, FeedError) else None
        if not isinstance(result, GaveWay):
            self.topology.answers.add(self.clock(), failed=_fails(result))
        if self._iteration.listeners:
            told = FetchEnded(p.id, request.age, error_text(failure))
            self._iteration.listeners.tell(told, failure)

    def _ask_in(self, p: RuntimePartition, pause: float, place: int | None = None) -> None:
        p.ask_at(self.clock() + pause if pause > 0 else 0.0, place=place)

    def _answered(self, p: RuntimePartition, request: Request, outcome: Outcome | None) -> None:
        limits = self._limits
        if outcome is Outcome.EMPTY or outcome is Outcome.SILENT:
            pause = self._settles_in(p, request.info, closed=outcome is Outcome.EMPTY)
            if pause is not None:
                self._ask_in(p, pause)
                return
            p.reached_end(ReadEnd(p.read_cursor, outcome is Outcome.EMPTY))
            return
        p.contradicted(self.clock())
        if outcome is Outcome.DOUBTFUL:
            self._ask_in(p, limits.silent_pause)
        elif outcome is Outcome.NO_PROGRESS:
            feed = self._iteration.feed
            error = outcome_error(outcome, p.read_cursor, None, feed=feed, partition=p.id)
            self._ask_in(p, p.trouble.pause_without_progress(error))
        elif outcome is None and not p.held_open:
            # A proxy cut it at once, or nearly: no more contact than a poll (R15).
            self._ask_in(p, p.poll_delay)
            p.polled(limits)
        else:
            if outcome is Outcome.PROGRESS:
                self.planning.planner.progressed(p.id)
                p.progressed(limits)
            # Cursors that move on every request, without an event, must not make a busy loop.
            busy = p.progress.empty > limits.max_attempts_without_progress
            self._ask_in(p, limits.poll_interval if busy else 0.0)

    def _settles_in(self, p: RuntimePartition, asked_of: FeedInfo, *, closed: bool) -> float | None:
        """Return the seconds until an empty answer is asked for again; None: it is the end (R6)."""
        limits, topology = self._limits, self.topology
        if not closed:
            if self._iteration.settings.follow or p.was_silent():
                return None
            return limits.silent_pause
        now, since = self.clock(), topology.end_counts_from(p.id)
        pause = p.empty_answer(asked_of, limits, now=now, since=since)
        if pause is not None:
            if not topology.was_told(p.id):
                entries = self.planning.planner.entries.values()
                awaited = {e.id for e in entries if e.running or e.state is State.WAITING}
                told = topology.newly_awaited(awaited)
                self._iteration.decisions.awaits_evidence(told, p.evidence_due - now)
            if p.lacks_discovery(topology.info):
                self.planning.timer.soon()
        return pause

    def _without_evidence(self, p: RuntimePartition, outcome: Outcome, asked: str) -> None:
        """A response that says nothing of the partition, or leads back to an older place (R6)."""
        iteration = self._iteration
        p.forget_empty_answers()
        behind = outcome is Outcome.BEHIND
        if not behind and p.streamed and p.held_open:
            self._ask_in(p, 0.0)  # held open and idle, whatever kept it alive
            return
        error = outcome_error(outcome, asked, None, feed=iteration.feed, partition=p.id)
        ends = not iteration.settings.follow or self.planning.planner.is_closed(p.id)
        self._lags(p, error, ends=ends, report=iteration.report_failure, at_once=behind)

    def _lags(
        self,
        p: RuntimePartition,
        error: FeedError,
        *,
        ends: bool,
        report: Callable[[int, str], None],
        at_once: bool = False,
    ) -> None:
        """Ask again for a while: a replica seems to lag. Reported at once, or after 5 s."""
        pause = self._retry(p, Kind.LAG if ends else Kind.LAG_OF_OPEN, error)
        if pause is not None and (at_once or p.trouble.lags_for_long()):
            report(p.id, error.message)

    def _gave_way(self, p: RuntimePartition, request: Request, *, silent: bool) -> None:
        """Others need the turn, or the room that is left in the buffer (R14, R16)."""
        if not silent:
            p.contradicted(self.clock())  # events may have come
            p.gave_way = bool(p.pending)
            self._ask_in(p, self._limits.poll_interval)
            return
        error = FeedUnavailableError(
            f"no checkpoint came within {request.held:.1f} s, and other partitions wait for the "
            "slot",
            feed=self._iteration.feed,
            partition=p.id,
        )
        if (pause := self._retry(p, Kind.NO_CHECKPOINT, error)) is not None:
            self._iteration.failure_log.warn(p.id, f"{error}; the next attempt in {pause:.1f} s")

    # ------------------------------------------------------------------ errors

    def _failed(self, p: RuntimePartition, request: Request, error: FeedError, place: int) -> None:
        if limits_requests(error) and self._limited(p, request, error, place):
            return
        of_gateway = is_of_gateway(error)
        decides = self._iteration.settings.retry.decide is not default_decision
        if is_refusal(error) and not (of_gateway and decides):
            self._refused(p, error, request.info)
            return
        try:
            pause = p.trouble.failed(Kind.REQUEST, error)
        except FeedError as final:
            if of_gateway and not p.trouble.given_up:
                self._refused(p, error, request.info)
            else:
                self.planning.fail(p, final)
            return
        if of_gateway:
            self.planning.timer.soon()
        attempt = p.trouble.attempts(Kind.REQUEST) + 1
        self._retried(p, error)
        self._iteration.failure_log.warn(
            p.id, f"{error}; attempt {attempt} in {pause:.1f} s", attempt=attempt
        )
        self._ask_in(p, pause)

    def _limited(self, p: RuntimePartition, request: Request, error: FeedError, place: int) -> bool:
        """The publisher limits requests: the whole feed slows down.

        Return False where it is this partition alone: that is a failure as any other.
        """
        agenda = self.planning.agenda
        keeps_place = p.trouble.limited(error, agenda.pace.count)
        if p.trouble.limited_alone:
            return False
        try:
            self.slow_down(error, began=request.began)
        except FeedError as final:
            self.planning.fail(p, final)
            return True
        self._retried(p, error)
        pause = p.trouble.retry_in(agenda.pace.own_pause(error))
        self._ask_in(p, pause, place if keeps_place else None)
        return True

    def slow_down(self, error: FeedError, *, began: float) -> None:
        """Ask the feed less often (R14). Raises the error when it is final."""
        agenda, now = self.planning.agenda, self.clock()
        slower = agenda.pace.refused(
            error, began=began, now=now, under_way=agenda.running, answering=agenda.answering
        )
        if slower:
            self._iteration.report_failure(
                None,
                f"{error.message}: the feed is asked more slowly, "
                f"{agenda.pace.rate(now):.2g} times a second for now",
            )

    def _refused(self, p: RuntimePartition, error: FeedError, asked_of: FeedInfo) -> None:
        """Discover again, then ask again, for `RetryPolicy.refused_for` (R10)."""
        trouble, outdated = p.trouble, asked_of is not self.topology.info
        try:
            pause = trouble.refuse(error, AskedAs.of(asked_of), outdated=outdated)
        except FeedError:
            self.planning.fail(p, self._final(p, error))
            return
        self._retried(p, error)
        if trouble.attempts(Kind.REFUSED) > 1:
            # One refusal is how a publisher says that its topology changed.
            text = f"{error}; a new discovery and the next attempt in {pause:.1f} s"
            self._iteration.failure_log.warn(p.id, text)
        if trouble.refused:
            self.planning.timer.refused(pause)
        self._ask_in(p, pause)

    def _retry(self, p: RuntimePartition, kind: Kind, error: FeedError) -> float | None:
        """Ask again in so many seconds, which are returned; None: the error is final."""
        try:
            pause = p.trouble.failed(kind, error)
        except FeedError as final:
            self.planning.fail(p, final)
            return None
        self._retried(p, error)
        self._ask_in(p, pause)
        return pause

    def _retried(self, p: RuntimePartition, error: FeedError) -> None:
        p.forget_empty_answers()
        if self._iteration.listeners:
            self._iteration.listeners.tell(FetchRetried(p.id), error)

    def _final(self, p: RuntimePartition, error: FeedError) -> FeedError:
        cursor, status = p.read_cursor, getattr(error, "status", None)
        times = (
            f"{error.message}. It has done so for {p.trouble.refused_seconds:.0f} s, "
            "while discovery lists the partition"
        )
        kind: type[FeedError] = ProtocolError
        if isinstance(error, AuthenticationError):
            kind, advice = AuthenticationError, "Its discovery is answered all the same"
        elif status == 409:
            advice = "Its fetches don't accept the token that its discovery gives"
        elif status not in CURSOR_REFUSALS:
            kind = TransportError if isinstance(error, TransportError) else ProtocolError
            advice = (
                "Its discovery is answered all the same: look at gateways and proxies on the way"
            )
        elif cursor in (FIRST, LAST):
            advice = f"The cursor can't be at fault, since it is {cursor}"
        else:
            kind = CursorRejectedError
            advice = (
                f"The cursor is '{excerpt(cursor.encode())}'. If this is an outage, start again "
                "later: nothing is lost. Only if the publisher says that it no longer has that "
                "place, reset the cursor, which skips or repeats events"
            )
        final = kind(f"{times}. {advice}", feed=self._iteration.feed, partition=p.id)
        if isinstance(final, (ProtocolError, TransportError)):
            final.status = status
        final.__cause__ = error
        return final

    # ------------------------------------------------------------------ for the watchdog

    def restart(self, p: RuntimePartition) -> None:
        request = p.turn
        if not isinstance(request, Request) or request.failure is not None:
            return
        request.failure = FeedUnavailableError(
            f"a request showed no sign of life for {self.clock() - request.seen:.1f} s",
            feed=self._iteration.feed,
            partition=p.id,
        )
        request.scope.cancel()


def _fails(result: object) -> bool:
    """Whether an answer is one that says nothing of the feed. A refusal says that it changed."""
    refused = isinstance(result, RequestRefusedError)
    return result is Outcome.UNRECOGNIZED or (isinstance(result, FeedError) and not refused)


def _marked(batches: list[CheckpointedEvents]) -> list[CheckpointedEvents]:
    """Return the batches as at most one, with their ends marked."""
    events, size, marks = [], 0, []
    for batch in batches:
        events += batch.events
        size += batch.size
        marks.append((len(events), batch.cursor))
    return [CheckpointedEvents(events, marks[-1][1], size, marks)] if marks else []


def _parts(lines: list[bytes], most: int | None) -> Iterator[list[bytes]]:
    """Cut lines into parts of so many: what one part closes is one batch.

    Parts of an eighth of a batch's events are joined to batches that come close to it.
    """
    most = most or max(len(lines), 1)
    return (lines[at : at + most] for at in range(0, len(lines), most))
