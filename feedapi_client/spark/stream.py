"""``spark.readStream.format("feedapi")``: exactly once by first fetch wins.

Each task of an epoch is fetched once. The first attempt that stages its events decides what the
epoch holds; all others, whether concurrent or later, read that object.
"""

from __future__ import annotations

import gc
import logging
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from feedapi_client.errors import CursorRejectedError, LineageError
from feedapi_client.model import FIRST, FeedInfo, FeedKey, Position, Status
from feedapi_client.spark.epoch import (
    EpochPlan,
    FetchTask,
    State,
    decode,
    encode,
    split_into_groups,
)
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.feed_watch import FeedWatch
from feedapi_client.spark.fetch import FetchResult, Target, fetch, fix_ends
from feedapi_client.spark.schema import StagedEvents, staged_rows
from feedapi_client.spark.source_options import SourceOptions
from feedapi_client.spark.staging import (
    Fence,
    MissingObjectError,
    Objects,
    StagingError,
    harmless,
    pack,
)

_log = logging.getLogger(__name__)

Offset = dict[str, Any]

_FETCH_THREADS = 8
_HEAD_READERS = 16
_PAUSE = 0.2
"""Seconds that a trigger waits for news. Without a pause, Spark triggers about 100 times a second,
and each one is a call into this process."""
_LEAST_SHARE = 100
"""Events of a partition in an epoch of ``maxEventsPerTrigger``: only whole batches are read."""
_LEAST_BYTES = 64 * 1024
"""The same for ``maxBytesPerTrigger``: a batch is what one chunk of a response brings."""


class Epoch(NamedTuple):
    """A micro-batch: the run id of the query, and its number from 0. -1: before the first."""

    run: str
    number: int

    @classmethod
    def of(cls, offset: Offset) -> Epoch:
        return cls(offset["run"], int(offset["epoch"]))

    def offset(self) -> Offset:
        return {"run": self.run, "epoch": self.number}

    def next(self) -> Epoch:
        return Epoch(self.run or uuid.uuid4().hex, self.number + 1)


_BEFORE_FIRST = Epoch("", -1)


@dataclass
class AvailableNow:
    """`ends` are fixed when a partition first had news; `reached` was read to its end."""

    deadline: float
    ends: dict[int, str | None] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)


class StreamPartition(InputPartition):
    def __init__(self, run: str, task: FetchTask) -> None:
        self.run = run
        self.task = task

    def __repr__(self) -> str:
        task = self.task
        return f"StreamPartition(run={self.run}, epoch={task.epoch}, task={task.number})"


class FeedStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of one streaming query.

    An offset is ``{"run", "epoch"}``. Its plan, which says what the epoch reads, is staged before
    Spark sees the offset.

    All methods but `read` run in one process on the driver, one at a time. `read` runs on
    executors, in any number of attempts.
    """

    def __init__(self, options: SourceOptions, location: str) -> None:
        self.options = options
        self.location = location
        self._connection: FeedConnection | None = None
        self._watch: FeedWatch | None = None
        self._current = _BEFORE_FIRST  # the epoch that was planned or restored last
        self._added = False  # whether the watch has the results of that epoch
        self._planned_here = False
        self._plans: dict[Epoch, EpochPlan] = {}
        self._available_now: AvailableNow | None = None
        self._fence: Fence | None = None
        self._deleted = -1  # the epoch up to which this driver deleted all
        self._objects_of: Objects | None = None

    # ------------------------------------------------------------------ on the driver

    def initialOffset(self) -> Offset:  # noqa: N802
        """Spark calls this twice. The run id is therefore made by `latestOffset`."""
        if self.options.resume_run is not None:
            return Epoch(self.options.resume_run, 0).offset()
        return _BEFORE_FIRST.offset()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self.options.max_events_per_partition)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._available_now = AvailableNow(time.monotonic() + self.options.available_now_timeout)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Plan the epoch after `start`, stage the plan and return the epoch's offset.

        That is `start` itself when there is nothing new. Raises `FeedError`, and of these
        `FencedError` when a later run took the place of this one.
        """
        last = Epoch.of(start)
        if self._is_planned_after(last):
            return self._current.offset()
        if last.run:
            self._claim(last.run, self._plan(last).driver)
        restarted = last not in (self._current, _BEFORE_FIRST)
        epoch = last.next()
        objects = self._objects(epoch.run)
        if restarted and objects.exists(objects.plan_key(epoch.number)):
            return self._take_up(epoch)  # an earlier driver planned it and died
        state, partitions = self._next(last)
        if state is None:
            self._current = last
            return start
        fence = self._claim(epoch.run, 0)
        fence.check()
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        plan = self._make_plan(state, partitions, most, fence.number)
        if not objects.create(objects.plan_key(epoch.number), encode(plan)):
            return self._take_up(epoch)
        self._plans[epoch] = plan
        self._current, self._added, self._planned_here = epoch, False, True
        return epoch.offset()

    def _take_up(self, epoch: Epoch) -> Offset:
        self._let_go()
        self._current, self._added, self._planned_here = epoch, False, False
        return epoch.offset()

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        if self._watch is None or self._connection is None:
            return None
        feed = self._connection.url
        return {**self._current.offset(), "feed": feed, **self._watch.report()}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        last = Epoch.of(end)
        if last != _BEFORE_FIRST:
            self._claim(last.run, self._plan(last).driver)
        found: list[InputPartition] = []
        for number in range(Epoch.of(start).number + 1, last.number + 1):
            tasks = self._tasks(Epoch(last.run, number))
            found += [StreamPartition(last.run, task) for task in tasks]
        return found

    def _tasks(self, epoch: Epoch) -> Iterator[FetchTask]:
        plan = self._plan(epoch)
        fetch = self._connect(plan).fetch_options
        for group in range(len(plan.groups)):
            yield plan.task(epoch.number, group, fetch)

    def commit(self, end: Offset) -> None:
        """Delete the epochs before `end`, whose plan still says where to continue."""
        epoch = Epoch.of(end)
        with harmless("old epochs were not deleted, a later run tries again"):
            for number in range(epoch.number - 1, self._deleted, -1):
                if not self._delete(Epoch(epoch.run, number)):
                    break  # an earlier driver deleted this one and those before
            self._deleted = epoch.number - 1
        self._plans = {
            planned: plan for planned, plan in self._plans.items() if planned.number >= epoch.number
        }

    def _delete(self, epoch: Epoch) -> bool:
        """Delete an epoch, its plan last, which says what else there is. Was it there?"""
        objects = self._objects(epoch.run)
        try:
            plan = self._plan(epoch)
        except MissingObjectError:
            return False
        for group in range(len(plan.groups)):
            objects.delete(objects.data_key(epoch.number, group))
        objects.delete(objects.plan_key(epoch.number))
        return True

    def stop(self) -> None:
        """Give the connection back. Spark calls it on some ways that a query ends, not on all."""
        self._let_go()
        self._connection = None

    def _claim(self, run: str, after: int) -> Fence:
        if self._fence is None:
            self._fence = Fence.claim(self._objects(run), after)
        return self._fence

    # ------------------------------------------------------------------ on executors

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, StreamPartition):
            return
        _freeze_imported_objects()
        objects, task = self._objects(partition.run), partition.task
        staged = fetch_once(self.options, objects, task)
        yield from staged_rows(staged, objects.data_key(task.epoch, task.number))

    # ------------------------------------------------------------------ the watch and its epoch

    def _is_planned_after(self, last: Epoch) -> bool:
        current = self._current
        return current.number == last.number + 1 and last.run in ("", current.run)

    def _next(self, last: Epoch) -> tuple[State | None, list[int]]:
        """Return the state to plan the next epoch from, if there is anything, and what it reads."""
        trigger = self._available_now
        while trigger is None or time.monotonic() < trigger.deadline:
            try:
                watch = self._watch_after(last)
                ready = watch.ready(_PAUSE)
            except CursorRejectedError as error:
                self._read_anew(last, error)
                continue
            except Exception:
                self._let_go()
                raise
            if not ready and not watch.changed and trigger is None:
                return None, []
            state = watch.state()
            if state is not None and state.selected != watch.selected:
                self._watching(state)
                continue
            if trigger is not None and state is not None:
                ready = self._before_ends(trigger, state, ready)
            partitions = [p for p in ready if state is not None and p in state.info.partitions]
            unsaved = state is not None and self._is_unsaved(state, last)
            if partitions or unsaved:
                return state, partitions
            if trigger is None or self._is_done(trigger, watch):
                return None, []
            time.sleep(_PAUSE / 10)  # what is ready is at its end
        url = self._connect().url
        _log.warning("feed %s: availableNowTimeout is over, the rest is for the next run", url)
        return None, []

    def _before_ends(self, trigger: AvailableNow, state: State, ready: list[int]) -> list[int]:
        """Return what of the partitions is not at its fixed end, which is fixed now at the latest.

        Raises `FeedError`.
        """
        new = [p for p in ready if p not in trigger.ends and p not in trigger.reached]
        # What the query has connected with may be older than the partitions, and than their token.
        fetch = self._connect().fetch_options
        ends = fix_ends(FeedConnection(self.options, fetch, state.info), new) if new else {}
        trigger.ends |= ends
        at = {p: position.cursor for p, position in state.positions.items()}
        trigger.reached |= {p for p, end in ends.items() if end is not None and end == at.get(p)}
        return [p for p in ready if p not in trigger.reached]

    def _is_done(self, trigger: AvailableNow, watch: FeedWatch) -> bool:
        if watch.over:
            return True
        return bool(trigger.reached) and watch.reading() <= trigger.reached

    def _is_unsaved(self, state: State, last: Epoch) -> bool:
        if last == _BEFORE_FIRST:
            # The first event is found again, the present end is not.
            at_end = self.options.starting_cursors != "first" and bool(state.positions)
            return at_end or state.selected != self.options.partitions
        plan = self._plan(last)
        # What descends from a selected partition over one that is gone is found by no later run.
        selects = state.selected is not None and state.selected != plan.selected
        return selects or plan.feed != key_of(self._connect()) or state.is_unsaved(plan.positions)

    def _watch_after(self, last: Epoch) -> FeedWatch:
        if self._watch is None or self._current != last:
            return self._restore(last)
        if not self._added:
            if not self._watch.advance(self._results(last)):
                return self._restore(last)
            self._added = True
        return self._watch

    def _restore(self, last: Epoch, lost: int | None = None) -> FeedWatch:
        state = None
        if last != _BEFORE_FIRST:
            plan = self._plan(last)
            connection = self._connect(plan)
            if plan.feed not in (key_of(connection), key_of(connection, named=False)):
                raise LineageError(
                    "the checkpoint of this query belongs to another feed, or to another selection "
                    "of events (filter.NAME, eventTypes, skipEventTypes), whose cursors are not "
                    "valid here. A feed that moves goes on if option feedName named it before. "
                    "Start a new query with a checkpoint location of its own",
                    feed=connection.url,
                )
            state = plan.state(self.options)
            state.add(self._results(last))
            if lost is not None:
                state.positions[lost] = Position(FIRST)
        self._current, self._added = last, True
        return self._watching(state)

    def _watching(self, state: State | None) -> FeedWatch:
        self._let_go()
        follow = self._available_now is None
        watch = FeedWatch(self.options, self._connect(), state, follow=follow)
        weakref.finalize(self, watch.close)  # who forgets this object ends the thread
        self._watch = watch
        return watch

    def _read_anew(self, last: Epoch, error: CursorRejectedError) -> FeedWatch:
        """Begin a partition anew whose cursor is refused, where data may be lost. Or raise."""
        self._let_go()
        if self.options.fail_on_data_loss or error.partition is None:
            raise error
        _log.warning("%s. It is read from the first event that is left on", error)
        return self._restore(last, lost=error.partition)

    def _let_go(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _make_plan(
        self, state: State, ready: list[int], limit: int | None, driver: int
    ) -> EpochPlan:
        options = self.options
        limits = (
            (options.max_events_per_trigger, _LEAST_SHARE),
            (options.max_bytes_per_trigger, _LEAST_BYTES),
        )
        counts = [max(1, most // least) for most, least in limits if most is not None]
        partitions = sorted(ready[: min(counts, default=None)])
        bounds = (_share(options.max_events_per_trigger, partitions), limit)
        ends = {} if self._available_now is None else self._available_now.ends
        return EpochPlan(
            **msgspec.structs.asdict(state),
            feed=key_of(self._connect()),
            name=self._connect().url,
            groups=split_into_groups(partitions, options.max_partitions_per_task),
            limit=min((bound for bound in bounds if bound is not None), default=None),
            max_bytes=_share(options.max_bytes_per_trigger, partitions),
            chosen=options.partitions,
            ends={p: end for p in partitions if (end := ends.get(p)) is not None},
            driver=driver,
        )

    def _results(self, epoch: Epoch) -> list[FetchResult]:
        """A task without an object was not read by the sink: an empty one is staged for it."""
        groups = range(len(self._plan(epoch).groups))
        with ThreadPoolExecutor(min(_HEAD_READERS, len(groups) or 1)) as pool:
            heads = list(pool.map(partial(_head, self._objects(epoch.run), epoch.number), groups))
        results = [result for head in heads for result in head]
        if self._available_now is not None and self._planned_here:
            self._available_now.reached |= {r.partition for r in results if r.reached}
        return results

    def _plan(self, epoch: Epoch) -> EpochPlan:
        if epoch not in self._plans:
            objects = self._objects(epoch.run)
            key = objects.plan_key(epoch.number)
            try:
                self._plans[epoch] = decode(objects.get(key), key)
            except MissingObjectError:
                raise _gone(epoch.number) from None
        return self._plans[epoch]

    def _connect(self, plan: EpochPlan | None = None) -> FeedConnection:
        """Return the connection. With a plan the feed need not answer: other sources go on."""
        if self._connection is None:
            self._connection = FeedConnection(self.options)
        if plan is not None:
            self._connection.restore(plan.info)
        return self._connection

    def _objects(self, run: str) -> Objects:
        """Return the objects of the run. To open a location anew takes some 20 ms in S3."""
        if self._objects_of is None or self._objects_of.run != run:
            self._objects_of = Objects(self.location, run)
        return self._objects_of


def key_of(connection: FeedConnection, *, named: bool = True) -> str:
    options, selection = connection.options, connection.fetch_options.selection()
    if named and options.feed_name is not None:
        return FeedKey.named(options.feed_name, "spark", selection).id
    return FeedKey(options.url, "spark", selection).id


def _share(most: int | None, partitions: Sequence[int]) -> int | None:
    return max(1, most // len(partitions)) if most is not None and partitions else None


class ReadSoFar(NamedTuple):
    """How far a partition was read by another query, as its rows tell."""

    cursor: str
    events: int
    depth: int


def seed(
    options: SourceOptions, location: str, read: Mapping[int, ReadSoFar], run: str | None = None
) -> str:
    """Stage a plan that a new query goes on from, and return its run: option ``resumeRun``.

    Arguments:
        read: what was read of each partition, by number. Others begin where R7 says.
        run: to be given to it, by default a random one. No other may have it.

    Raises:
        FeedError: the feed does not answer, or the location failed.
    """
    connection = FeedConnection(options)
    info = connection.discover()
    parents = {p.starts_after for p in info.partitions.values() if p.starts_after is not None}
    gone = sorted((read.keys() | parents) - info.partitions.keys())
    if gone:
        _log.warning(
            "feed %s: partitions %s are not listed any more, and are taken as read to their ends",
            connection.url,
            ", ".join(map(str, gone)),
        )
    statuses: dict[int, Status] = dict.fromkeys(gone, "drained")
    statuses |= dict.fromkeys(_superseded(info, read), "superseded")
    positions = {id: Position(FIRST, "drained") for id in gone}  # some had no event
    positions |= {id: Position(one.cursor, statuses.get(id, "open")) for id, one in read.items()}
    selected = options.partitions
    if selected is not None:
        selected = selected.union(read.keys() - info.partitions.keys())
    plan = EpochPlan(
        feed=key_of(connection),
        name=connection.url,
        info=info,
        positions=positions,
        sequences={partition: one.events for partition, one in read.items()},
        depths={partition: one.depth for partition, one in read.items()},
        # What descends from those was read, too, and is found anew: nothing is `known`.
        selected=selected,
        groups=[],
        limit=None,
        chosen=options.partitions,
    )
    objects = Objects(location, run or uuid.uuid4().hex)
    objects.create(objects.plan_key(0), encode(plan))
    return objects.run


def _superseded(info: FeedInfo, read: Mapping[int, ReadSoFar]) -> set[int]:
    """Return the ancestors whose cursor another partition took over before it was read (R9)."""
    found: set[int] = set()
    for listed in info.partitions.values():
        ancestors = [p for p in listed.cursor_from if p in read]
        if listed.id in read:
            found.update(ancestors)
        # Parents are named first. One that took over a cursor is deeper than where it was read.
        deepest = -1
        for id in ancestors:
            if read[id].depth < deepest:
                found.add(id)
            deepest = max(deepest, read[id].depth)
    return found


def _gone(epoch: int) -> MissingObjectError:
    return MissingObjectError(
        f"the plan of epoch {epoch} is gone from the staging location: without it this micro-batch "
        "can't be repeated. Was stagingLocation changed, or cleaned by hand? Give the query the "
        "location that it ran with"
    )


def _head(objects: Objects, epoch: int, group: int) -> list[FetchResult]:
    key = objects.data_key(epoch, group)
    try:
        return objects.head(key)
    except MissingObjectError:
        if not objects.exists(objects.plan_key(epoch)):
            raise _gone(epoch) from None
        objects.create(key, pack([]))  # so that a late attempt of the task stages nothing
        return objects.head(key)


# ---------------------------------------------------------------------- tasks


def fetch_once(options: SourceOptions, objects: Objects, task: FetchTask) -> bytes:
    """Return the staged object of the task, fetching and staging it when there is none yet."""
    key = objects.data_key(task.epoch, task.number)
    with suppress(MissingObjectError):
        return objects.get(key)
    if not objects.exists(objects.plan_key(task.epoch)):
        raise StagingError(
            f"the plan of epoch {task.epoch} is not at the staging location, seen from this "
            "executor: either the location is not shared by driver and executors (set option "
            "stagingLocation to an object store or a shared file system), or the epoch was "
            "finished and this task is late"
        )
    staged = fetch_task(options, task)
    return staged if objects.create(key, staged) else objects.get(key)


def fetch_task(options: SourceOptions, task: FetchTask) -> bytes:
    limits, v1 = options.limits, task.info.dialect == "v1"
    fetched = [StagedEvents(headers=v1, batch_bytes=limits.max_batch_bytes) for _ in task.targets]

    def full() -> bool:
        return sum(one.size for one in fetched) > limits.max_buffered_bytes

    def read(target: Target, into: StagedEvents) -> FetchResult:
        def enough() -> bool:
            return full() or (task.max_bytes is not None and into.bytes >= task.max_bytes)

        return fetch(connection, target, limit=task.limit, full=enough, receive=into.add)

    connection = FeedConnection(options, task.fetch, task.info)
    if len(fetched) == 1:
        results = [read(task.targets[0], fetched[0])]
    else:
        threads = min(_FETCH_THREADS, limits.max_concurrent_fetches, len(fetched))
        with ThreadPoolExecutor(threads, thread_name_prefix="feedapi-fetch") as pool:
            results = list(pool.map(read, task.targets, fetched))
    of = zip(results, task.targets, fetched, strict=True)
    head = [
        {
            **asdict(result),
            "sequence": target.sequence,
            "depth": target.depth,
            "checkpoints": events.checkpoints,
        }
        for result, target, events in of
    ]
    return pack(head, [events.finish() for events in fetched])


@cache
def _freeze_imported_objects() -> None:
    """Make the garbage collection between the tasks of a Python worker cheap. May be deleted.

    PySpark's ``daemon.py`` (4.2) collects after every task of a reused worker: 14 ms for the 90,000
    objects of the imports, which live as long as the process, and 0.01 ms once they are frozen.
    """
    if TaskContext.get() is not None:
        gc.collect()
        gc.freeze()
