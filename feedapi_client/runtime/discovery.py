"""Discover at the start and again while the consumer runs (R2, R10, R12)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

import anyio

from feedapi_client.client import FeedClient
from feedapi_client.client.feed_client import log_attempt
from feedapi_client.errors import (
    AuthenticationError,
    FeedError,
    FeedUnavailableError,
    LineageError,
    NoProgressError,
    RequestRefusedError,
    StoreError,
)
from feedapi_client.lineage.states import Action
from feedapi_client.model import LAST, FeedInfo
from feedapi_client.notifications import DiscoveryEnded, error_text
from feedapi_client.protocol.page import (
    MIN_EMPTY_ANSWERS,
    CheckpointedEvents,
    Outcome,
    outcome_error,
)
from feedapi_client.protocol.text import counted
from feedapi_client.retry import Backoff, gives_up_after, retry
from feedapi_client.runtime.fetching import Fetching
from feedapi_client.runtime.pace import limits_requests
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.planning import Planning
from feedapi_client.runtime.topology import Topology
from feedapi_client.runtime.trouble import AskedAs
from feedapi_client.runtime.waiting import Waits
from feedapi_client.status import ProblemName

_ROLLBACK_PAUSE = 0.5
"""Seconds until the feed is discovered again at first, when a partition seems to be rolled back."""
T = TypeVar("T")


class Discovery:
    def __init__(
        self,
        planning: Planning,
        client: FeedClient,
        topology: Topology,
        fetching: Fetching,
        waits: Waits,
    ) -> None:
        self._planning = planning
        self._planner = planning.planner
        self._iteration = planning.iteration
        self._timer = planning.timer
        self._client = client
        self._topology = topology
        self._fetching = fetching
        self._waits = waits
        limits, policy = self._iteration.limits, self._iteration.settings.retry
        self._unread = Backoff(
            base_delay=policy.base_delay, max_delay=policy.max_delay, clock=self._iteration.clock
        )
        """The pauses while the positions of other instances can't be loaded."""
        self._empty = Backoff(
            base_delay=limits.poll_interval,
            max_delay=max(limits.poll_interval, min(limits.max_poll_interval, limits.settle_time)),
            clock=self._iteration.clock,
        )
        """The pauses while no discovery has listed a partition yet."""
        self.error: FeedError | None = None
        self.failing_since: datetime | None = None
        self._has_topology = False
        self._unusable_since: float | None = None
        """Since when what discoveries list can't be used, and none before could."""
        self.rollback = Rollback(planning)
        self._ends: dict[int, str] = {}

    # ------------------------------------------------------------------ the first one

    async def first(self) -> None:
        """Discover for the first time, and carry out the planner's actions.

        For an empty store that is the bootstrap: the first positions are saved (R7). Raises what
        discovery, the fetches of present ends and the store raise.
        """
        policy, planning = self._iteration.settings.retry, self._planning
        backoff = Backoff(
            base_delay=policy.base_delay,
            max_delay=policy.max_delay,
            give_up_after=policy.refused_for,
            retry_if=lambda error: isinstance(error, RequestRefusedError),
            clock=self._iteration.clock,
        )
        # A refusal means that the feed changed between the two: discover anew.
        info, ends = await retry(self._discover_with_ends, backoff, sleep=anyio.sleep)
        self._topology.discovered(info)
        self._timer.succeeded()
        if not self._waits_for_partitions(info):
            planning.perform(self._planner.discover(info, ends=ends))
            await planning.carry_out()
            self._has_topology = not self._planner.starts_first
        self.rollback.look()
        self._fetching.late.discovered()
        started = {id: p.read_cursor for id, p in planning.partitions.items() if p.started}
        self._iteration.decisions.bootstrapped(info, started)

    async def _discover_with_ends(self) -> tuple[FeedInfo, dict[int, str]]:
        self._iteration.entry_waits = "for an answer to the discovery"
        info = await self._client.discover()
        return info, await self._present_ends(info)

    # ------------------------------------------------------------------ the next ones

    async def run(self) -> None:
        """Discover whenever it is due, until cancelled.

        A failed discovery is reported and tried again; the topology stays as it was. Raises the
        error of a discovery that something is blocked by: after `RetryPolicy.refused_for` when the
        feed refuses our credentials, otherwise after `give_up_after`. A feed that answers 404, HTML
        or nonsense is as likely to come back as one that answers 503 (R10).
        """
        policy = self._iteration.settings.retry
        backoff = Backoff(
            base_delay=policy.base_delay,
            max_delay=policy.max_delay,
            max_retry_after=policy.max_retry_after,
            clock=self._iteration.clock,
        )
        while True:
            await self._timer.due()
            await self._planning.agenda.ahead()
            self._timer.begun()
            try:
                await self._discover_once(after_failures=backoff.failing)
            except FeedError as error:
                self._note_failure(error)
                pause = backoff.pause(error)
                elapsed = backoff.elapsed
                if limits_requests(error):  # which counts for the whole feed
                    elapsed = self._limited_seconds()
                if self._is_blocked() and self._is_final(error, elapsed):
                    raise
                self._timer.failed(pause)
            else:
                self.error = self.failing_since = None
                backoff.reset()

    async def _discover_once(self, *, after_failures: bool) -> None:
        """Discover, until the watchdog gives it up."""
        iteration, began = self._iteration, self._iteration.clock()
        error: FeedError | None = None
        scope = anyio.CancelScope()
        wait = self._waits.on(
            ProblemName.DISCOVERY_STUCK, "a discovery has taken", restart=scope.cancel
        )
        try:
            with wait, scope:
                await self._discover(after_failures=after_failures)
            if scope.cancelled_caught:
                raise FeedUnavailableError(
                    "a discovery showed no sign of life within Limits.stall_timeout",
                    feed=iteration.feed,
                )
        except FeedError as failure:
            error = failure
            raise
        finally:
            seconds = iteration.clock() - began
            if iteration.listeners:
                iteration.listeners.tell(DiscoveryEnded(seconds, error_text(error)), error)

    async def _discover(self, *, after_failures: bool) -> None:
        planning, topology, sharing = self._planning, self._topology, self._planning.sharing
        # A partition that is refused from here on needs a discovery that begins later, because this
        # one may describe the time before the refusal.
        refused = {p for p in planning.partitions.values() if p.trouble.refused}
        before, began = topology.known, self._planner.begin_load()
        info = await self._paced(self._client.discover_once)
        ends = await self._present_ends(info)
        if not await self._load_positions_of_others():
            return
        self._timer.succeeded()
        if self._waits_for_partitions(info):
            return
        actions = self._planned(info, ends, began)
        self._timer.planned()
        topology.discovered(info)
        self._iteration.decisions.rediscovered(before, info)
        planning.perform(actions)
        await planning.carried_out()
        self.rollback.look()
        self._fetching.late.discovered()
        self._look_at_partitions(before, refused, after_failures=after_failures)
        self._iteration.wake()
        if sharing is not None and self._planner.looks_again:
            sharing.suspect()
        elif sharing is not None:
            sharing.nudge()

    def _planned(self, info: FeedInfo, ends: dict[int, str], began: int) -> list[Action]:
        try:
            actions = self._planner.discover(info, ends=ends, began=began)
        except LineageError:
            if info.partitions and not self._has_topology and self._unusable_since is None:
                self._unusable_since = self._iteration.clock()
            raise
        self._has_topology = not self._planner.starts_first
        self._unusable_since = None
        return actions

    async def _load_positions_of_others(self) -> bool:
        """Load what other instances saved before the discovery. False: the store failed."""
        if self._planning.sharing is None:
            return True
        try:
            self._planning.perform(await self._planning.sharing.reload())
        except StoreError as error:
            text = f"a discovery is left out: {error.message}"
            self._iteration.report_failure(None, text)
            self._timer.failed(self._unread.pause(error))
            return False
        await self._planning.carried_out()
        self._unread.reset()
        return True

    def _look_at_partitions(
        self, before: FeedInfo, refused: Collection[RuntimePartition], *, after_failures: bool
    ) -> None:
        """Let those be asked for which the discovery changes something.

        Those that were `refused` before it began, or since, if it says what they did not know; and
        a stream that would not end by itself, because it is held open on an old token or on a
        partition that was closed.
        """
        planning, clock = self._planning, self._iteration.clock
        asked_as = AskedAs.of(self._topology.known)
        moved = asked_as != AskedAs.of(before)
        for p in planning.partitions.values():
            if not p.started:
                continue
            trouble = p.trouble
            if trouble.refused and (p in refused or trouble.refused_as != asked_as):
                planning.ask(p, trouble.ask_again(after_failures=after_failures))
            elif p.streamed and p.turn is not None and (moved or self._planner.is_closed(p.id)):
                p.turn.scope.cancel()
                p.ask_at(clock())

    # ------------------------------------------------------------------ what fails

    def _waits_for_partitions(self, info: FeedInfo) -> bool:
        """Whether the discovery lists nothing: then another one is due soon (R7).

        What lists nothing for less than `Limits.settle_time` is no topology, but a publisher that
        starts, whatever is stored.
        """
        topology, empty = self._topology, self._empty
        if info.partitions:
            empty.reset()
            topology.awaits_partitions = False
            return False
        if not empty.failing:
            self._iteration.report(None, "lists no partition so far: waits until it does")
        self._timer.later(empty.pause(FeedError("")))
        enough = empty.failures >= MIN_EMPTY_ANSWERS
        settled = enough and empty.elapsed >= self._iteration.limits.settle_time
        topology.awaits_partitions = not settled
        return not settled

    def _note_failure(self, error: FeedError) -> None:
        self.error = error
        self._topology.failed()
        self.failing_since = self.failing_since or datetime.now(UTC)
        text = error.message if error.partition is None else str(error)
        self._iteration.report_failure(None, f"keeps its last good topology: {text}")

    def _limited_seconds(self) -> float:
        since = self._planning.agenda.pace.since
        return 0.0 if since is None else self._iteration.clock() - since

    def _is_blocked(self) -> bool:
        """Whether something can't go on without a new discovery."""
        if self._planner.starts_first or not self._has_topology:
            return True
        if any(p.trouble.refused for p in self._planning.partitions.values()):
            return True
        return not self._iteration.settings.follow and self._planner.finished()

    def _is_final(self, error: FeedError, elapsed: float) -> bool:
        policy = self._iteration.settings.retry
        limit = gives_up_after(policy)
        if isinstance(error, AuthenticationError):
            limit = min(limit, policy.refused_for)
        if self._planner.starts_first and isinstance(error, NoProgressError):
            return True  # nothing can start where the feed can't say its ends
        if isinstance(error, LineageError) and self._unusable_since is not None:
            # On entry it would be an error at once. A publisher that starts has some patience.
            return self._iteration.clock() - self._unusable_since >= policy.refused_for
        return elapsed >= limit

    # ------------------------------------------------------------------ requests

    async def _in_turn(self, request: Callable[[], Awaitable[T]]) -> T:
        """Make a request as soon as the pace allows, ahead of those of partitions (R14).

        One that the publisher's limits refuse is made again until nothing of the feed has passed
        for `RetryPolicy.give_up_after`: such a refusal speaks for the feed, not for the request.
        """
        agenda = self._planning.agenda
        while True:
            await agenda.ahead()
            try:
                return await self._paced(request)
            except FeedError as error:
                if not limits_requests(error):
                    raise
                patience = gives_up_after(self._client.retry)
                if not self._iteration.iterating and self._limited_seconds() >= patience:
                    raise
                await anyio.sleep(agenda.pace.own_pause(error))

    async def _paced(self, request: Callable[[], Awaitable[T]]) -> T:
        began = self._iteration.clock()
        try:
            result = await request()
        except FeedError as error:
            if limits_requests(error):
                self._fetching.slow_down(error, began=began)
            raise
        self._planning.agenda.pace.passed()
        return result

    async def _present_ends(self, info: FeedInfo) -> dict[int, str]:
        """Return the ends at which unresolved partitions start (R7).

        Those that are known are kept where others are refused: the feed is discovered again then.
        """
        partitions, refused = self._planner.unresolved(info), list[RequestRefusedError]()
        what = counted(len(partitions), "partition")
        self._iteration.entry_waits = f"for the present ends of {what}"
        limiter = anyio.CapacityLimiter(self._iteration.limits.max_concurrent_fetches)

        async def ask(partition: int) -> None:
            async with limiter:
                try:
                    self._ends[partition] = await self._end_of(info, partition)
                except RequestRefusedError as error:
                    refused.append(error)

        try:
            async with anyio.create_task_group() as tasks:
                for partition in partitions:
                    if partition not in self._ends:
                        tasks.start_soon(ask, partition)
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        if refused:
            raise refused[0]
        return {partition: self._ends[partition] for partition in partitions}

    async def _end_of(self, info: FeedInfo, partition: int) -> str:
        """Return the cursor of a partition's present end: the first checkpoint behind `_last`.

        Events before that checkpoint came after the question, as from a publisher that waits for
        news: the question is asked again (R7).
        """
        policy = self._client.retry
        attempts = Backoff(
            base_delay=policy.base_delay,
            max_delay=policy.max_delay,
            attempts=self._iteration.limits.max_attempts_without_progress,
        )
        while True:
            end = await retry(
                partial(self._in_turn, partial(self._first_checkpoint, info, partition)),
                Backoff.of(policy, clock=self._iteration.clock),
                sleep=anyio.sleep,
                on_retry=log_attempt,
            )
            if end is not None and not end.events:
                return end.cursor
            error = NoProgressError(
                "the publisher answers a fetch from _last "
                f"{'without a cursor of its own' if end is None else 'with events'}: a consumer "
                "can't start at its end. 'feedapi cursors skip' reads to it without delivering",
                feed=self._client.feed,
                partition=partition,
            )
            await anyio.sleep(attempts.pause(error))

    async def _first_checkpoint(self, info: FeedInfo, partition: int) -> CheckpointedEvents | None:
        async with self._client.open(info, partition, LAST) as response:
            reader = response.reader
            async for lines in response:
                # Line by line: the first checkpoint counts, and there may be several.
                for line in lines:
                    for batch in reader.feed([line]):
                        return batch
                reader.check()
            finished = reader.finish()
            if finished.outcome is Outcome.UNRECOGNIZED:
                raise outcome_error(
                    finished.outcome, LAST, None, feed=self._client.feed, partition=partition
                )
        return finished.batches[0] if finished.batches else None


class Rollback:
    """Partitions that are listed as open again although they were over (R11).

    A discovery that lags lists them for a while. So they are a problem at once, and reported and,
    without `follow`, an error only after `RetryPolicy.refused_for`.
    """

    def __init__(self, planning: Planning) -> None:
        self._planning = planning
        self._iteration = planning.iteration
        self.since: dict[int, datetime] = {}
        self._began = 0.0
        self._reported: set[int] = set()

    def look(self) -> None:
        iteration, found = self._iteration, self._planning.planner.listed_again()
        if not self.since:
            self._began = iteration.clock()
        self.since = {p: self.since.get(p) or datetime.now(UTC) for p in found}
        self._reported &= self.since.keys()
        if not found:
            return
        elapsed = iteration.clock() - self._began
        pause = max(_ROLLBACK_PAUSE, min(elapsed, iteration.limits.discovery_interval))
        self._planning.timer.later(pause)
        if elapsed < iteration.settings.retry.refused_for:
            return
        for partition in found.keys() - self._reported:
            self._reported.add(partition)
            iteration.report(partition, found[partition])
        if not iteration.settings.follow:
            partition, text = next(iter(found.items()))
            iteration.fail(LineageError(text, feed=iteration.feed, partition=partition))


def first_error(error: BaseException) -> BaseException:
    """The first failure of a task group, without the group around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
