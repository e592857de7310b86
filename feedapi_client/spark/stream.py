"""``spark.readStream.format("feedapi")``: exactly once by first fetch wins.

Each task of an epoch is fetched once. The first attempt that stages its events decides what the
epoch holds; all others, whether concurrent or later, read that object.
"""

from __future__ import annotations

import gc
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from feedapi_client.model import Position
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.fetch import FetchResult, Target, fetch
from feedapi_client.spark.plan.epoch import EpochPlan, FetchTask, decode, encode
from feedapi_client.spark.plan.epoch_planner import EpochPlanner, key_of
from feedapi_client.spark.plan.probe import AvailableNow
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
_MAX_PAUSE = 0.2
"""Seconds that an idle trigger may take when no partition is due. Without a pause, Spark triggers
about 100 times a second, and each one is a call into this process."""


class Epoch(NamedTuple):
    """A micro-batch: the run id of the query, and its number from 0. -1: before the first."""

    run: str
    number: int

    @classmethod
    def of(cls, offset: Offset) -> Epoch:
        """Return the epoch of an offset that Spark passes."""
        return cls(offset["run"], int(offset["epoch"]))

    def offset(self) -> Offset:
        """Return the offset, as Spark keeps it in the checkpoint."""
        return {"run": self.run, "epoch": self.number}

    def next(self) -> Epoch:
        """Return the epoch after this one. The first one gets a new run id."""
        return Epoch(self.run or uuid.uuid4().hex, self.number + 1)


_BEFORE_FIRST = Epoch("", -1)


class StreamPartition(InputPartition):
    """One task of one epoch."""

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
        self._planner: EpochPlanner | None = None
        self._current = _BEFORE_FIRST  # the epoch whose plan the planner made or restored
        self._added = False  # whether the planner has the results of that epoch
        self._planned_here = False
        self._plans: dict[Epoch, EpochPlan] = {}
        self._available_now: AvailableNow | None = None
        self._fence: Fence | None = None
        self._deleted = -1  # the epoch up to which this driver deleted all
        self._objects_of: Objects | None = None

    def __repr__(self) -> str:
        return f"<FeedStreamReader at {self._current}>"

    # ------------------------------------------------------------------ on the driver

    def initialOffset(self) -> Offset:  # noqa: N802
        """Return the offset before the first epoch.

        Spark calls this twice. The run id is therefore made by `latestOffset`.
        """
        if self.options.resume_run is not None:
            return Epoch(self.options.resume_run, 0).offset()
        return _BEFORE_FIRST.offset()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return ``maxEventsPerPartition``. `latestOffset` applies it to each partition."""
        return ReadMaxRows(self.options.max_events_per_partition)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read every partition until it was caught up once.

        `latestOffset` then returns the same offset again, which ends the query.
        """
        self._available_now = AvailableNow(time.monotonic() + self.options.available_now_timeout)
        if self._planner is not None:
            self._planner.available_now = self._available_now

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
        planner = self._planner_after(last)
        epoch = last.next()
        objects = self._objects(epoch.run)
        if restarted and objects.exists(objects.plan_key(epoch.number)):
            self._restore(epoch)  # an earlier driver planned it and died before it returned
            return epoch.offset()
        plan = planner.next_plan(limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        if plan is None:
            self._current = last
            if self._available_now is None:
                time.sleep(min(planner.pause(), _MAX_PAUSE))
            return start
        fence = self._claim(epoch.run, 0)
        fence.check()
        plan.driver = fence.number
        if not objects.create(objects.plan_key(epoch.number), encode(plan)):
            self._restore(epoch)
            return epoch.offset()
        self._plans[epoch] = plan
        self._current, self._added, self._planned_here = epoch, False, True
        return epoch.offset()

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """Return the number of partitions in each state, for `StreamingQueryProgress`.

        A feed does not tell how many events it holds.
        """
        if self._planner is None:
            return None
        return {**self._current.offset(), **self._planner.summary()}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the tasks of the epochs after `start`, up to `end`. Raises `StagingError`."""
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
        """Delete an epoch, its plan last: it says what else there is. Return whether it was there.

        Raises `StagingError`.
        """
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
        """Give the connection back."""
        self._connection = None

    def _claim(self, run: str, after: int) -> Fence:
        """Return the place of this driver among those of the run, claimed at first use.

        Arguments:
            after: a place that is taken, as a plan says.
        """
        if self._fence is None:
            self._fence = Fence.claim(self._objects(run), after)
        return self._fence

    # ------------------------------------------------------------------ on executors

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task. Every attempt gets what the first one fetched.

        Raises `FeedError`, and `StagingError` where the location failed or is not the driver's.
        """
        if not isinstance(partition, StreamPartition):
            return
        _freeze_imported_objects()
        objects, task = self._objects(partition.run), partition.task
        staged = fetch_once(self.options, objects, task)
        yield from staged_rows(staged, objects.data_key(task.epoch, task.number))

    # ------------------------------------------------------------------ the planner and its epoch

    def _is_planned_after(self, last: Epoch) -> bool:
        """Whether the epoch after `last` is planned, and Spark has not run it yet."""
        current = self._current
        return current.number == last.number + 1 and last.run in ("", current.run)

    def _planner_after(self, epoch: Epoch) -> EpochPlanner:
        """Return the planner with the results of the epoch added."""
        planner = self._planner
        if planner is None or self._current != epoch:
            planner = self._restore(epoch)
        planner.available_now = self._available_now
        if not self._added:
            planner.add_results(self._results(epoch), fresh=self._planned_here)
            self._added = True
        return planner

    def _restore(self, epoch: Epoch) -> EpochPlanner:
        """Continue with the plan of an epoch that another driver staged, or without one."""
        plan = None if epoch == _BEFORE_FIRST else self._plan(epoch)
        self._planner = EpochPlanner(self.options, self._connect(plan), plan)
        self._current, self._added, self._planned_here = epoch, plan is None, False
        return self._planner

    def _results(self, epoch: Epoch) -> list[FetchResult]:
        """Return the results in the epoch's staged objects.

        A task without an object was not read by the sink. An empty object is staged for it, so
        that it never holds an event.
        """
        groups = range(len(self._plan(epoch).groups))
        with ThreadPoolExecutor(min(_HEAD_READERS, len(groups) or 1)) as pool:
            heads = list(pool.map(partial(_head, self._objects(epoch.run), epoch.number), groups))
        return [result for head in heads for result in head]

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
    gone = sorted(read.keys() - info.partitions.keys())
    if gone:
        _log.warning(
            "feed %s: partitions %s are not listed any more, and are taken as read to their ends",
            connection.url,
            ", ".join(map(str, gone)),
        )
    positions = {
        partition: Position(one.cursor, "open" if partition in info.partitions else "drained")
        for partition, one in read.items()
    }
    chosen = None if options.partitions is None else sorted(options.partitions)
    plan = EpochPlan(
        feed=key_of(connection),
        name=connection.url,
        info=info,
        positions=positions,
        sequences={partition: one.events for partition, one in read.items()},
        depths={partition: one.depth for partition, one in read.items()},
        known=sorted(read),
        selected=chosen,
        groups=[],
        limit=None,
        chosen=chosen,
    )
    objects = Objects(location, run or uuid.uuid4().hex)
    objects.create(objects.plan_key(0), encode(plan))
    return objects.run


def _gone(epoch: int) -> MissingObjectError:
    return MissingObjectError(
        f"the plan of epoch {epoch} is gone from the staging location: without it this micro-batch "
        "can't be repeated. Was stagingLocation changed, or cleaned by hand? Give the query the "
        "location that it ran with"
    )


def _head(objects: Objects, epoch: int, group: int) -> list[FetchResult]:
    """Return the results of a task; none where the sink did not read it."""
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
    """Return the staged object of the task, fetching and staging it when there is none yet.

    Raises `FeedError`, and `StagingError` where the location failed or is not the driver's.
    """
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
    """Fetch every partition of the task and return the object to stage. Raises `FeedError`."""
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
