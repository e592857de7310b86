"""Discover at the start and again while the consumer runs (R2, R10, R12)."""

from __future__ import annotations

import anyio

from feedapi_client.client import FeedClient
from feedapi_client.errors import (
    AuthenticationError,
    FeedError,
    NegotiationError,
    RequestRefusedError,
    StoreError,
)
from feedapi_client.retry import Backoff
from feedapi_client.runtime.driver import Driver


class Discovery:
    """Discovers at the start of a session and again whenever the timer says so."""

    def __init__(self, driver: Driver, client: FeedClient) -> None:
        self._driver = driver
        self._client = client
        self._timer = driver.timer

    async def first(self) -> None:
        """Discover for the first time, and carry out the planner's actions.

        For an empty store that is the bootstrap: the first positions are saved (R7). Raises what
        discovery, the fetches of present ends and the store raise.
        """
        attempts = self._driver.limits.max_attempts_without_progress
        for attempt in range(1, attempts + 1):
            info = await self._client.discover()
            try:
                ends = await self._present_ends(self._driver.planner.unresolved(info))
            except RequestRefusedError:
                if attempt == attempts:
                    raise
                continue  # the feed changed between the two: discover anew
            self._driver.update_info(info)
            await self._driver.apply(self._driver.planner.discover(info, ends=ends))
            self._timer.succeeded()
            return

    async def run(self) -> None:
        """Discover whenever it is due, until cancelled.

        A failed discovery is reported and tried again; the topology stays as it was. Raises
        `StoreError`, and the error of a discovery that something is blocked by: at once when the
        feed refuses us or is no feed any more, otherwise after `RetryPolicy.give_up_after`.
        """
        driver, retry = self._driver, self._driver.settings.retry
        backoff = Backoff(base_delay=retry.base_delay, max_delay=retry.max_delay)
        while True:
            await self._timer.due()
            self._timer.begun()
            try:
                await self._discover()
            except StoreError:
                raise
            except FeedError as error:
                text = error.message if error.partition is None else str(error)
                driver.report(None, f"keeps its last good topology: {text}")
                pause = backoff.pause(error)
                if self._blocked() and self._is_final(error, backoff.elapsed):
                    raise
                self._timer.failed(pause)
            else:
                backoff.reset()

    def _is_final(self, error: FeedError, elapsed: float) -> bool:
        limit = self._driver.settings.retry.give_up_after
        given_up = limit is not None and elapsed >= limit
        return given_up or isinstance(error, (AuthenticationError, NegotiationError))

    async def _discover(self) -> None:
        driver = self._driver
        # A partition that is refused from here on needs a discovery that begins later, because this
        # one may describe the time before the refusal.
        refused = [p for p in driver.partitions.values() if p.refused]
        before = driver.discovered
        info = await self._client.discover()
        actions = driver.planner.discover(info)
        driver.update_info(info)
        self._timer.succeeded()
        await driver.apply(actions)
        for partition in refused:
            if partition.started and partition.refused:
                driver.scheduler.schedule(partition, partition.ask_again())
        self._reopen_streams(info.token != before.token or info.dialect != before.dialect)
        driver.wake()

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
        if any(partition.refused for partition in driver.partitions.values()):
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
