"""`FeedWatch`: the driver of a streaming query as a consumer that lets others read.

`FeedConsumer.delegate` knows when a partition has news, and all about splits, refusals, outages,
polls and ends. Here it runs in a daemon thread with an event loop of its own, over a store in
memory: Spark's thread never waits for the feed, and nothing depends on Spark calling ``stop()``.
Imports no Spark.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from feedapi_client.client import FeedClient
from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import TransportError
from feedapi_client.lineage.graph import descendants
from feedapi_client.model import FIRST, FeedInfo, Position, Reached
from feedapi_client.notifications import (
    BatchCommitted,
    DiscoveryEnded,
    FetchEnded,
    Notification,
    PartitionDrained,
    PartitionStarted,
)
from feedapi_client.retry import Backoff
from feedapi_client.spark.epoch import State, check_partitions, count_before
from feedapi_client.spark.feed_access import FeedConnection, client_of_event_loop
from feedapi_client.spark.fetch import FetchResult
from feedapi_client.spark.source_options import SourceOptions
from feedapi_client.status import PartitionState, PartitionStatus, PartitionWait
from feedapi_client.stores.sqlite import MemoryCursorStore

_log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_POLLS_PER_SECOND = 50
"""Requests a second to all idle partitions together, where option maxPollInterval is not given."""
LATE_SECONDS = 600.0
"""For so long a partition is asked again whose end only empty answers have shown (R6)."""
_PATIENCE = 2.0
"""Seconds that a trigger waits for what is being asked. Spark asks the sources of a query one after
the other: the others go on then."""
_LOOK_SECONDS = 0.01
_NEVER = 1e9
_MANY = 1000
_KEPT_SECONDS = 1.0
"""How long the report on many partitions is kept: to count them takes some milliseconds."""
_READING = (PartitionState.READING, PartitionState.RETRYING)
_UNDER_WAY = (
    PartitionWait.SLOT,
    PartitionWait.RESPONSE,
    PartitionWait.DELIVERY,
    PartitionWait.SAVE,
)
_COUNTED = {
    PartitionState.READING: "reading",
    PartitionState.RETRYING: "reading",
    PartitionState.CAUGHT_UP: "caughtUp",
    PartitionState.WAITING: "waiting",
    PartitionState.DRAINED: "drained",
}


class FeedWatch:
    """Watches the feed of a query from a state on; None: of a new one. For Spark's thread."""

    def __init__(
        self,
        options: SourceOptions,
        connection: FeedConnection,
        state: State | None,
        *,
        follow: bool = True,
    ) -> None:
        self._options, self._connection, self._follow = options, connection, follow
        self._restored = state is not None
        self._known = state
        self._store = MemoryCursorStore()
        self._consumer: FeedConsumer[Any]
        self._waiting: dict[int, tuple[str, asyncio.Future[Reached]]] = {}
        self._entered = self._over = False
        self._error: BaseException | None = None
        self._uncommitted: set[int] = set()
        """Partitions whose results are taken, and not in the store yet."""
        self._committed = asyncio.Event()
        self._unsettled = True
        self._slow: set[int] = set()
        """Partitions whose answer was waited for in vain."""
        self._news = threading.Condition()
        self._requests = 0
        self._report: dict[str, Any] = {}
        self._report_until = -math.inf
        self.selected = None if state is None else state.selected
        self.changed = True
        """Whether lineage or selection may have changed since `state` was last called."""
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        thread = threading.Thread(target=self._run, name="feedapi-watch", daemon=True)
        thread.start()

    # ------------------------------------------------------------------ from Spark's thread

    @property
    def over(self) -> bool:
        return self._over

    def ready(self, timeout: float) -> list[int]:
        """Return the partitions that have news, the one that has waited longest first.

        Waits `timeout` seconds for the first one, and until none is being asked any more that may
        have some, too. Raises what has ended the consumer.
        """
        began = time.monotonic()
        while True:
            if self._error is not None:
                raise self._error
            elapsed = time.monotonic() - began
            if self._over:
                break
            if self._unsettled and self._call(self._is_settling(patient=elapsed < _PATIENCE)):
                # To look at thousands of partitions takes a while.
                taken = time.monotonic() - began - elapsed
                time.sleep(max(_LOOK_SECONDS, 5 * taken))
                continue
            with self._news:
                if self._waiting or self._over or elapsed >= timeout:
                    break
                self._news.wait(timeout - elapsed)
        return self._call(self._listed())

    def advance(self, results: Iterable[FetchResult]) -> bool:
        """Take what the tasks of an epoch came to; returns when the store holds the cursors.

        Return False, and nothing is taken, where somebody does not wait for that. Raises what has
        ended the consumer.
        """
        return self._call(self._advance(list(results)))

    def state(self) -> State | None:
        """Return the present state, consistent in itself; None before the first discovery."""
        self.changed = False
        return self._call(self._state())

    def reading(self) -> set[int]:
        return self._call(self._reading())

    def report(self) -> dict[str, Any]:
        """Return what `StreamingQueryProgress` says of the source.

        - ``partitions``, and by state: one that can't be asked is counted as ``reading``.
        - ``caughtUpPartitions``: as ``caughtUp``; drained ones included.
        - ``behindSeconds``: the longest time since a partition that is not caught up was; 0 when
          all are; None when one never was.
        - ``requests``: polls since the last epoch.
        """
        now = time.monotonic()
        if now >= self._report_until:
            self._report = self._call(self._count())
            many = self._report["partitions"] > _MANY
            self._report_until = now + _KEPT_SECONDS if many else now
        return self._report

    def close(self) -> None:
        """End the thread. May be called again, and by the garbage collection."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._closing.set)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ------------------------------------------------------------------ in the event loop

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        watching = asyncio.create_task(self._watch_or_fail())
        await self._closing.wait()
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    async def _watch_or_fail(self) -> None:
        try:
            await self._watch()
        except Exception as error:  # noqa: BLE001 - `ready` raises it in Spark's thread
            self._error = error
        finally:
            self._committed.set()
            with self._news:
                self._over, self._entered = True, self._error is None
                self._news.notify_all()

    async def _watch(self) -> None:
        state, options = self._known, self._options
        async with AsyncExitStack() as stack:
            http = client_of_event_loop(options)
            if http is not None:
                await stack.enter_async_context(http)
            if state is None or state.selected is not None:
                state = self._known = await self._selected_anew(http, state)
                self.selected = state.selected
            self._consumer = consumer = FeedConsumer(
                options.url,
                store=self._store,
                start=options.starting_cursors,
                ordered=options.ordered,
                follow=self._follow,
                partitions=state.selected,
                lineage=options.lineage,
                v1_partitions=options.v1_partitions,
                fetch=self._connection.fetch_options,
                limits=self._limits(len(state.info.partitions)),
                retry=options.retry,
                http=http,
            )
            if state.positions:
                first = {id: replace(at, replaces=None) for id, at in state.positions.items()}
                await self._store.save(consumer.key, first)
            stack.enter_context(consumer.subscribe(self._told))
            await self._patiently(partial(stack.enter_async_context, consumer))
            self._discovered()
            self._entered = True
            await consumer.delegate(self._read, late=state.late)

    async def _selected_anew(self, http: Any, state: State | None) -> State:
        """Discover: a new query needs the names of filters, and a selection what it consists of."""
        options = self._options
        client = FeedClient(
            options.url,
            http=http,
            v1_partitions=options.v1_partitions,
            retry=options.retry,
            limits=options.limits,
        )
        async with client:
            info = await self._patiently(client.discover)
        if state is None:
            self._connection.restore(info)
            check_partitions(options, info)
            return State(info=info, known=set(info.partitions), selected=options.partitions)
        assert state.selected is not None
        listed = info.partitions.keys()
        # One that waited and is no longer listed has no position: there is nothing to read.
        state.selected = frozenset(
            p for p in state.selected if p in listed or p in state.positions
        ) | descendants(info.partitions, state.selected, listed - state.known)
        state.known |= listed
        return state

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await a call, however long it fails where a query starts again while its feed is down."""
        policy = self._options.retry
        patient = self._restored and self._follow and policy.give_up_after is None
        backoff = Backoff.of(policy, give_up_after=math.inf)
        while True:
            try:
                return await call()
            except TransportError as error:
                if not patient:
                    raise
                pause = backoff.pause(error)
                _log.warning("%s; the last topology stays", error)
                await asyncio.sleep(pause)

    def _limits(self, partitions: int) -> Any:
        limits = self._options.limits
        longest = limits.max_poll_interval
        if self._options.max_poll_interval is None:
            longest = max(longest, partitions / IDLE_POLLS_PER_SECOND)
        # A micro-batch may take, or wait for its trigger, as long as it likes.
        return replace(limits, max_poll_interval=longest, stall_timeout=_NEVER)

    async def _read(self, partition: int, cursor: str) -> Reached:
        found: asyncio.Future[Reached] = self._loop.create_future()
        with self._news:
            self._waiting[partition] = cursor, found
            self._news.notify_all()
        try:
            return await found
        finally:
            if self._waiting.get(partition, ("", None))[1] is found:
                del self._waiting[partition]

    def _told(self, what: Notification) -> None:
        known = self._known
        assert known is not None
        match what:
            case FetchEnded():
                self._requests += 1
            case PartitionStarted(partition=partition):
                known.late.pop(partition, None)
                self._unsettled = self.changed = True
            case BatchCommitted(partition=partition):
                self._uncommitted.discard(partition)
                if not self._uncommitted:
                    self._committed.set()
            case PartitionDrained(partition=partition):
                self.changed = True
                info = self._consumer.info
                if info is None:
                    return  # while it is entered: a discovery lists that end
                listed = info.partitions.get(partition)
                selects = bool(self._connection.fetch_options.selection())
                if selects or listed is None or listed.last_cursor is None:
                    known.late[partition] = time.time() + LATE_SECONDS
            case DiscoveryEnded(error=None) if self._entered:
                self._discovered()

    def _info(self) -> FeedInfo:
        info = self._consumer.info
        assert info is not None
        return info

    def _discovered(self) -> None:
        """Select what descends from the selection, and count what comes before new partitions."""
        known, info = self._known, self._info()
        assert known is not None
        known.info, self.changed = info, True
        if known.selected is not None:
            new = info.partitions.keys() - known.known
            known.selected |= descendants(info.partitions, known.selected, new)
        known.known |= info.partitions.keys()
        before: dict[int, dict[int, int]] = {}
        for id, listed in self._consumer.topology().items():
            if id not in known.depths:
                # An ancestor without an event takes no place of its own. One that waits has some,
                # which an epoch may be reading.
                ancestors = {
                    p: int(known.sequences.get(p, 0) > 0 or p in self._waiting)
                    for p in listed.cursor_from
                }
                before[id] = ancestors | dict.fromkeys(self._consumer.preceding(id), 1)
        count_before(before, known.depths)

    # ------------------------------------------------------------------ for Spark's thread

    async def _is_settling(self, *, patient: bool) -> bool:
        """Whether a partition is being asked that may have news, and is worth waiting for (R14)."""
        if not self._entered:
            return patient and not self._over
        asked = {
            one.partition
            for one in self._consumer.status().partitions.values()
            if one.state is PartitionState.READING and one.wait in _UNDER_WAY
        }
        self._slow &= asked
        if not patient:
            self._slow |= asked
        self._unsettled = bool(asked - self._slow)
        return self._unsettled

    async def _listed(self) -> list[int]:
        """Return what waits; what is not listed any more is left to the consumer."""
        if not self._entered:
            return []
        for id in self._waiting.keys() - self._info().partitions.keys():
            cursor, found = self._waiting[id]
            found.set_result(Reached(cursor))
        return [id for id, (_, found) in self._waiting.items() if not found.done()]

    async def _advance(self, results: list[FetchResult]) -> bool:
        if self._error is not None:
            raise self._error
        if any(self._waiting.get(r.partition, ("",))[0] != r.start for r in results):
            return False
        assert self._known is not None
        self._requests = 0
        self._unsettled, self._report_until = True, -math.inf
        for result in results:
            id = result.partition
            _, found = self._waiting.pop(id)
            found.set_result(Reached(result.cursor, result.more))
            self._known.sequences[id] = self._known.sequences.get(id, 0) + result.events
            if result.cursor != result.start:
                self._uncommitted.add(id)
        if self._uncommitted and not self._over:
            self._committed.clear()
            await self._committed.wait()
        return True

    async def _state(self) -> State | None:
        known = self._known
        if known is None or not self._entered:
            return None
        positions = dict(await self._store.load(self._consumer.key))
        for id, (cursor, _) in self._waiting.items():
            stored = positions.get(id)
            if cursor != (FIRST if stored is None else stored.cursor):  # behind empty pages
                positions[id] = Position.after(stored, cursor)
        late = {
            id: until
            for id, until in known.late.items()
            if id in positions and positions[id].status == "drained" and until > time.time()
        }
        return msgspec.structs.replace(
            known,
            positions=positions,
            known=set(known.known),
            sequences=dict(known.sequences),
            depths=dict(known.depths),
            late=late,
        )

    async def _reading(self) -> set[int]:
        if not self._entered or self._over:
            return set()
        statuses = self._consumer.status().partitions
        return {id for id, one in statuses.items() if one.state in _READING}

    async def _count(self) -> dict[str, Any]:
        counts = dict.fromkeys(["partitions", *_COUNTED.values()], 0)
        failing, behind = 0, list[float]()
        statuses = self._consumer.status().partitions if self._entered else {}
        listed = self._consumer.topology() if self._entered else {}
        for one in statuses.values():
            counts["partitions"] += one.partition in listed
            state = PartitionState.READING if self._hangs(one) else one.state
            if state in _COUNTED:
                counts[_COUNTED[state]] += 1
            failing += state is PartitionState.RETRYING
            if state in _READING:
                seconds = one.behind_seconds
                behind.append(math.inf if seconds is None else seconds)
        longest = round(max(behind, default=0.0), 3)
        return {
            **counts,
            "failing": failing,
            "caughtUpPartitions": counts["caughtUp"] + counts["drained"],
            "behindSeconds": None if longest == math.inf else longest,
            "requests": self._requests,
        }

    def _hangs(self, one: PartitionStatus) -> bool:
        """Whether a partition that was caught up is being asked for too long to be called so."""
        if one.state is not PartitionState.CAUGHT_UP or one.wait not in _UNDER_WAY:
            return False
        return (one.behind_seconds or 0.0) > self._consumer.limits.max_poll_interval + _PATIENCE
