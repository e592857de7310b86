"""Spark's micro-batch loop without a JVM: an offset log, a commit log, and crashes at any point."""

from __future__ import annotations

import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader

from feedapi_client.spark.source_options import SourceOptions, parse_options
from feedapi_client.spark.stream import FeedStreamReader, ReadSoFar, seed
from feedapi_client.testing import Publisher

AT_ONCE = {
    "pollInterval": "0.001",
    "maxPollInterval": "0.001",
    "baseDelay": "0.01",
    "settleTime": "0.01",
}
Row = dict[str, Any]
Start = Callable[..., "MicroBatchEngine"]
"""Begins a query of a test's feed: `query`, with what may crash, and options."""


class Crash(Exception):  # noqa: N818 - no error
    """The driver process ends here."""


class MicroBatchEngine:
    """One query with an idempotent sink: `rows` by batch id.

    `crash_at(point)` may raise `Crash` at "planned", "logged", "staged" and "sunk".
    """

    def __init__(
        self,
        make_reader: Callable[[], DataSourceStreamReader],
        crash_at: Callable[[str], None] = lambda point: None,
    ) -> None:
        self._make = make_reader
        self.crash_at = crash_at
        self.offsets: dict[int, str] = {}
        self.committed = -1
        self.rows: dict[int, list[Row]] = {}
        self.reread = 1
        self.skip: Callable[[int], bool] = lambda batch: False
        self.reader: Any = None
        self.ends = False
        self.restart()

    def restart(self) -> None:
        """Start a new driver process."""
        if self.reader is not None:
            self.reader.stop()
        self.reader = self._make()
        if self.ends:
            self.reader.prepareForTriggerAvailableNow()

    def restart_with(self, publisher: Publisher, **given: str) -> None:
        """Start a new driver process, with other options."""
        options, location = options_for(publisher, **given), self.reader.location
        self._make = lambda: FeedStreamReader(options, location)
        self.restart()

    def trigger(self) -> bool:
        """Trigger once. Return whether there was a batch.

        A crash ends the process; the logs stay.
        """
        try:
            return self._trigger()
        except Crash:
            self.restart()
            return True

    def run(self, triggers: int = 1000) -> None:
        """Trigger until there is nothing new: every partition was polled since, in vain.

        With Trigger.AvailableNow until it ends by itself.
        """
        began: int | None = None
        for _ in range(triggers):
            if self.trigger():
                began = None
                continue
            if self.ends:
                return
            report = self.reader.reportLatestOffset() or Counter()
            if report["reading"] or began is None:
                began = None if report["reading"] else report["requests"]
            elif report["requests"] - began >= 2 * report["caughtUp"]:
                return
        raise AssertionError("the query does not come to an end")

    def available_now(self) -> None:
        """Run with Trigger.AvailableNow: a new process that ends by itself."""
        self.ends = True
        try:
            self.restart()
            self.run()
        finally:
            self.ends = False

    def _trigger(self) -> bool:
        batch = self.committed + 1
        start = json.loads(self.offsets[batch - 1]) if batch else self.reader.initialOffset()
        if batch not in self.offsets:
            end = self.reader.latestOffset(start, self.reader.getDefaultReadLimit())
            self.crash_at("planned")
            if json.dumps(end) == json.dumps(start):
                return False
            self.offsets[batch] = json.dumps(end)
            self.crash_at("logged")
            if batch:
                self.reader.commit(json.loads(self.offsets[batch - 1]))
        if not batch:
            start = self.reader.initialOffset()  # Spark asks a second time
        partitions = pickle.loads(
            pickle.dumps(self.reader.partitions(start, json.loads(self.offsets[batch])))
        )
        if not self.skip(batch):
            self._sink(batch, list(partitions))
        self.committed = batch
        return True

    def _sink(self, batch: int, partitions: list[Any]) -> None:
        executor = pickle.loads(pickle.dumps(self._make()))
        for _ in range(self.reread):
            rows = []
            for partition in partitions:
                rows += [row for arrow in executor.read(partition) for row in arrow.to_pylist()]
                self.crash_at("staged")
            assert batch not in self.rows or rows == self.rows[batch], (
                f"batch {batch} differs from its first reading"
            )
            self.rows[batch] = rows
        self.crash_at("sunk")

    def all_rows(self) -> Iterator[Row]:
        """Yield the rows of the batches in the sink."""
        for batch in sorted(self.rows):
            yield from self.rows[batch]


def options_for(publisher: Publisher, **given: Any) -> SourceOptions:
    return parse_options({"url": str(publisher.url), **AT_ONCE, **given})


def query(
    publisher: Publisher,
    folder: Path,
    crash_at: Callable[[str], None] = lambda point: None,
    **given: Any,
) -> MicroBatchEngine:
    options = options_for(publisher, **given)
    return MicroBatchEngine(lambda: FeedStreamReader(options, folder.as_uri()), crash_at)


def resumed(
    publisher: Publisher, folder: Path, rows: Iterable[Row], **given: Any
) -> MicroBatchEngine:
    """Begin a query where a table of these rows ends, without the checkpoint that it had."""
    read = {r["partition"]: ReadSoFar(r["cursor"], r["sequence"] + 1, r["depth"]) for r in rows}
    run = seed(options_for(publisher, **given), folder.as_uri(), read)
    return query(publisher, folder, resumeRun=run, **given)


def rows_of(reader: Any, tasks: Iterable[Any] | None = None) -> list[Row]:
    """Return what the tasks of a reader read, by default those of a batch read."""
    tasks = reader.partitions() if tasks is None else tasks
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


def publish(publisher: Publisher, count: int, *, entities: int = 7) -> None:
    """Publish events with the next numbers."""
    first = len(publisher.payloads())
    for n in range(first, first + count):
        entity = f"e{n % entities}"
        publisher.publish(entity, {"entity": entity, "n": n})


def problems(rows: Iterable[Row], published: Iterable[dict[str, Any]]) -> list[str]:
    """Return what is lost, doubled, or out of order within an entity by ``(depth, sequence)``.

    Events are ``{"entity", "n"}``.
    """
    found: list[str] = []
    seen: Counter[tuple[str, int]] = Counter()
    order: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for row in rows:
        event = json.loads(row["data"])
        seen[event["entity"], event["n"]] += 1
        order[event["entity"]].append((row["depth"], row["sequence"], event["n"]))
    expected = {(event["entity"], event["n"]) for event in published}
    found += [f"lost {event}" for event in sorted(expected - seen.keys())]
    found += [f"unknown {event}" for event in sorted(seen.keys() - expected)]
    found += [f"{count} times {event}" for event, count in sorted(seen.items()) if count > 1]
    for entity, places in sorted(order.items()):
        numbers = [n for _, _, n in sorted(places)]
        if numbers != sorted(numbers):
            found.append(f"order of {entity}: {numbers}")
    return found
