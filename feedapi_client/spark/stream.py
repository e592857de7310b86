"""``spark.readStream.format("feedapi")``: exactly once by first fetch wins (see `feedapi_client.spark.stage`)."""

from __future__ import annotations

import gc
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from feedapi_client.spark.fetch import Feed, Outcome
from feedapi_client.spark.options import SourceOptions
from feedapi_client.spark.stage import Group, batches, empty_object, outcomes_of, winner
from feedapi_client.spark.staging import (
    MissingObjectError,
    Staging,
    StagingError,
    compress,
    decompress,
    pack,
    unpack,
)
from feedapi_client.spark.tracker import Plan, Tracker, _AvailableNow

_log = logging.getLogger(__name__)

Offset = dict[str, Any]

_BEFORE = -1
_HEADER_READERS = 16


class StreamPartition(InputPartition):
    """One task of one epoch."""

    def __init__(self, run: str, group: Group) -> None:
        self.run = run
        self.group = group

    def __repr__(self) -> str:
        return (
            f"StreamPartition(run={self.run}, epoch={self.group.epoch}, group={self.group.number})"
        )


class FeedStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of one streaming query.

    An offset is ``{"run", "epoch"}``: epoch n was planned before Spark heard of it, and its plan says what it reads. The methods but `read` run in one
    process on the driver, one at a time; `read` runs on executors, in any number of attempts.
    """

    def __init__(self, options: SourceOptions, location: str) -> None:
        self.options = options
        self.location = location
        self._feed: Feed | None = None
        self._tracker: Tracker | None = None
        self._at: tuple[str, int] | None = (
            None  # the epoch whose plan the tracker made or took over
        )
        self._absorbed = False
        self._planned_here = False
        self._plans: dict[tuple[str, int], Plan] = {}
        self._available_now: _AvailableNow | None = None

    def __repr__(self) -> str:
        return f"<FeedStreamReader at {self._at}>"

    # ------------------------------------------------------------------ on the driver

    def initialOffset(self) -> Offset:  # noqa: N802
        """Before the first epoch. Called twice by Spark, so that it can't name the run: `latestOffset` does."""
        return {"run": "", "epoch": _BEFORE}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """``maxEventsPerPartition``; `latestOffset` takes it as the bound of each partition."""
        return ReadMaxRows(self.options.max_events_per_partition)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """From now on every partition is read until it was caught up once, and `latestOffset` then stays where it is."""
        self._available_now = _AvailableNow(time.monotonic() + self.options.available_now_timeout)
        if self._tracker is not None:
            self._tracker.available_now = self._available_now

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Plan the epoch after `start` and write its plan; `start` itself when there is nothing new. Raises `FeedError`."""
        run, epoch = start["run"], int(start["epoch"])
        if self._at is not None and self._at[1] == epoch + 1 and run in ("", self._at[0]):
            return _offset(*self._at)  # planned already, and Spark has not run it yet
        tracker = self._tracker_at(run, epoch)
        run = run or uuid.uuid4().hex
        staging = self._staging(run)
        if (
            (run, epoch) != self._at
            and epoch != _BEFORE
            and staging.exists(staging.plan_key(epoch + 1))
        ):
            return self._adopt(
                run, epoch + 1
            )  # an earlier driver planned it and died before Spark noted it
        plan = tracker.next_plan(limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        if plan is None:
            self._at = (run, epoch) if epoch != _BEFORE else None
            return start
        if not staging.create(staging.plan_key(epoch + 1), _encode(plan)):
            return self._adopt(run, epoch + 1)
        self._remember(run, epoch + 1, plan)
        return _offset(run, epoch + 1)

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """How many partitions are in which state, for `StreamingQueryProgress`. A feed does not tell how many events it holds."""
        if self._tracker is None:
            return None
        run, epoch = self._at or ("", _BEFORE)
        return {**_offset(run, epoch), **self._tracker.summary()}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """One for each group of the epochs after `start`, up to `end`. Raises `StagingError` when a plan is gone."""
        run = end["run"]
        found: list[InputPartition] = []
        for epoch in range(int(start["epoch"]) + 1, int(end["epoch"]) + 1):
            plan = self._plan(run, epoch)
            fetch = self._open().fetch_options if plan.groups else self.options.fetch
            numbers = range(len(plan.groups))
            found += [
                StreamPartition(
                    run, Group(epoch, n, plan.targets(n), plan.slim_info(n), fetch, plan.limit)
                )
                for n in numbers
            ]
        return found

    def commit(self, end: Offset) -> None:
        """Spark is done with the epochs up to `end`: delete the earlier ones. The last one still says where to go on from."""
        if int(end["epoch"]) <= 0:
            return
        try:
            self._staging(end["run"]).discard_before(int(end["epoch"]))
        except StagingError as error:
            _log.warning("old epochs were not deleted, the next commit tries again: %s", error)
        self._plans = {
            key: plan for key, plan in self._plans.items() if key[1] >= int(end["epoch"])
        }

    # ------------------------------------------------------------------ on executors

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a group: whoever asks gets what the first one fetched. Raises `FeedError`."""
        if not isinstance(partition, StreamPartition):
            return
        _spare_the_collector()
        staging, group = self._staging(partition.run), partition.group
        staged = winner(self.options, staging, group)
        yield from batches(
            staged,
            staging.data_key(group.epoch, group.number),
            self.options.payload,
            self.options.limits.max_batch_bytes,
        )

    # ------------------------------------------------------------------ the tracker and its epoch

    def _tracker_at(self, run: str, epoch: int) -> Tracker:
        """The tracker with the results of the epoch taken in."""
        if self._tracker is None or (self._at or ("", _BEFORE)) != (run, epoch):
            self._restore(run, epoch)
        tracker = self._tracker
        assert tracker is not None
        tracker.available_now = self._available_now
        if not self._absorbed:
            tracker.absorb(self._results(run, epoch), fresh=self._planned_here)
            self._absorbed = True
        return tracker

    def _restore(self, run: str, epoch: int) -> None:
        if epoch == _BEFORE:
            self._tracker, self._absorbed, self._at = (
                Tracker.born(self.options, self._open()),
                True,
                None,
            )
            return
        self._tracker = Tracker.restored(self.options, self._open(), self._plan(run, epoch))
        self._absorbed = self._planned_here = False

    def _adopt(self, run: str, epoch: int) -> Offset:
        self._tracker = Tracker.restored(self.options, self._open(), self._plan(run, epoch))
        self._at, self._absorbed, self._planned_here = (run, epoch), False, False
        return _offset(run, epoch)

    def _remember(self, run: str, epoch: int, plan: Plan) -> None:
        self._plans[run, epoch] = plan
        self._at, self._absorbed, self._planned_here = (run, epoch), False, True

    def _results(self, run: str, epoch: int) -> list[Outcome]:
        """What the epoch's staged objects say. A group without one was not read by the sink: it is sealed, so that it never is."""
        staging = self._staging(run)
        keys = [
            staging.data_key(epoch, number) for number in range(len(self._plan(run, epoch).groups))
        ]
        if len(keys) < 2:
            headers = [_seal_or_read(staging, key) for key in keys]
        else:
            with ThreadPoolExecutor(min(_HEADER_READERS, len(keys))) as pool:
                headers = list(pool.map(lambda key: _seal_or_read(staging, key), keys))
        return [outcome for header in headers for outcome in outcomes_of(header)]

    def _plan(self, run: str, epoch: int) -> Plan:
        if (run, epoch) not in self._plans:
            staging = self._staging(run)
            key = staging.plan_key(epoch)
            try:
                self._plans[run, epoch] = _decode(staging.read(key), key)
            except MissingObjectError as error:
                raise StagingError(
                    f"the plan of epoch {epoch} is gone from the staging location: without it nobody knows what this micro-batch held. Was stagingLocation "
                    "changed, or cleaned by hand? Give the query the location that it ran with"
                ) from error
        return self._plans[run, epoch]

    def _open(self) -> Feed:
        if self._feed is None:
            self._feed = Feed(self.options)
        return self._feed

    def _staging(self, run: str) -> Staging:
        return Staging(self.location, run)


@cache
def _spare_the_collector() -> None:
    """Once a process: PySpark's workers run a full garbage collection after each task. With all that is imported it takes longer than a small task does."""
    if TaskContext.get() is not None:
        gc.collect()
        gc.freeze()


def _offset(run: str, epoch: int) -> Offset:
    return {"run": run, "epoch": epoch}


def _seal_or_read(staging: Staging, key: str) -> Any:
    try:
        return staging.read_header(key)
    except MissingObjectError:
        staging.create(key, empty_object())
        return staging.read_header(key)


def _encode(plan: Plan) -> bytes:
    return pack({"kind": "plan"}, [[compress(msgspec.json.encode(plan))]])


def _decode(content: bytes, key: str) -> Plan:
    return msgspec.json.decode(decompress(unpack(content, key)[1][0], key), type=Plan)
