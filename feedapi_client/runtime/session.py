"""One iteration over a feed: its parts put together, opened, run and closed.

A session starts from what the store holds and ends with its iteration; the next iteration gets a
new one. Leaving a loop therefore loses nothing: what was not committed is read again.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import anyio

from feedapi_client.causes import failure_of
from feedapi_client.client import FeedClient
from feedapi_client.errors import FeedError, StoreError
from feedapi_client.lineage.planner import Planner
from feedapi_client.model import FeedInfo, FeedKey, Partition, Position
from feedapi_client.protocol.text import counted, names
from feedapi_client.runtime.board import Board
from feedapi_client.runtime.delegating import Delegation, Read
from feedapi_client.runtime.delivery import Delivery
from feedapi_client.runtime.discovery import Discovery, first_error
from feedapi_client.runtime.fetching import Fetching
from feedapi_client.runtime.iteration import ConsumerSettings, Iteration
from feedapi_client.runtime.loop import Wakeup, beside, running_task
from feedapi_client.runtime.pace import Pace
from feedapi_client.runtime.partition import BufferBudget
from feedapi_client.runtime.planning import Planning
from feedapi_client.runtime.positions import Positions
from feedapi_client.runtime.scheduling import Agenda
from feedapi_client.runtime.sharing import Sharing
from feedapi_client.runtime.topology import DiscoveryTimer, Topology
from feedapi_client.runtime.waiting import Waits
from feedapi_client.runtime.watchdog import Watchdog, warn_if_entry_hangs
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.leases import LeaseStore
from feedapi_client.stores.moving import first_start

_LOOK_SECONDS = 1.0
"""Between two looks whether instances are alive whose cursors are to be adopted."""


class Session:
    def __init__(
        self,
        settings: ConsumerSettings,
        client: FeedClient,
        store: CursorStore,
        *,
        leases: LeaseStore | None = None,
        share: Callable[[Planning], Sharing] | None = None,
        cut_short: Callable[[float], object] = lambda _: None,
    ) -> None:
        """`cut_short` is called with the seconds of a grace period that is over."""
        limits = settings.limits
        planner = Planner(
            feed=settings.key.url,
            start="first" if settings.start is None else settings.start,
            ordered=settings.ordered,
            partitions=settings.partitions,
            lineage=settings.lineage,
            selects_events=bool(settings.key.filters),
            shared=share is not None,
        )
        waits = Waits()
        turns = limits.max_concurrent_fetches
        self._settings = settings
        self._leases = leases
        self.iteration = Iteration(settings)
        self._positions = Positions(store, settings.key, waits, timeout=limits.commit_timeout)
        self.buffer = BufferBudget(limits.max_buffered_bytes, limits.read_bytes)
        self.agenda = Agenda(turns, limits.slot_timeout, Pace(settings.retry, turns))
        self.planning = Planning(
            self.iteration,
            planner,
            self._positions,
            self.agenda,
            DiscoveryTimer(limits.discovery_interval),
            self.buffer,
            share,
        )
        self._topology = Topology(limits, selects=bool(settings.key.filters))
        self._fetching = Fetching(self.planning, client, self._topology, self.buffer)
        self._discovery = Discovery(self.planning, client, self._topology, self._fetching, waits)
        self.delivery = Delivery(self.planning, self._topology, self._fetching.late)
        self._watchdog = Watchdog(
            self.planning,
            self._fetching,
            self.delivery,
            waits,
            lambda: self.board.health().problems,
        )
        self.board = Board(
            self.planning, self._topology, self.buffer, self._watchdog, self._discovery
        )
        self._opening = anyio.CancelScope()
        self._scope = anyio.CancelScope()
        self._unwound = anyio.Event()
        self._cut_short = cut_short
        self._grace = self._grace_ends = math.inf
        self._grace_changed = Wakeup()

    def __repr__(self) -> str:
        return f"<Session {self.planning!r}>"

    # ------------------------------------------------------------------ how it begins

    async def open(self) -> None:
        """Load the positions, discover, and save the first positions of an empty store.

        Logs a warning when one of these hangs. Raises what these raise. `stop` ends it, and the
        session with it: it may take as long as a publisher fails.
        """
        warning = partial(warn_if_entry_hangs, self.iteration, self._watchdog.waits, running_task())
        with self._opening:
            await beside(warning, self._load_and_open())
        if self._opening.cancelled_caught:
            self.close()
            self._unwound.set()

    async def _load_and_open(self) -> None:
        if self._settings.adopts is not None:
            await self._adopt(self._settings.adopts)
        if self.planning.sharing is None:
            await self._open(await self._positions.load())
        else:
            await self.planning.sharing.first_start(self._positions.load, self._open)

    async def _adopt(self, old: FeedKey) -> None:
        while (count := await self._positions.adopt(old, self._leases)) is None:
            self.iteration.entry_waits = (
                f"for the instances that share the feed under {old.url}, to adopt its cursors"
            )
            await anyio.sleep(_LOOK_SECONDS)
        if count:
            text = (
                f"{counted(count, 'cursor')} stored under {old.url} so far: kept under "
                f"{self.iteration.feed} from now on"
            )
            self.iteration.report(None, text)

    async def _open(self, positions: Mapping[int, Position]) -> None:
        if not positions:
            await self._check_first_start()
        self.planning.planner.load(positions)
        await self._discovery.first()
        if self.iteration.failure is not None:
            raise self.iteration.failure

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
            self.iteration.report(None, found)

    def delegate(self, read: Read, late: Mapping[int, float] | None) -> Delegation:
        return Delegation(self.planning, self._fetching, self.delivery, read, late)

    # ------------------------------------------------------------------ how it goes on

    async def run(self) -> None:
        """Fetch and discover until the iteration ends. A failure is raised to who iterates."""
        if self._unwound.is_set():
            return  # it was stopped before it was open
        self.iteration.begin()
        try:
            await self._to_the_end(self._run_tasks)
        except FeedError as error:
            self.iteration.fail(error)
        finally:
            self.iteration.iterating = False
            try:
                if self.planning.sharing is not None:
                    await self.planning.sharing.leave()
            finally:
                self._unwound.set()

    async def _run_tasks(self) -> None:
        work: list[Callable[[], Awaitable[object]]] = [
            self._run_agenda,
            self.planning.run_saver,
            self._discovery.run,
            self._watchdog.run,
        ]
        if self.planning.sharing is not None:
            work.append(self.planning.sharing.run)
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    for each in work:
                        tasks.start_soon(self._to_the_end, each)
        except* Exception as group:  # noqa: BLE001 - a cancellation beside it goes on
            self.iteration.fail(first_error(group))

    async def _run_agenda(self) -> None:
        await self.agenda.run(self._fetching.turn)

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
        if self.iteration.goes_on:
            raise FeedError(text, feed=self.iteration.feed)

    # ------------------------------------------------------------------ how it ends

    async def aclose(self) -> None:
        """End the session and wait until a save under way is through.

        Otherwise that save could fence the session that loads the positions next.
        """
        self.close()
        await self._unwound.wait()

    def close(self) -> None:
        self.iteration.close()
        self._scope.cancel()
        self._grace_changed.set()

    def stop(self) -> None:
        self.iteration.stop()
        self._opening.cancel()

    def end_within(self, seconds: float) -> None:
        """Let a grace period end after so many seconds, unless it ends before.

        May be called wherever the event loop runs, also in the callback of a signal.
        """
        ends = self.iteration.clock() + seconds
        if ends < self._grace_ends:
            self._grace, self._grace_ends = seconds, ends
            self._grace_changed.set()

    async def end_grace(self) -> None:
        """End grace periods, until the session is closed.

        Beside `run`: a handler may outlive what has failed there, and must not outlive its grace.
        """
        while not self.over:
            left = self._grace_ends - self.iteration.clock()
            if left <= 0:
                self._grace_ends = math.inf
                self._cut_short(self._grace)
            else:
                await self._grace_changed.wait(left)

    @property
    def over(self) -> bool:
        return self.iteration.over

    def report_unfinished(self, grace: float) -> None:
        partitions = self.planning.partitions.values()
        unfinished = sorted(p.id for p in partitions if p.in_flight or p.committing)
        text = f"the grace period of {grace:g} s is over: what is in flight is given up"
        self.iteration.report(None, f"{text}, {names(unfinished)}" if unfinished else text)

    # ------------------------------------------------------------------ what is shown

    @property
    def info(self) -> FeedInfo | None:
        return self._topology.info

    def topology(self) -> Mapping[int, Partition]:
        return self.planning.planner.graph.partitions

    def preceding(self, partition: int) -> list[int]:
        """The partitions that come before a listed one; none of one that is not known."""
        planner = self.planning.planner
        known = partition in planner.entries and partition in planner.graph
        return [p for p in planner.preceding(partition) if p in planner.entries] if known else []
