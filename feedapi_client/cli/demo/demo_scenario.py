"""The scenario of ``feedapi demo``: a publisher, and a consumer that crashes now and then."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import orjson

from feedapi_client.cli.command import CommandError
from feedapi_client.cli.demo.demo_consumer import DemoConsumer, DemoEffects, EventLog
from feedapi_client.cli.demo.demo_instances import Instances
from feedapi_client.cli.demo.proof import Step, Verdict, prove
from feedapi_client.model import DialectName, Partition
from feedapi_client.stores.sqlite import SQLiteCursorStore
from feedapi_client.testing import Publisher, faults
from feedapi_client.testing.publisher.topology import SplitMethod

_ENTITIES = 200
_PUBLISH_INTERVAL = 0.02
_PAGE_SIZE = 150
_CHECKPOINT_EVERY = 10
_SPARK_SECONDS = 0.1
_SPARK_CONFIGURATION = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    # A JVM that lives for seconds gains nothing from its second compiler.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}

Schedule = list[tuple[float, Callable[[], None]]]
"""Actions, each with the share of the events that is published before it."""


class DemoPublisher:
    """Publishes `events` events within `seconds`.

    `crash_consumer` is called `crashes` times, at even distances.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        dialect: DialectName,
        events: int,
        seconds: float,
        seed: int | None,
        crashes: int,
        crash_consumer: Callable[[], None],
    ) -> None:
        self.feed = Publisher(
            2,
            dialect=dialect,
            page_size=_PAGE_SIZE,
            checkpoint_every=_CHECKPOINT_EVERY,
            vary=True,
            seed=seed,
        )
        self.events = events
        self.seconds = seconds
        self.published = 0
        self.done = False
        self.partitions: dict[int, Partition] = dict(self.feed.partitions)
        """All partitions, also those that are no longer listed."""
        self._log = log
        crash_times = [(k + 0.6) / (crashes + 0.5) for k in range(crashes)]
        schedule = [*self._schedule(), *((time, crash_consumer) for time in crash_times)]
        self._schedule_left = sorted(schedule, key=lambda item: item[0])

    def _schedule(self) -> Schedule:
        return [
            (0.12, self._rotate),
            (0.25, lambda: self._split(0, "starts-after")),
            (0.38, self._fail),
            (0.5, lambda: self._split(1, "cursor-from")),
            (0.62, self._rotate),
            (0.72, lambda: self._split(4, "starts-after")),
            (0.8, self._break_off),
            (0.88, self._rotate),
        ]

    async def run(self, on_tick: Callable[[], None]) -> None:
        """Publish all events. `on_tick` is called some fifty times a second."""
        start = anyio.current_time()
        while self.published < self.events:
            await anyio.sleep(_PUBLISH_INTERVAL)
            share = min(1.0, (anyio.current_time() - start) / self.seconds)
            # Each action at its place among the events, also when this is late.
            while self._schedule_left and self._schedule_left[0][0] <= share:
                at, action = self._schedule_left.pop(0)
                self._publish(int(self.events * at))
                action()
            self._publish(int(self.events * share))
            on_tick()
        self.done = True
        self._log.add(f"{self.published:,} events are published: the consumer reads to the end")

    def steps(self) -> list[Step]:
        """Return the events in the order in which they were published."""
        return [(payload["entity"], payload["n"]) for payload in self.feed.payloads()]

    def _publish(self, up_to: int) -> None:
        for number in range(self.published, up_to):
            entity = f"entity-{number % _ENTITIES}"
            self.feed.publish(entity, {"entity": entity, "n": number // _ENTITIES + 1})
        self.published = max(self.published, up_to)

    def _split(self, partition: int, method: SplitMethod) -> None:
        children = " and ".join(map(str, self.feed.split(partition, method=method)))
        # A new dictionary: the live view reads the old one in its own thread.
        self.partitions = {**self.partitions, **self.feed.partitions}
        what = (
            "start after it"
            if method == "starts-after"
            else "take over its cursor and its whole history"
        )
        self._log.add(f"partition {partition} was split: {children} {what}")

    def _rotate(self) -> None:
        self.feed.rotate_token()
        self._log.add("the token was rotated: the consumer has to discover again")

    def _fail(self) -> None:
        self.feed.fail(503, times=4)
        self._log.add("the next four fetches are answered 503")

    def _break_off(self) -> None:
        self.feed.fail(faults.Truncate(after_lines=15), times=2)
        self._log.add("the next two responses break off in the middle of a line")


class DemoScenario:
    """One run of the demo. The views read its parts."""

    def __init__(
        self,
        *,
        dialect: DialectName,
        events: int,
        seconds: float,
        crashes: int,
        seed: int | None,
        sabotage: str | None,
        instances: int = 1,
    ) -> None:
        self.url = ""
        self.instances = instances
        self.log = EventLog()
        self.consumer: DemoConsumer | Instances
        if instances > 1:
            self.consumer = sharing = Instances(self.log, instances)
            self._consume, crash = partial(self._share, sharing), sharing.disturb
        else:
            self.consumer = alone = DemoConsumer(self.log, sabotage=sabotage)
            self._consume, crash = partial(self._consume_alone, alone), alone.crash
        self.publisher = DemoPublisher(
            self.log,
            dialect=dialect,
            events=events,
            seconds=seconds,
            seed=seed,
            crashes=crashes,
            crash_consumer=crash,
        )

    async def run(self) -> Verdict:
        """Publish and consume everything, and compare. Raises `FeedError`."""
        with (
            tempfile.TemporaryDirectory(prefix="feedapi-demo-") as directory,
            self.publisher.feed.serve() as url,
            self.log.with_warnings(url),
        ):
            self.url = url
            self.log.restart_clock()
            self.log.add(f"a publisher serves partitions 0 and 1 ({self.publisher.feed.dialect})")
            path = Path(directory, "demo.db")
            effects = DemoEffects(path)
            try:
                await self._consume(url, path, effects)
                return prove(self.publisher.steps(), effects.steps())
            finally:
                effects.close()

    async def _consume_alone(
        self, consumer: DemoConsumer, url: str, path: Path, effects: DemoEffects
    ) -> None:
        async def publish() -> None:
            await self.publisher.run(on_tick=consumer.take_status)
            consumer.stop()

        async with SQLiteCursorStore(path) as store, anyio.create_task_group() as tasks:
            tasks.start_soon(publish)
            while not self.publisher.done:
                await consumer.run(url, store, effects, follow=True)
            # Each crash is followed by another run, until one reads to the end.
            while await consumer.run(url, store, effects, follow=False):
                pass

    async def _share(self, instances: Instances, url: str, path: Path, _: DemoEffects) -> None:
        async def publish() -> None:
            await instances.reading.wait()
            await self.publisher.run(on_tick=lambda: None)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish)
            await instances.run(url, path, self.publisher.events)


def read_with_spark(dialect: DialectName, events: int, seed: int | None) -> Verdict:
    """Publish the demo's events with its splits, read them into a DataFrame, print and prove it.

    Raises:
        CommandError: the extra spark is missing, or there is no Java that Spark runs on.
    """
    try:
        from feedapi_client.spark import JavaError, ensure_java
    except ImportError as missing:
        raise CommandError(str(missing).replace("[spark]", "[spark-local]")) from None
    try:
        ensure_java()
    except JavaError as error:
        raise CommandError(str(error)) from None
    publisher = DemoPublisher(
        EventLog(),
        dialect=dialect,
        events=events,
        seconds=_SPARK_SECONDS,
        seed=seed,
        crashes=0,
        crash_consumer=lambda: None,
    )
    anyio.run(publisher.run, lambda: None)
    with publisher.feed.serve() as url:
        return prove(publisher.steps(), _effects_of_spark(url))


def _effects_of_spark(url: str) -> list[Step]:
    """Return what the DataFrame holds, in the order of its columns depth and sequence."""
    spark = _spark_session()
    try:
        print('spark.read.format("feedapi").load(url).orderBy("depth", "sequence")')
        frame = spark.read.format("feedapi").load(url).orderBy("depth", "sequence")
        frame = frame.select("partition", "depth", "sequence", "data").cache()
        frame.show(5, truncate=False)
        frame.groupBy("depth", "partition").count().orderBy("depth", "partition").show()
        rows = [orjson.loads(row.data) for row in frame.select("data").collect()]
    finally:
        spark.stop()
    return [(row["entity"], row["n"]) for row in rows]


def _spark_session() -> Any:
    from pyspark.sql import SparkSession

    from feedapi_client.spark import register

    # PySpark's advice on pandas, which the demo does not use.
    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder: Any = SparkSession.builder.master("local[2]").appName("feedapi demo")
    for name, value in _SPARK_CONFIGURATION.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark
