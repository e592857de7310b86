"""A query dies at each of its writes, alone and beside other drivers, and its rows meet an oracle.

Without a JVM: `MicroBatchEngine` takes the place of Spark's loop. All that the source writes goes
through obstore.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import pytest

from feedapi_client.errors import FencedError
from feedapi_client.spark.staging import StagingError
from feedapi_client.spark.stream import FeedStreamReader
from feedapi_client.testing import Publisher
from tests.spark.micro_batches import Crash, MicroBatchEngine, options_for, problems, publish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODES = ("before", "after", "overlap", "late")
"""The driver dies before or after the write, or another one begins meanwhile: it goes on beside the
first, or comes to the end of the feed before the first one wakes up."""


class Log(dict[int, Any]):
    """Spark's log of offsets: of two drivers that write one, the second ends."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def __setitem__(self, batch: int, offset: Any) -> None:
        with self._lock:
            if batch in self:
                raise Crash(f"batch {batch} is logged")
            super().__setitem__(batch, offset)


class Driver(MicroBatchEngine):
    """One process of a query, whose logs are the world's. Nobody tidies up after it."""

    def __init__(self, world: World) -> None:
        given = {"maxEventsPerPartition": "8"}
        options, location = options_for(world.publisher, **given), world.folder.as_uri()
        self.world = world
        super().__init__(lambda: FeedStreamReader(options, location))
        self.offsets, self.rows = world.offsets, world.rows

    @property
    def committed(self) -> int:
        return self.world.committed

    @committed.setter
    def committed(self, batch: int) -> None:
        self.world.committed = max(batch, self.world.committed)

    def restart(self) -> None:
        self.reader = self._make()


class World:
    """A feed and a query, which is disturbed at one of its writes."""

    def __init__(self, folder: Path, mode: str, at: int) -> None:
        self.publisher = Publisher(partitions=2, page_size=10, checkpoint_every=5, seed=3)
        self.folder, self.mode, self.at = folder, mode, at
        self.writes = 0
        self.committed, self.offsets, self.rows = -1, Log(), dict[int, Any]()
        self.other: Driver | None = None
        self.written_over: list[str] = []

    def play(self) -> list[str]:
        """Return what is wrong in the end."""
        with self.publisher.serve():
            driver = self.driver()
            for step in range(3):
                publish(self.publisher, 12, entities=5)
                if step == 1:
                    self.publisher.split(0, into=2)
                self.trigger(driver, 2)
            self.at = -1
            self.driver().run()
            found = problems(self.driver().all_rows(), self.publisher.payloads())
            return found + self.written_over

    def trigger(self, driver: Driver, times: int) -> None:
        """Trigger the driver, and another one in turns with it, when there is one.

        The first one of two may end, in place of writing. What it reads late, of objects that are
        deleted, may be something else: the sink has that micro-batch, and does not take it.
        """
        for _ in range(times):
            try:
                if driver.reader is not None:
                    driver._trigger()
            except (AssertionError, Crash, FencedError, StagingError) as error:
                if self.other is not None:
                    driver.reader = None
                elif isinstance(error, Crash):
                    driver.restart()
                else:
                    raise
            if self.other is not None:
                self.other._trigger()

    def driver(self) -> Driver:
        return Driver(self)

    def write(self, write: Callable[[], Any]) -> Any:
        """Write, and do what is to be done at this write."""
        self.writes += 1
        if self.writes != self.at:
            return write()
        if self.mode == "before":
            raise Crash
        if self.mode in ("overlap", "late"):
            self.other = self.driver()
            publish(self.publisher, 9, entities=5)
            self.other.run() if self.mode == "late" else self.other.trigger()
        written = write()
        if self.mode == "after":
            raise Crash
        return written

    def put(self, put: Callable[..., Any], store: Any, key: str, *given: Any, **more: Any) -> Any:
        """Write an object as `write` does, and note when another one had it."""

        def once() -> Any:
            there = content(store, key)
            written = put(store, key, *given, **more)
            if there is not None and content(store, key) != there:
                self.written_over.append(f"{key} was written over")
            return written

        return self.write(once)


def content(store: Any, key: str) -> bytes | None:
    try:
        return bytes(obstore.get(store, key).bytes())
    except FileNotFoundError:
        return None


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], int]]:
    """Return what plays a world: with a mode, the number of the write, and how to write."""
    put, delete = obstore.put, obstore.delete
    worlds: list[World] = []

    def deleted(*given: Any) -> Any:
        return worlds[-1].write(partial(delete, *given))

    def play(mode: str, at: int, put: Callable[..., Any] = put) -> tuple[list[str], int]:
        worlds.append(world := World(tmp_path / str(len(worlds)), mode, at))
        monkeypatch.setattr(obstore, "put", partial(world.put, put))
        monkeypatch.setattr(obstore, "delete", deleted)
        return world.play(), world.writes

    return play


def outcomes(play: Any, mode: str, **given: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield what is wrong after a disturbance at each write."""
    _, count = play(mode, 0)
    for at in range(1, count + 1):
        try:
            found, _ = play(mode, at, **given)
        except (AssertionError, StagingError, FencedError) as error:
            found = [str(error)]
        yield at, found


@pytest.mark.parametrize("mode", MODES)
def test_r08_query_that_dies_at_any_write_reads_every_event_once(play: Any, mode: str) -> None:
    assert [one for one in outcomes(play, mode) if one[1]] == []


def test_r08_twenty_overlapping_starts_read_every_event_once(tmp_path: Path) -> None:
    """As of a scheduler whose runs never end before the next one starts."""
    world, ended = World(tmp_path, "", -1), list[Exception]()
    over = threading.Event()

    def run(driver: Driver) -> None:
        try:
            while not over.is_set():
                driver._trigger()
        except (AssertionError, Crash, FencedError, StagingError) as error:
            ended.append(error)

    threads = []
    with world.publisher.serve():
        for number in range(20):
            publish(world.publisher, 10, entities=5)
            if number in (5, 12):
                world.publisher.split(world.publisher.open_partitions()[0], into=2)
            threads.append(threading.Thread(target=run, args=(world.driver(),)))
            threads[-1].start()
            while len(list(tmp_path.glob("*/driver/*"))) <= number:
                time.sleep(0.001)
        publish(world.publisher, 10, entities=5)
        while len(ended) < 19:
            publish(world.publisher, 1, entities=5)
            time.sleep(0.01)
        over.set()
        for thread in threads:
            thread.join()
        last = world.driver()
        last.run()
    assert problems(last.all_rows(), world.publisher.payloads()) == []


def overwriting(part: str, *given: Any, **more: Any) -> Any:
    """An object store, or a library, that does not write only where there is nothing."""
    if f"/{part}/" in given[1]:
        del more["mode"]
    return PUT(*given, **more)


PUT = obstore.put


@pytest.mark.parametrize("part", ["plan", "data"])
def test_control_plan_or_events_that_are_written_over_are_found(play: Any, part: str) -> None:
    assert any(found for _, found in outcomes(play, "overlap", put=partial(overwriting, part)))


def test_control_driver_that_forgets_what_the_last_one_read_is_found(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = FeedStreamReader._results

    def forgets(reader: FeedStreamReader, epoch: Any) -> Any:
        return results(reader, epoch) if reader._planned_here else []

    monkeypatch.setattr(FeedStreamReader, "_results", forgets)
    assert any(found for _, found in outcomes(play, "after"))
