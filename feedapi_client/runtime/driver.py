"""One iteration over a feed: the planner's actions carried out, workers run, batches handed over and committed.

A session starts from what the store holds and ends with its iteration; the next iteration gets a new one. That is why leaving a loop loses nothing: what
was not committed is read again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import anyio

from feedapi_client.client import FeedClient
from feedapi_client.errors import (
    CommitOrderError,
    CursorRejectedError,
    FeedError,
    FencedError,
    ProtocolError,
    RequestRefusedError,
    StoreError,
)
from feedapi_client.http.transport import backoff
from feedapi_client.lineage.planner import (
    Action,
    Fail,
    Planner,
    Rediscover,
    Report,
    Save,
    Start,
    StartAt,
    State,
    Stop,
)
from feedapi_client.model import Batch, FeedInfo, FeedKey, Position
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.runtime.buffer import Budget
from feedapi_client.runtime.discovery import Rediscovery
from feedapi_client.runtime.partition import Crowded, Outcome, SavedBatch, Worker
from feedapi_client.runtime.scheduler import Scheduler
from feedapi_client.status import ConsumerStatus, partition_status
from feedapi_client.stores.base import CursorStore

log = logging.getLogger("feedapi_client")

UNWINDING_SECONDS = 0.05
"""After which a partition is looked at again whose cancelled request is not over yet."""
SHARED_STREAM_MILLISECONDS = 5000
"""How long a streamed response lasts when more partitions want to be read than there are slots."""
FAILING_SHARE = 4
"""The part of the slots, one in so many, that partitions may take whose last request failed."""
TURN_SECONDS = 0.01
"""For so long batches that are there already are handed over before the workers get their turn."""
REPORTS_KEPT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the consumer was told."""

    key: FeedKey
    start: StartAt
    ordered: bool
    follow: bool
    on_error: Literal["raise", "park"]
    stream: bool | int
    limits: Limits
    retry: RetryPolicy


class Session:
    """Drives one planner. Its public methods are called from the iterating task, or, by `run`, from several handler tasks at once."""

    def __init__(
        self, settings: Settings, client: FeedClient, store: CursorStore, planner: Planner
    ) -> None:
        self.settings = settings
        self.client = client
        self.store = store
        self.limits = settings.limits
        self.feed = settings.key.url
        self.budget = Budget(settings.limits.max_buffered_bytes)
        self.planner = planner
        self.workers: dict[int, Worker] = {}
        self.info: FeedInfo
        self.reports: deque[str] = deque(maxlen=REPORTS_KEPT)
        self.since: dict[int, datetime] = {}
        self.failure: BaseException | None = None
        self.over = False
        self._stopping = False
        self._scheduler: Scheduler[Worker] = Scheduler(
            self._work, settings.limits.max_concurrent_fetches
        )
        self._lock = anyio.Lock()
        self._scope = anyio.CancelScope()
        self._ready: deque[Worker] = deque()
        self._wake = anyio.Event()
        self._unwound = anyio.Event()
        self._released: set[Worker] = set()
        self._refused: set[Worker] = set()
        self._at_end: set[int] = set()
        self._failing = 0
        self._applying = 0
        self._turn_ends = 0.0
        self._rediscovery = Rediscovery(settings.limits.discovery_interval, settings.retry)

    def __repr__(self) -> str:
        return f"<Session {self.planner!r} {self._scheduler!r} {self.budget!r}>"

    # ------------------------------------------------------------------ life

    async def open(self) -> None:
        """Load the positions, discover, and save the birth positions of an empty store. Raises what these raise."""
        self.planner.load(await self._load())
        self.info, ends = await self._birth()
        await self._apply(self.planner.discover(self.info, ends=ends))
        self._rediscovery.done()
        if self.failure is not None:
            raise self.failure

    async def _birth(self) -> tuple[FeedInfo, dict[int, str]]:
        """The first discovery, and the present ends of partitions that an empty store may need; anew when the feed changes between the two."""
        attempt = 1
        while True:
            info = await self.client.discover()
            try:
                return info, await self._present_ends(self.planner.unresolved(info))
            except RequestRefusedError:
                if attempt == self.limits.max_attempts_without_progress:
                    raise
                attempt += 1

    async def run(self) -> None:
        """Fetch and discover until the iteration ends. Never raises: a failure goes to the iterating task."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._scheduler.run)
                    tasks.start_soon(
                        self._rediscovery.run,
                        self._discover,
                        self._blocked,
                        partial(self.report, None),
                    )
        except* Exception as error:  # noqa: BLE001 - handed to the iterating task, which raises it; a cancellation beside it goes on
            self._fail(_only(error))
        finally:
            self._unwound.set()

    async def aclose(self) -> None:
        """End the session and wait until a save under way is through: whoever loads the positions next would be fenced by it."""
        self.close()
        await self._unwound.wait()

    def close(self) -> None:
        """End the session: nothing is fetched or committed any more."""
        self.over = True
        self._scope.cancel()
        self._wake.set()

    def stop(self) -> None:
        """End the iteration after the batch that is in the application's hands."""
        self._stopping = True
        self._wake.set()

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self._wake.set()

    # ------------------------------------------------------------------ towards the application

    async def next(self) -> Batch | None:
        """The next batch of any partition that has none in the application's hands; None at the end. Raises the session's failure."""
        # Not each time: with many partitions the workers would get far ahead of the application, and ask for pages that can wait.
        if anyio.current_time() >= self._turn_ends:
            await anyio.lowlevel.checkpoint()
            self._turn_ends = anyio.current_time() + TURN_SECONDS
        else:
            await anyio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self.failure is not None:
                raise self.failure
            await self._acknowledge()
            if self._stopping or self.over:
                return None
            while self._ready:
                worker = self._ready.popleft()
                worker.queued = False
                # The planner may have stopped it already, and the action still waits for another one's save.
                if (
                    worker.pending
                    and not worker.in_hand
                    and not worker.stopped
                    and self.planner.entries[worker.partition].running
                ):
                    return await self._take(worker)
            if not self.settings.follow and self._finished():
                return None
            self._wake = anyio.Event()
            await self._wake.wait()

    async def _take(self, worker: Worker) -> Batch:
        events, cursor = worker.take()
        self.planner.delivered(worker.partition)
        batch = Batch(
            worker.partition, events, cursor, partial(self.commit, worker, worker.batches)
        )
        if worker.end is not None and not worker.pending:
            await self._ended(worker)
        self._resume(worker)
        return batch

    async def release(self, partition: int) -> None:
        """The application asks for the next batch: what it committed of this one counts from now on (R5)."""
        worker = self.workers[partition]
        worker.in_hand = False
        self._released.add(worker)
        if worker.pending:
            self.deliverable(worker)
        if self.failure is None:
            await self._acknowledge()

    async def settle(self, batch: Batch) -> None:
        """A handler has returned: commit what it did not commit itself, and go on."""
        worker = self.workers[batch.partition]
        if not worker.saves:
            await batch.commit()
        await self.release(batch.partition)

    async def _acknowledge(self) -> None:
        while self._released:
            worker = self._released.pop()
            if worker.in_hand:
                continue
            position = worker.saves[-1].position if worker.saves else None
            if worker.saves:
                worker.committed = worker.saves[-1].number
                worker.saves.clear()
            await self._apply(self.planner.released(worker.partition, position))
            self._wake.set()

    async def commit(self, worker: Worker, number: int, batch: Batch, transaction: Any) -> None:
        """Save the batch's cursor; see `Batch.commit`."""
        if self.over:
            raise self._out_of_order(
                batch,
                "its iteration has ended, and what was not committed is read again by the next one",
            )
        if number <= worker.committed or (worker.saves and worker.saves[-1].number > number):
            if worker.saves and worker.saves[-1].number == number:
                return
            raise self._out_of_order(batch, "a later batch of the partition was committed before")
        if self.planner.entries[batch.partition].state is State.SUPERSEDED:
            raise self._out_of_order(
                batch,
                "the partition was split, and its heirs went on from the last committed cursor",
            )
        if transaction is None and any(
            save.number == number and save.durable for save in worker.saves
        ):
            return
        earlier = [save for save in worker.saves if save.number < number]
        position = self.planner.checkpoint(
            batch.partition, batch.cursor, after=earlier[-1].position if earlier else None
        )
        late = not worker.in_hand
        if late:
            self.planner.hold(batch.partition)
        try:
            await self._save({batch.partition: position}, transaction)
            worker.saves = [*earlier, SavedBatch(number, position, transaction is None)]
        except FencedError as error:
            self._fail(
                error
            )  # whatever the application makes of it, this consumer has been replaced (R17)
            raise
        finally:
            if late:
                self._released.add(worker)
                self._wake.set()

    def _out_of_order(self, batch: Batch, why: str) -> CommitOrderError:
        return CommitOrderError(
            f"a batch up to cursor {batch.cursor!r} can't be committed: {why}",
            feed=self.feed,
            partition=batch.partition,
        )

    def _finished(self) -> bool:
        if self._rediscovery.wanted or self._applying:
            return False
        if self.planner.finished():
            return True
        reading = (
            [e.id for e in self.planner.entries.values() if e.state is State.READING]
            if self._at_end
            else []
        )
        if (
            not reading
            or not self._at_end.issuperset(reading)
            or any(self.workers[p].in_hand for p in reading)
        ):
            return False
        # All was read, but the application did not commit the end of some closed partitions.
        waiting = [
            e.id
            for e in self.planner.entries.values()
            if e.state is State.WAITING and set(e.waits_for) & self._at_end
        ]
        if waiting:
            raise CommitOrderError(
                f"partition {waiting[0]} waits until the last batch of this one is committed, and it was not: await batch.commit() before asking for the next",
                feed=self.feed,
                partition=reading[0],
            )
        return True

    # ------------------------------------------------------------------ the workers' driver

    def is_closed(self, partition: int) -> bool:
        """The last discovery said closed."""
        return self.planner.is_closed(partition)

    def slots_wanted(self) -> bool:
        """Other partitions are due and have no slot."""
        return self._scheduler.contended

    def stream_for(self, worker: Worker) -> bool | int:
        """Long responses for open partitions; the end of a closed one, and of all without `follow`, shows only in a complete response."""
        stream = self.settings.stream
        if (
            not stream
            or not self.settings.follow
            or not self.info.stream
            or self.is_closed(worker.partition)
        ):
            return False
        if len(self.workers) <= self.limits.max_concurrent_fetches:
            return stream
        return (
            SHARED_STREAM_MILLISECONDS
            if stream is True
            else min(stream, SHARED_STREAM_MILLISECONDS)
        )

    def deliverable(self, worker: Worker) -> None:
        """The worker holds something for the application."""
        if not worker.queued and not worker.in_hand:
            worker.queued = True
            self._ready.append(worker)
            self._wake.set()

    def report(self, partition: int | None, text: str) -> None:
        """Tell the operator: in the log, and in `status()`."""
        line = f"feed {self.feed}{'' if partition is None else f', partition {partition}'}: {text}"
        self.reports.append(line)
        log.warning("%s", line)

    def unknown_command(self) -> None:
        """Perhaps "list the partitions again" (R10)."""
        self._rediscovery.perhaps()

    # ------------------------------------------------------------------ fetching

    async def _work(self, worker: Worker) -> None:
        if worker.stopped:
            return
        cancelled = worker.scope is not None  # and not yet unwound
        # Partitions whose requests hang until they time out must not take all slots from those that answer (R14).
        failing = worker.failures > 0
        if cancelled or (
            failing and self._failing >= max(1, self.limits.max_concurrent_fetches // FAILING_SHARE)
        ):
            self._scheduler.schedule(worker, UNWINDING_SECONDS)
            return
        self._failing += failing
        try:
            await self._fetch(worker)
        finally:
            self._failing -= failing

    async def _fetch(self, worker: Worker) -> None:
        with anyio.CancelScope() as worker.scope:
            asked = worker.read_cursor
            try:
                outcome = await worker.fetch()
            except Crowded:
                worker.scope = None
                if not worker.pending:
                    self._scheduler.schedule(worker, self.limits.poll_interval)
            except FeedError as error:
                worker.scope = None
                await self._on_error(worker, error, progressed=worker.read_cursor != asked)
            else:
                worker.scope = None
                self._recovered(worker)
                await self._after(worker, outcome)
        worker.scope = None

    def _recovered(self, worker: Worker) -> None:
        worker.failures, worker.refusals, worker.failing_since = 0, 0, None
        if worker.error is not None:
            worker.error = None
            self.since.pop(worker.partition, None)

    async def _after(self, worker: Worker, outcome: Outcome) -> None:
        if worker.stopped:
            return
        if outcome is Outcome.STUCK:
            self._scheduler.schedule(worker, backoff(self.settings.retry, worker.stuck, None))
        elif outcome is Outcome.PROGRESS:
            self.planner.progressed(worker.partition)
            worker.poll_delay = self.limits.poll_interval
            self._resume(worker)
        elif outcome is Outcome.IDLE:
            self._resume(worker)
        elif not worker.pending:
            await self._ended(worker)

    def _resume(self, worker: Worker) -> None:
        """Fetch on, unless enough is waiting for the application or the end was seen."""
        if (
            not worker.idle
            or worker.stopped
            or worker.end is not None
            or worker in self._refused
            or worker.error is not None
        ):
            return
        if worker.pending_bytes < self.limits.max_batch_bytes:
            # Cursors that move on every request, without an event, would otherwise be a busy loop.
            self._scheduler.schedule(
                worker,
                self.limits.poll_interval
                if worker.empty_pages > self.limits.max_attempts_without_progress
                else 0.0,
            )

    async def _ended(self, worker: Worker) -> None:
        """The end was seen and all before it delivered: it travels behind the last batch, so that it can't overtake one."""
        assert worker.end is not None
        (cursor, asked_closed), worker.end = worker.end, None
        await self._apply(self.planner.ended(worker.partition, cursor, asked_closed=asked_closed))
        entry = self.planner.entries[worker.partition]
        if entry.state is State.CAUGHT_UP and self.settings.follow:
            self._scheduler.schedule(worker, worker.poll_delay)
            if not worker.streamed:  # a stream has done the waiting itself
                worker.poll_delay = max(
                    worker.poll_delay, min(worker.poll_delay * 2, self.limits.max_poll_interval)
                )
        elif entry.state is State.READING and entry.end is not None:
            self._at_end.add(worker.partition)  # drained once the application commits
            worker.end = (cursor, asked_closed)
        elif entry.state is State.READING:
            self._scheduler.schedule(worker)
        self._wake.set()

    # ------------------------------------------------------------------ errors

    async def _on_error(self, worker: Worker, error: FeedError, *, progressed: bool) -> None:
        if worker.stopped:
            return
        if progressed:
            self._recovered(worker)
        now = anyio.current_time()
        if worker.failing_since is None:
            worker.failing_since = now
            self.since[worker.partition] = datetime.now(UTC)
        worker.error = error
        if isinstance(error, RequestRefusedError):
            await self._on_refusal(worker, error)
            return
        retry = self.settings.retry
        given_up = (
            retry.give_up_after is not None and now - worker.failing_since >= retry.give_up_after
        )
        if retry.decide(error) == "fatal" or given_up:
            await self._fail_partition(worker.partition, error)
            return
        worker.failures += 1
        delay = backoff(retry, worker.failures, error)
        log.warning("%s; attempt %d in %.1f s", error, worker.failures + 1, delay)
        self._scheduler.schedule(worker, delay)

    async def _on_refusal(self, worker: Worker, error: RequestRefusedError) -> None:
        """400, 404, 409, 410: discover again, then ask again (R10)."""
        if worker.asked_info is not self.info:
            worker.error = None
            self._scheduler.schedule(worker)
            return
        worker.refusals += 1
        conflict = error.status == 409
        asked_as = (self.info.dialect, self.info.token)
        # A feed that changed between the two refusals explains them both, for a while.
        again, worker.refused_as = not conflict and worker.refused_as == asked_as, asked_as
        if worker.refusals >= (2 if again else self.limits.max_attempts_without_progress):
            final: FeedError = (
                ProtocolError(
                    f"409 Conflict again, {worker.refusals} times, each with the token of a new discovery",
                    feed=self.feed,
                    partition=worker.partition,
                )
                if conflict
                else CursorRejectedError(
                    f"the partition is listed and refuses the cursor {worker.read_cursor!r} with {error.status}: {error.message}. "
                    "Reset its cursor if the publisher no longer has that place",
                    feed=self.feed,
                    partition=worker.partition,
                )
            )
            final.__cause__ = error
            await self._fail_partition(worker.partition, final)
            return
        self._refused.add(worker)
        self._rediscovery.soon()

    async def _fail_partition(self, partition: int, error: FeedError) -> None:
        self.since.setdefault(partition, datetime.now(UTC))
        await self._apply([*self.planner.fail(partition, error), Fail(partition, error)])

    # ------------------------------------------------------------------ discovery

    async def _discover(self) -> None:
        # Those refused from here on need a discovery that begins later: this one may bring what was true before.
        refused, self._refused = self._refused, set()
        try:
            info = await self.client.discover()
            actions = self.planner.discover(info)
        except FeedError:
            self._refused |= refused
            raise
        moved = info.token != self.info.token or info.dialect != self.info.dialect
        self.info = info
        self._rediscovery.done()
        await self._apply(actions)
        for worker in refused:
            if not worker.stopped:
                self._scheduler.schedule(
                    worker,
                    backoff(self.settings.retry, worker.refusals - 1, None)
                    if worker.refusals > 1
                    else 0.0,
                )
        self._reopen_streams(moved)
        self._wake.set()

    def _reopen_streams(self, moved: bool) -> None:
        """Responses held open on an old token, or on a partition that was closed, would not end by themselves."""
        for worker in self.workers.values() if self.settings.stream else ():
            if (
                worker.streamed
                and worker.scope is not None
                and not worker.stopped
                and (moved or self.is_closed(worker.partition))
            ):
                worker.scope.cancel()
                self._scheduler.schedule(worker)

    def _blocked(self) -> bool:
        """Something can't go on without a new discovery."""
        return bool(self._refused) or (not self.settings.follow and self.planner.finished())

    async def _present_ends(self, partitions: list[int]) -> dict[int, str]:
        ends: dict[int, str] = {}
        limiter = anyio.CapacityLimiter(self.limits.max_concurrent_fetches)

        async def ask(partition: int) -> None:
            async with limiter:
                ends[partition] = await self.client.end_of(partition)

        try:
            async with anyio.create_task_group() as tasks:
                for partition in partitions:
                    tasks.start_soon(ask, partition)
        except BaseExceptionGroup as error:
            raise _only(error) from None
        return ends

    # ------------------------------------------------------------------ the planner's actions

    async def _apply(self, actions: list[Action]) -> None:
        """Carry out in order; several callers take turns, so that saves reach the store in the planner's order."""
        if not actions:
            return
        self._applying += (
            1  # the planner is ahead of what has been done: the iteration must not end in between
        )
        try:
            async with self._lock:
                for action in actions:
                    if isinstance(action, Save):
                        await self._save(action.positions, None)
                    else:
                        self._carry_out(action)
        finally:
            self._applying -= 1
            self._wake.set()

    def _carry_out(self, action: Start | Stop | Rediscover | Report | Fail | Save) -> None:
        match action:
            case Start(partition, cursor):
                self._start(partition, cursor)
            case Stop(partition):
                if partition in self.workers:
                    self.workers[partition].stop()
                    self._refused.discard(self.workers[partition])
                    self._at_end.discard(partition)
            case Rediscover():
                self._rediscovery.soon()
            case Report(partition_or_none, text):
                self.report(partition_or_none, text)
            case Fail(partition, error):
                self.since.setdefault(partition, datetime.now(UTC))
                if self.settings.on_error == "raise":
                    self._fail(error)
                else:
                    self.report(None, f"parked: {error}")
                    self._wake.set()

    def _start(self, partition: int, cursor: str) -> None:
        worker = self.workers.get(partition)
        if worker is None:
            worker = self.workers[partition] = Worker(partition, cursor, self)
        if worker.stopped:
            worker.stopped = False
            worker.error = None
            self._scheduler.schedule(worker)
        elif worker.scope is None and not worker.pending:
            worker.end = None
            self._scheduler.schedule(worker)

    async def _load(self) -> dict[int, Position]:
        positions: dict[int, Position] = await _translated(
            self.store.load(self.settings.key), self.feed, "loading cursors"
        )
        return positions

    async def _save(self, positions: Mapping[int, Position], transaction: Any) -> None:
        with anyio.move_on_after(self.limits.commit_timeout, shield=True) as scope:
            await _translated(
                self.store.save(self.settings.key, positions, transaction=transaction),
                self.feed,
                "saving cursors",
            )
        if scope.cancelled_caught:
            raise StoreError(
                f"saving cursors took longer than Limits.commit_timeout, {self.limits.commit_timeout} s",
                feed=self.feed,
            )

    # ------------------------------------------------------------------ for people

    def status(self) -> ConsumerStatus:
        """A snapshot."""
        info: FeedInfo | None = getattr(self, "info", None)
        return ConsumerStatus(
            feed=self.feed,
            dialect=info.dialect if info else None,
            buffered_bytes=self.budget.used,
            partitions={
                p: partition_status(self.planner.entries[p], self.workers.get(p), self._since(p))
                for p in sorted(self.planner.entries)
            },
            reports=tuple(self.reports),
        )

    def _since(self, partition: int) -> datetime | None:
        """Since when the partition retries or is parked: what descends from one that failed, since that one did."""
        error = self.planner.entries[partition].error
        return self.since.get(partition) or (
            self.since.get(error.partition) if error and error.partition is not None else None
        )


async def _translated(call: Awaitable[Any], feed: str, doing: str) -> Any:
    try:
        return await call
    except FeedError:
        raise
    except Exception as error:
        raise StoreError(f"{doing} failed: {type(error).__name__}", feed=feed) from error


def _only(error: BaseException) -> BaseException:
    """The first failure of a task group, without the group around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
