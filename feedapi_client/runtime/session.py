"""One iteration over a feed: its parts put together, opened, run and closed.

A session starts from what the store holds and ends with its iteration; the next iteration gets a
new one. Leaving a loop therefore loses nothing: what was not committed is read again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial

import anyio

from feedapi_client.causes import failure_of
from feedapi_client.client import FeedClient
from feedapi_client.errors import FeedError, StoreError
from feedapi_client.lineage.planner import Planner
from feedapi_client.model import FeedInfo, FeedKey, Partition, Position
from feedapi_client.protocol.text import counted, names
from feedapi_client.runtime.cancellation import beside
from feedapi_client.runtime.delegating import Delegation, Read
from feedapi_client.runtime.delivery import Delivery
from feedapi_client.runtime.discovery import Discovery, first_error
from feedapi_client.runtime.driver import ConsumerSettings, Driver
from feedapi_client.runtime.entering import warn_if_entry_hangs
from feedapi_client.runtime.fetching import Fetching
from feedapi_client.runtime.health import health_of
from feedapi_client.runtime.positions import Positions
from feedapi_client.runtime.sharing import Sharing
from feedapi_client.runtime.waits import wait_of
from feedapi_client.runtime.watchdog import Watchdog
from feedapi_client.status import ConsumerStatus, Health, PartitionStatus
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.leases import LeaseStore
from feedapi_client.stores.moving import first_start

_LOOK_SECONDS = 1.0
"""Between two looks whether instances are alive whose cursors are to be adopted."""


class Session:
    """Drives one planner from its start to the end of one iteration."""

    def __init__(
        self,
        settings: ConsumerSettings,
        client: FeedClient,
        store: CursorStore,
        *,
        leases: LeaseStore | None = None,
        share: Callable[[Driver], Sharing] | None = None,
    ) -> None:
        planner = Planner(
            feed=settings.key.url,
            start="first" if settings.start is None else settings.start,
            ordered=settings.ordered,
            partitions=settings.partitions,
            lineage=settings.lineage,
            selects_events=bool(settings.key.filters),
            shared=share is not None,
        )
        positions = Positions(store, settings.key, timeout=settings.limits.commit_timeout)
        self._positions = positions
        self._leases = leases
        self._settings = settings
        self.driver = Driver(settings, planner, positions)
        self._sharing = self.driver.sharing = None if share is None else share(self.driver)
        self._fetching = Fetching(self.driver, client)
        self._discovery = Discovery(self.driver, client, self._fetching.late)
        self._opening = anyio.CancelScope()
        self._scope = anyio.CancelScope()
        self._unwound = anyio.Event()
        self.delivery = Delivery(self.driver, self._fetching)
        self._watchdog = Watchdog(
            self.driver,
            self._fetching,
            self._discovery,
            self.delivery,
            lambda: self.health().problems,
        )

    def __repr__(self) -> str:
        return f"<Session {self.driver!r}>"

    async def open(self) -> None:
        """Load the positions, discover, and save the first positions of an empty store.

        Logs a warning when one of these hangs. Raises what these raise. `stop` ends it, and the
        session with it: it may take as long as a publisher fails.
        """
        task = anyio.get_current_task().id
        with self._opening:
            await beside(partial(warn_if_entry_hangs, self.driver, task), self._load_and_open())
        if self._opening.cancelled_caught:
            self.close()
            self._unwound.set()

    async def _load_and_open(self) -> None:
        if self._settings.adopts is not None:
            await self._adopt(self._settings.adopts)
        if self._sharing is None:
            await self._open(await self._positions.load())
        else:
            await self._sharing.first_start(self._positions.load, self._open)

    async def _adopt(self, old: FeedKey) -> None:
        while (count := await self._positions.adopt(old, self._leases)) is None:
            self.driver.entry_waits = (
                f"for the instances that share the feed under {old.url}, to adopt its cursors"
            )
            await anyio.sleep(_LOOK_SECONDS)
        if count:
            text = (
                f"{counted(count, 'cursor')} stored under {old.url} so far: kept under "
                f"{self.driver.feed} from now on"
            )
            self.driver.report(None, text)

    async def _open(self, positions: Mapping[int, Position]) -> None:
        if not positions:
            await self._check_first_start()
        self.driver.planner.load(positions)
        await self._discovery.first()
        if self.driver.failure is not None:
            raise self.driver.failure

    async def _check_first_start(self) -> None:
        """Refuse to read again what was read under another key by mistake (R7).

        Raises `StoreError`, also for cursors of this very key in another format.
        """
        settings, stored = self._settings, await self._positions.keys()
        if settings.start is not None:
            return
        found = first_start(settings.key, stored, by_url=settings.adopts)
        if isinstance(found, StoreError):
            raise found
        if found is not None:
            self.driver.report(None, found)

    def delegate(self, read: Read, late: Mapping[int, float] | None) -> Delegation:
        """Let somebody else read: see `FeedConsumer.delegate`. Before it runs."""
        return Delegation(self.driver, self._fetching, self.delivery, read, late)

    async def run(self) -> None:
        """Fetch and discover until the iteration ends.

        Never raises: a failure is raised by the iterating task.
        """
        if self._unwound.is_set():
            return  # it was stopped before it was open
        self.driver.iterating, self.driver.sound_at = not self.driver.over, self.driver.clock()
        try:
            await self._to_the_end(self._run_tasks)
        except FeedError as error:
            self.driver.fail(error)
        finally:
            self.driver.iterating = False
            try:
                if self._sharing is not None:
                    await self._sharing.leave()
            finally:
                self._unwound.set()

    async def _run_tasks(self) -> None:
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    for work in self._tasks():
                        tasks.start_soon(self._to_the_end, work)
        except* Exception as group:  # noqa: BLE001 - a cancellation beside it goes on
            self.driver.fail(first_error(group))

    def _tasks(self) -> Iterator[Callable[[], Awaitable[object]]]:
        """What runs during an iteration, and ends with it."""
        yield self._run_scheduler
        yield self._fetching.slots.run
        yield self._discovery.run
        yield self._watchdog.run
        if self._sharing is not None:
            yield self._sharing.run

    async def _run_scheduler(self) -> None:
        await self.driver.scheduler.run(self._fetching.work)

    async def _to_the_end(self, work: Callable[[], Awaitable[object]]) -> None:
        """Run a task of the session. Raises `FeedError` for one that ends unasked (R20)."""
        name = f"the consumer's task {work.__qualname__}"
        try:
            await work()
            text = f"{name} has ended by itself"
        except BaseException as error:
            failed = failure_of(error, name, own_task=True)
            if failed is error:
                raise
            text = str(failed)
        if not self.driver.over and self.driver.failure is None:
            raise FeedError(text, feed=self.driver.feed)

    async def aclose(self) -> None:
        """End the session and wait until a save under way is through.

        Otherwise that save could fence the session that loads the positions next.
        """
        self.close()
        await self._unwound.wait()

    def close(self) -> None:
        """End the session: nothing is fetched or committed any more."""
        self.driver.close()
        self._scope.cancel()

    def stop(self) -> None:
        """End the iteration after the batches in flight; at once while it is being opened."""
        self.driver.stop()
        self._opening.cancel()

    @property
    def over(self) -> bool:
        """Whether the session has ended."""
        return self.driver.over

    def report_unfinished(self, grace: float) -> None:
        """Report whose batches were not finished within the grace period of a stop."""
        partitions = self.driver.partitions.values()
        unfinished = sorted(p.id for p in partitions if p.in_flight or p.committing)
        text = f"the grace period of {grace:g} s is over: what is in flight is given up"
        self.driver.report(None, f"{text}, {names(unfinished)}" if unfinished else text)

    @property
    def info(self) -> FeedInfo | None:
        """The last good discovery."""
        return self.driver.info

    @property
    def reports(self) -> deque[str]:
        """The latest reports, oldest first."""
        return self.driver.reports

    def topology(self) -> Mapping[int, Partition]:
        """The partitions of the last good discovery, those that are selected."""
        return self.driver.planner.graph.partitions

    def preceding(self, partition: int) -> list[int]:
        """The partitions that come before a listed one; none of one that is not known."""
        planner = self.driver.planner
        known = partition in planner.entries and partition in planner.graph
        return [p for p in planner.preceding(partition) if p in planner.entries] if known else []

    def status(self) -> ConsumerStatus:
        """A snapshot. Costs time linear in the number of partitions."""
        return self.driver.status(wait_of if self.driver.iterating else None)

    def status_of(self, partition: int) -> PartitionStatus | None:
        """What `status` shows of one partition; None if it is not known."""
        return self.driver.status_of(partition, wait_of if self.driver.iterating else None)

    def health(self, *, opening: bool = False) -> Health:
        """Whether the session works. Costs time linear in the number of partitions.

        `opening`: `open` has not returned yet.
        """
        return health_of(self.driver, self._watchdog, self._discovery, opening=opening)
