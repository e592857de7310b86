"""Discover at the start and again while the consumer runs (R2, R10, R12)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
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
from feedapi_client.lineage.planner import Action
from feedapi_client.model import LAST, FeedInfo
from feedapi_client.notifications import DiscoveryEnded, error_text
from feedapi_client.pace import limits_requests
from feedapi_client.protocol.page import (
    MIN_EMPTY_ANSWERS,
    CheckpointedEvents,
    Outcome,
    unrecognized_error,
)
from feedapi_client.protocol.text import counted
from feedapi_client.retry import Backoff, gives_up_after, retry
from feedapi_client.runtime.discovery_timer import INTERVAL
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.failures import AskedAs
from feedapi_client.runtime.late import LateEvents
from feedapi_client.runtime.partition import RuntimePartition

log = logging.getLogger(__name__)

_ROLLBACK_PAUSE = 0.5
"""Seconds until the feed is discovered again at first, when a partition seems to be rolled back."""
T = TypeVar("T")
AskedEnd = Callable[[], Awaitable[CheckpointedEvents | None]]


class Discovery:
    """Discovers at the start of a session and again whenever the timer says so."""

    def __init__(self, driver: Driver, client: FeedClient, late: LateEvents) -> None:
        self._driver = driver
        self._late = late
        self._unread = Backoff(
            base_delay=driver.settings.retry.base_delay,
            max_delay=driver.settings.retry.max_delay,
            clock=anyio.current_time,
        )
        """The pauses while the positions of other instances can't be loaded."""
        self._client = client
        self._timer = driver.timer
        self._scope: anyio.CancelScope | None = None
        self._hung = False
        limits = driver.limits
        self._empty = Backoff(
            base_delay=limits.poll_interval,
            max_delay=max(limits.poll_interval, min(limits.max_poll_interval, limits.settle_time)),
            clock=anyio.current_time,
        )
        """The pauses while no discovery has listed a partition yet."""
        self.began: float | None = None
        """When the discovery under way began, on the clock of the event loop."""
        self.error: FeedError | None = None
        """Why the last discovery failed."""
        self.failing_since: datetime | None = None
        self._has_topology = False
        self._unusable_since: float | None = None
        """Since when what discoveries list can't be used, and none before could."""
        self.rollback = Rollback(driver)

    async def first(self) -> None:
        """Discover for the first time, and carry out the planner's actions.

        For an empty store that is the bootstrap: the first positions are saved (R7). Raises what
        discovery, the fetches of present ends and the store raise.
        """
        retry_policy = self._driver.settings.retry
        backoff = Backoff(
            base_delay=retry_policy.base_delay,
            max_delay=retry_policy.max_delay,
            give_up_after=retry_policy.refused_for,
            retry_if=lambda error: isinstance(error, RequestRefusedError),
            clock=anyio.current_time,
        )
        # A refusal means that the feed changed between the two: discover anew.
        info, ends = await retry(self._discover_with_ends, backoff, sleep=anyio.sleep)
        self._driver.update_info(info)
        self._timer.succeeded()
        if not self._waits_for_partitions(info):
            await self._driver.apply(self._driver.planner.discover(info, ends=ends))
            self._has_topology = not self._driver.planner.starts_first
        self.rollback.look()
        self._late.discovered()
        started = [each for each in self._driver.partitions.values() if each.started]
        self._driver.decisions.bootstrapped(info, {each.id: each.read_cursor for each in started})

    async def _discover_with_ends(self) -> tuple[FeedInfo, dict[int, str]]:
        self._driver.entry_waits = "for an answer to the discovery"
        info = await self._client.discover()
        unresolved = self._driver.planner.unresolved(info)
        self._driver.entry_waits = (
            f"for the present ends of {counted(len(unresolved), 'partition')}"
        )
        return info, await self._present_ends(unresolved)

    async def run(self) -> None:
        """Discover whenever it is due, until cancelled.

        A failed discovery is reported and tried again; the topology stays as it was. Raises
        `StoreError`, and the error of a discovery that something is blocked by: after
        `RetryPolicy.refused_for` when the feed refuses our credentials, otherwise after
        `give_up_after`. A feed that answers 404, HTML or nonsense is as likely to come back as one
        that answers 503 (R10).
        """
        policy = self._driver.settings.retry
        backoff = Backoff(
            base_delay=policy.base_delay,
            max_delay=policy.max_delay,
            max_retry_after=policy.max_retry_after,
            clock=anyio.current_time,
        )
        while True:
            await self._timer.due()
            await self._driver.scheduler.turn()
            before = self._timer.reason
            self._timer.begun()
            self._log_reason(before)
            try:
                await self._discover_once(after_failures=backoff.failing)
            except StoreError:
                raise
            except FeedError as error:
                self._note_failure(error)
                pause = backoff.pause(error)
                elapsed = self._elapsed(error, backoff)
                if self._blocked() and self._is_final(error, elapsed):
                    raise
                self._timer.failed(pause)
            else:
                self.error = self.failing_since = None
                backoff.reset()

    async def _discover_once(self, *, after_failures: bool) -> None:
        """Discover, until the watchdog calls `restart`."""
        driver = self._driver
        self.began, self._hung = driver.clock(), False
        error: FeedError | None = None
        try:
            with anyio.CancelScope() as self._scope:
                await self._discover(after_failures=after_failures)
            if self._hung:
                raise FeedUnavailableError(
                    "a discovery showed no sign of life within Limits.stall_timeout",
                    feed=driver.feed,
                )
        except FeedError as failure:
            error = failure
            raise
        finally:
            seconds = driver.clock() - self.began
            self.began = self._scope = None
            if driver.listeners:
                driver.listeners.tell(DiscoveryEnded(seconds, error_text(error)), error)

    async def _in_turn(self, request: Callable[[], Awaitable[T]]) -> T:
        """Make a request as soon as the pace allows, ahead of those of partitions (R14).

        One that the publisher's limits refuse is made again until nothing of the feed has passed
        for `RetryPolicy.give_up_after`: such a refusal speaks for the feed, not for the request.
        """
        driver = self._driver
        while True:
            await driver.scheduler.turn()
            began = driver.clock()
            try:
                result = await request()
            except FeedError as error:
                if not limits_requests(error):
                    raise
                driver.slow_down(error, began=began)
                patience = gives_up_after(self._client.retry)
                if not driver.iterating and self._limited_seconds() >= patience:
                    raise
                await anyio.sleep(driver.pace.own_pause(error))
            else:
                driver.pace.passed(driver.clock(), began=began)
                return result

    async def _paced(self, request: Callable[[], Awaitable[T]]) -> T:
        """Make a request, and let the pace know whether the publisher's limits let it pass."""
        driver = self._driver
        began = driver.clock()
        try:
            result = await request()
        except FeedError as error:
            if limits_requests(error):
                driver.slow_down(error, began=began)
            raise
        driver.pace.passed(driver.clock(), began=began)
        return result

    def _waits_for_partitions(self, info: FeedInfo) -> bool:
        """Whether the discovery lists nothing: then another one is due soon (R7).

        What lists nothing for less than `Limits.settle_time` is no topology, but a publisher that
        starts, whatever is stored.
        """
        driver, empty = self._driver, self._empty
        if info.partitions:
            empty.reset()
            driver.awaits_partitions = False
            return False
        if not empty.failing:
            driver.report(None, "lists no partition so far: waits until it does")
        self._timer.later(empty.pause(FeedError("")), "no partition was listed so far")
        enough = empty.failures >= MIN_EMPTY_ANSWERS
        driver.awaits_partitions = not (enough and empty.elapsed >= driver.limits.settle_time)
        return driver.awaits_partitions

    def _log_reason(self, before: str) -> None:
        reason = self._timer.reason
        again = reason in (before, INTERVAL)
        self._driver.decisions.rediscovers(reason, again=again)

    def restart(self) -> None:
        """Give up the discovery that hangs. It counts as failed, and is tried again."""
        if self._scope is not None:
            self._hung = True
            self._scope.cancel()

    def _note_failure(self, error: FeedError) -> None:
        self.error = error
        self._driver.discovery_failed()
        self.failing_since = self.failing_since or datetime.now(UTC)
        text = error.message if error.partition is None else str(error)
        self._driver.report_failure(None, f"keeps its last good topology: {text}")

    def _elapsed(self, error: FeedError, backoff: Backoff) -> float:
        """For how long nothing came: of the whole feed, where its publisher limits requests."""
        return self._limited_seconds() if limits_requests(error) else backoff.elapsed

    def _limited_seconds(self) -> float:
        since = self._driver.pace.since
        return 0.0 if since is None else self._driver.clock() - since

    def _is_final(self, error: FeedError, elapsed: float) -> bool:
        policy = self._driver.settings.retry
        limit = gives_up_after(policy)
        if isinstance(error, AuthenticationError):
            limit = min(limit, policy.refused_for)
        if self._driver.planner.starts_first and isinstance(error, NoProgressError):
            return True  # nothing can start where the feed can't say its ends
        if isinstance(error, LineageError) and self._unusable_since is not None:
            # On entry it would be an error at once. A publisher that starts has some patience.
            return self._driver.clock() - self._unusable_since >= policy.refused_for
        return elapsed >= limit

    async def _discover(self, *, after_failures: bool) -> None:
        driver = self._driver
        # A partition that is refused from here on needs a discovery that begins later, because this
        # one may describe the time before the refusal.
        refused = [p for p in driver.partitions.values() if p.failures.refused]
        before, began = driver.discovered, driver.planner.begin_load()
        info = await self._paced(self._client.discover_once)
        ends = await self._present_ends(driver.planner.unresolved(info))
        if not await self._load_positions_of_others():
            return
        self._timer.succeeded()
        if self._waits_for_partitions(info):
            return
        actions = self._planned(info, ends, began)
        driver.update_info(info)
        driver.decisions.rediscovered(before, info)
        await driver.apply(actions)
        self.rollback.look()
        self._ask_again(refused, after_failures=after_failures)
        self._late.discovered()
        self._reopen_streams(info.token != before.token or info.dialect != before.dialect)
        driver.wake()
        if driver.sharing is not None and driver.planner.looks_again:
            driver.sharing.suspect()
        elif driver.sharing is not None:
            driver.sharing.nudge()

    def _planned(self, info: FeedInfo, ends: dict[int, str], began: int) -> list[Action]:
        """Let the planner take the topology. Raises `LineageError` where it can't be used (R12)."""
        try:
            actions = self._driver.planner.discover(info, ends=ends, began=began)
        except LineageError:
            if info.partitions and not self._has_topology and self._unusable_since is None:
                self._unusable_since = self._driver.clock()
            raise
        self._has_topology = not self._driver.planner.starts_first
        self._unusable_since = None
        return actions

    async def _load_positions_of_others(self) -> bool:
        """Load what other instances have saved before the discovery, which may depend on it.

        Return False if the store fails: then this discovery has failed, too.
        """
        driver = self._driver
        if driver.sharing is None:
            return True
        try:
            await driver.apply(await driver.sharing.reload())
        except StoreError as error:
            driver.report_failure(None, f"a discovery is left out: {error.message}")
            self._timer.failed(self._unread.pause(error))
            return False
        self._unread.reset()
        return True

    def _ask_again(self, refused: list[RuntimePartition], *, after_failures: bool) -> None:
        """Schedule the partitions that were refused before the discovery began.

        And those that were refused since, if the discovery says what they did not know.
        """
        driver = self._driver
        before, asked_as = set(refused), AskedAs.of(driver.discovered)
        for partition in driver.partitions.values():
            failures = partition.failures
            if not partition.started or not failures.refused:
                continue
            if partition in before or failures.refused_as != asked_as:
                pause = failures.ask_again(after_failures=after_failures)
                driver.scheduler.schedule(partition, pause)

    def _reopen_streams(self, moved: bool) -> None:
        """End streamed responses that would not end by themselves.

        They are held open on an old token, or on a partition that was closed.
        """
        driver = self._driver
        for partition in driver.partitions.values() if driver.settings.stream else ():
            held_open = partition.streamed and partition.fetching and partition.started
            if held_open and (moved or driver.planner.is_closed(partition.id)):
                partition.cancel_request()
                driver.scheduler.schedule(partition)

    def _blocked(self) -> bool:
        """Whether something can't go on without a new discovery."""
        driver = self._driver
        if driver.planner.starts_first or not self._has_topology:
            return True
        if any(partition.failures.refused for partition in driver.partitions.values()):
            return True
        return not driver.settings.follow and driver.planner.finished()

    async def _present_ends(self, partitions: list[int]) -> dict[int, str]:
        ends: dict[int, str] = {}
        limiter = anyio.CapacityLimiter(self._driver.limits.max_concurrent_fetches)

        asked = PresentEnds(self._client)

        async def ask(partition: int) -> None:
            async with limiter:
                ends[partition] = await asked.end_of(partition, within=self._in_turn)

        try:
            async with anyio.create_task_group() as tasks:
                for partition in partitions:
                    tasks.start_soon(ask, partition)
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        return ends


class Rollback:
    """Partitions that are listed as open again although they were over (R11).

    A discovery that lags lists them for a while. So they are a problem at once, and reported and,
    without `follow`, an error only after `RetryPolicy.refused_for`.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.since: dict[int, datetime] = {}
        """When each was first listed so."""
        self._began = 0.0
        self._reported: set[int] = set()

    def look(self) -> None:
        """Look at the last discovery."""
        driver, found = self._driver, self._driver.planner.listed_again()
        if not self.since:
            self._began = driver.clock()
        self.since = {p: self.since.get(p) or datetime.now(UTC) for p in found}
        self._reported &= self.since.keys()
        if not found:
            return
        elapsed = driver.clock() - self._began
        pause = max(_ROLLBACK_PAUSE, min(elapsed, driver.limits.discovery_interval))
        driver.timer.again(pause, "a partition that was over is listed as open")
        if elapsed < driver.settings.retry.refused_for:
            return
        for partition in found.keys() - self._reported:
            self._reported.add(partition)
            driver.report(partition, found[partition])
        if not driver.settings.follow:
            partition, text = next(iter(found.items()))
            driver.fail(LineageError(text, feed=driver.feed, partition=partition))


def first_error(error: BaseException) -> BaseException:
    """The first failure of a task group, without the group around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class PresentEnds:
    """Asks partitions for their present ends. Several tasks may use it at once."""

    def __init__(self, client: FeedClient) -> None:
        self._client = client
        self._lock = anyio.Lock()

    async def end_of(
        self,
        partition: int,
        *,
        within: Callable[[AskedEnd], Awaitable[CheckpointedEvents | None]] | None = None,
    ) -> str:
        """Return the cursor of the partition's present end: the first checkpoint behind `_last`.

        Events before that checkpoint came after the question, as from a publisher that waits for
        news: the question is asked again (R7).

        Retried as the policy says; raises what `open` does, and `NoProgressError` when the
        publisher gives no cursor, or none without events, again and again. `within` awaits each
        request, and may wait before it.
        """
        client, policy = self._client, self._client.retry

        async def ask() -> str:
            info = client.info or await client.discover()
            checkpoint = partial(self._first_checkpoint, info, partition)
            try:
                end = await retry(
                    checkpoint if within is None else partial(within, checkpoint),
                    Backoff.of(policy, clock=anyio.current_time),
                    sleep=anyio.sleep,
                    on_retry=log_attempt,
                )
            except RequestRefusedError:
                await self._discover_after(info)
                raise
            if end is None or end.events:
                raise NoProgressError(
                    "the publisher answers a fetch from _last "
                    f"{'without a cursor of its own' if end is None else 'with events'}: a "
                    "consumer can't start at its end. 'feedapi cursors skip' reads to the end "
                    "without delivering",
                    feed=self._client.feed,
                    partition=partition,
                )
            return end.cursor

        backoff = Backoff(
            base_delay=policy.base_delay,
            max_delay=policy.max_delay,
            attempts=client.limits.max_attempts_without_progress,
            retry_if=lambda error: isinstance(error, (RequestRefusedError, NoProgressError)),
        )
        return await retry(ask, backoff, sleep=anyio.sleep)

    async def _discover_after(self, asked_of: FeedInfo) -> None:
        """Discover, unless it was done since `asked_of`: thousands may be refused at once."""
        async with self._lock:
            if self._client.info is asked_of:
                await self._client.discover()

    async def _first_checkpoint(self, info: FeedInfo, partition: int) -> CheckpointedEvents | None:
        async with self._client.open(info, partition, LAST) as response:
            reader = response.reader
            async for chunk in response:
                # Line by line: the first checkpoint counts, and a chunk may hold several.
                for line in chunk.splitlines(keepends=True):
                    for batch in reader.feed(line):
                        return batch
                reader.check()
            finished = reader.finish()
            if finished.outcome is Outcome.UNRECOGNIZED:
                raise unrecognized_error(feed=self._client.feed, partition=partition)
        return finished.batches[0] if finished.batches else None
