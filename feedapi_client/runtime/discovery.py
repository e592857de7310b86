"""Discover at the start and again while the consumer runs (R2, R10, R12)."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import anyio

from feedapi_client.client import FeedClient
from feedapi_client.errors import (
    AuthenticationError,
    FeedError,
    FeedUnavailableError,
    RequestRefusedError,
    StoreError,
)
from feedapi_client.model import FeedInfo
from feedapi_client.retry import Backoff, retry
from feedapi_client.runtime.discovery_timer import INTERVAL
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.failures import AskedAs
from feedapi_client.runtime.partition import RuntimePartition

log = logging.getLogger(__name__)


class Discovery:
    """Discovers at the start of a session and again whenever the timer says so."""

    def __init__(self, driver: Driver, client: FeedClient) -> None:
        self._driver = driver
        self._client = client
        self._timer = driver.timer
        self._scope: anyio.CancelScope | None = None
        self._hung = False
        self.began: float | None = None
        """When the discovery under way began, on the clock of the event loop."""
        self.error: FeedError | None = None
        """Why the last discovery failed."""
        self.failing_since: datetime | None = None

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
        await self._driver.apply(self._driver.planner.discover(info, ends=ends))
        self._timer.succeeded()
        started = [each for each in self._driver.partitions.values() if each.started]
        self._driver.decisions.bootstrapped(info, {each.id: each.read_cursor for each in started})

    async def _discover_with_ends(self) -> tuple[FeedInfo, dict[int, str]]:
        self._driver.entry_waits = "for an answer to the discovery"
        info = await self._client.discover()
        unresolved = self._driver.planner.unresolved(info)
        self._driver.entry_waits = f"for the present ends of {len(unresolved)} partitions"
        return info, await self._present_ends(unresolved)

    async def run(self) -> None:
        """Discover whenever it is due, until cancelled.

        A failed discovery is reported and tried again; the topology stays as it was. Raises
        `StoreError`, and the error of a discovery that something is blocked by: at once when the
        feed refuses our credentials, otherwise after `RetryPolicy.give_up_after`. A feed that
        answers 404, HTML or nonsense is as likely to come back as one that answers 503 (R10).
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
                if self._blocked() and self._is_final(error, backoff.elapsed):
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
            for observer in driver.observers:
                observer.discovered(seconds, error)

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
        self.failing_since = self.failing_since or datetime.now(UTC)
        text = error.message if error.partition is None else str(error)
        self._driver.report_failure(None, f"keeps its last good topology: {text}")

    def _is_final(self, error: FeedError, elapsed: float) -> bool:
        limit = self._driver.settings.retry.give_up_after
        given_up = limit is not None and elapsed >= limit
        return given_up or isinstance(error, AuthenticationError)

    async def _discover(self, *, after_failures: bool) -> None:
        driver = self._driver
        # A partition that is refused from here on needs a discovery that begins later, because this
        # one may describe the time before the refusal.
        refused = [p for p in driver.partitions.values() if p.failures.refused]
        before = driver.discovered
        info = await self._client.discover_once()
        if not await self._load_positions_of_others():
            return
        actions = driver.planner.discover(info)
        driver.update_info(info)
        self._timer.succeeded()
        driver.decisions.rediscovered(before, info)
        await driver.apply(actions)
        self._ask_again(refused, after_failures=after_failures)
        self._reopen_streams(info.token != before.token or info.dialect != before.dialect)
        driver.wake()
        if driver.sharing is not None:
            driver.sharing.nudge()

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
            self._timer.failed(driver.settings.retry.max_delay)
            return False
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
        if any(partition.failures.refused for partition in driver.partitions.values()):
            return True
        return not driver.settings.follow and driver.planner.finished()

    async def _present_ends(self, partitions: list[int]) -> dict[int, str]:
        ends: dict[int, str] = {}
        limiter = anyio.CapacityLimiter(self._driver.limits.max_concurrent_fetches)

        async def ask(partition: int) -> None:
            async with limiter:
                ends[partition] = await self._client.end_of(partition)

        try:
            async with anyio.create_task_group() as tasks:
                for partition in partitions:
                    tasks.start_soon(ask, partition)
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        return ends


def first_error(error: BaseException) -> BaseException:
    """The first failure of a task group, without the group around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
