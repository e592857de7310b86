"""``feedapi demo``: run publisher and consumers, and prove exactly-once delivery.

Run as ``python -m feedapi_client.cli.demo SETTINGS``, a JSON object, it is one of the consumers. It
ends with code 0 after SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

import feedapi_client
from feedapi_client import testing
from feedapi_client.cli.command import (
    FAILURE,
    CommandError,
    command,
    flag,
    option,
    run_async,
    stopping,
)
from feedapi_client.errors import LeaseLostError
from feedapi_client.model import Batch
from feedapi_client.options import Limits, RetryPolicy, Share
from feedapi_client.protocol.text import counted

if TYPE_CHECKING:
    from anyio.abc import Process


Step = tuple[str, int]
"""An entity, and the number of one of its events."""

_ENTITIES, _TICK, _REPLACED_AFTER = 200, 0.02, 0.3
_CRASHED = 137
"""Exit code of a consumer that died."""
_SPARK_CONFIGURATION = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    # A JVM that lives for seconds gains nothing from its second compiler.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


@dataclass(frozen=True, kw_only=True)
class _Demo:
    events: int = option("N", "Events to publish.", default=20000, min=100, max=1000000)
    seconds: float = option("S", "Time to publish them in.", default=6.0, min=0.5, max=3600)
    crashes: int = option(
        "N", "How often a consumer crashes in the middle of a batch.", default=4, min=0, max=100
    )
    sabotage: Literal["cursor-first", "cursor-last"] | None = option(
        help="Save the cursor outside the transaction, before or after the effects: the proof has "
        "to fail."
    )
    instances: int = option("N", "Processes that share the feed.", default=1, min=1, max=16)
    spark: bool = flag("Read the feed into a Spark DataFrame (extra spark-local).")

    def __post_init__(self) -> None:
        if self.instances > 1 and self.sabotage is not None:
            raise ValueError("--sabotage is for one instance")


@command("demo", "demo --events 100000", "demo --sabotage cursor-last")
def demo(o: _Demo) -> int:
    """Publish, split, rotate, crash, consume; prove each entity's events came in order and once.

    A publisher on the loopback interface splits partitions by each method while a consumer reads
    them. It makes tokens stale, breaks off responses, and never gives the same response twice. The
    consumer is a process that keeps its effects and its cursors in one SQLite file. It is killed
    now and then between the two, and another one goes on. In the end the effects are compared with
    what was published. Exit code 1 when they differ.

    With several instances they divide the partitions, and take over those of one that is killed.

    With --spark the feed is read into a DataFrame instead, with the same proof.
    """
    scene = Scene(o, testing.Publisher(2, page_size=150, checkpoint_every=10, vary=True))
    if o.spark:
        effects, died = _read_with_spark(scene), ""
    else:
        with tempfile.TemporaryDirectory(prefix="feedapi-demo-") as folder:
            effects = run_async(scene.play, Path(folder))
        died = f", {counted(scene.died, 'crash', 'crashes')}"
        died += f" of {o.instances} instances" if o.instances > 1 else ""
    published = [(payload["entity"], payload["n"]) for payload in scene.feed.payloads()]
    faults = find_faults(published, effects)
    through = f"through 3 splits of 2 kinds{died}, stale tokens, failing and torn responses"
    what = f"{len(published):,} events of {len({entity for entity, _ in published}):,} entities"
    if not faults:
        print(f"PROVED: {what} arrived, each entity's in order and each one once, {through}")
        return 0
    print(f"FAILED: of {what}, {through}:", *faults, sep="\n  ")
    return FAILURE


_AFTER = "was split: its children start after it"
_OVER = "was split: its successors take over its cursor and its whole history"


class Scene:
    def __init__(self, o: _Demo, feed: testing.Publisher) -> None:
        self.o, self.feed, self.died = o, feed, 0
        self._begin = time.monotonic()
        self._published = self._names = 0
        self._folder = Path()
        self._running: dict[str, Process] = {}
        torn, crashes = testing.faults.Truncate(after_lines=15), 0 if o.spark else o.crashes
        split, fail, rotated = feed.split, feed.fail, "the token was rotated: discover again"
        self._schedule: list[tuple[float, str, Callable[[], object]]] = [
            *((share, rotated, feed.rotate_token) for share in (0.12, 0.62, 0.88)),
            (0.25, f"partition 0 {_AFTER}", partial(split, 0, method="starts-after")),
            (0.38, "the next four fetches are answered 503", partial(fail, 503, times=4)),
            (0.5, f"partition 1 {_OVER}", partial(split, 1, method="cursor-from")),
            (0.72, f"partition 4 {_AFTER}", partial(split, 4, method="starts-after")),
            (0.8, "two responses break off within a line", partial(fail, torn, times=2)),
            *(((k + 0.6) / (crashes + 0.5), "", partial(self._crash, k)) for k in range(crashes)),
        ]
        self._schedule.sort(key=lambda item: item[0])

    def _log(self, text: str) -> None:
        print(f"{time.monotonic() - self._begin:6.2f} s  {text}", flush=True)

    def publish(self, share: float) -> None:
        while self._schedule and self._schedule[0][0] <= share:
            at, text, action = self._schedule.pop(0)
            self.publish(at)
            action()
            if text:
                self._log(text)
        for number in range(self._published, int(self.o.events * share)):
            entity, n = f"entity-{number % _ENTITIES}", number // _ENTITIES + 1
            self.feed.publish(entity, {"entity": entity, "n": n})
            self._published = number + 1

    def _crash(self, number: int) -> None:
        (self._folder / f"crash-{number}").touch()

    async def play(self, folder: Path) -> list[Step]:
        import anyio

        self._folder = folder
        with self.feed.serve() as url, closing(_database(folder)) as database:
            self._log("a publisher serves partitions 0 and 1")
            settings: dict[str, Any] = {"url": url, "folder": str(folder)}
            settings |= {"sabotage": self.o.sabotage, "share": self.o.instances > 1}
            async with anyio.create_task_group() as tasks:
                for _ in range(self.o.instances):
                    tasks.start_soon(self._consume, settings)
                self.publish(0.01)
                while not database.execute("SELECT 1 FROM effects").fetchone():  # noqa: ASYNC110
                    await anyio.sleep(_TICK)
                begin = time.monotonic()
                while self._published < self.o.events:
                    await anyio.sleep(_TICK)
                    # Each action at its place among the events, also when this is late.
                    self.publish(min(1.0, (time.monotonic() - begin) / self.o.seconds))
                self._log(f"{self._published:,} events are published: they are read to the end")
                for process in self._running.values():
                    # Not terminate(): it reaps one that has just died, and asyncio reports 255.
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGTERM)
            await self._consume({**settings, "follow": False})
            rows = database.execute("SELECT entity, n FROM effects ORDER BY row").fetchall()
        self._log(f"{counted(len(rows), 'event')} applied")
        return rows

    async def _consume(self, settings: dict[str, Any]) -> None:
        """Run consumers, one after the other, until all is published, or without `follow` read.

        Raises `CommandError` if one fails.
        """
        import anyio

        last, code = "follow" in settings, _CRASHED
        while code == _CRASHED if last else self._published < self.o.events:
            self._names += 1
            name = f"instance-{self._names}"
            words = orjson.dumps({**settings, "name": name}).decode()
            program = [sys.executable, "-m", "feedapi_client.cli.demo", words]
            async with await anyio.open_process(
                program, stdin=subprocess.DEVNULL, stdout=None, stderr=None
            ) as process:
                self._running[name] = process
                self._log(f"{name} starts")
                code = await process.wait()
            del self._running[name]
            if code == _CRASHED:
                self.died += 1
                self._log(f"crash {self.died}: {name} died in the middle of a batch")
            elif code not in (0, -signal.SIGTERM):  # stopped before it had begun
                raise CommandError(f"{name} ended with code {code}")
            await anyio.sleep(_REPLACED_AFTER)


def find_faults(published: list[Step], effects: list[Step]) -> list[str]:
    """Compare the events as they were published with the effects. A line for each kind of fault."""
    place, counts = {step: n for n, step in enumerate(published)}, Counter(effects)
    before: dict[str, int] = {}
    disordered = []
    for step in filter(place.__contains__, counts):
        if place[step] < before.get(step[0], -1):
            disordered.append(step)
        before[step[0]] = place[step]
    kinds = {
        "lost": [step for step in place if step not in counts],
        "came again": [step for step, count in counts.items() if count > 1],
        "came out of order": disordered,
        "was never published": [step for step in counts if step not in place],
    }
    lines = []
    for kind, steps in kinds.items():
        some = ", ".join(f"event {n} of {entity}" for entity, n in sorted(steps)[:3])
        more = " …" if len(steps) > 3 else ""
        lines += [f"{len(steps):,} {kind}, such as {some}{more}"] if steps else []
    return lines


def _database(folder: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(folder / "demo.db", isolation_level=None, timeout=30)
    connection.executescript(
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF; CREATE TABLE IF NOT EXISTS effects "
        "(row INTEGER PRIMARY KEY AUTOINCREMENT, entity TEXT NOT NULL, n INTEGER NOT NULL)"
    )
    return connection


async def _read(
    url: str, folder: str, name: str, share: bool, sabotage: str | None, follow: bool = True
) -> None:
    # Small batches and short pauses, so that many batches come within a few seconds.
    limits = Limits(
        poll_interval=0.02,
        max_poll_interval=0.1,
        settle_time=1.0,
        discovery_interval=0.25,
        max_batch_bytes=8 * 1024,
    )
    settings: Any = {"retry": RetryPolicy(base_delay=0.02, max_delay=0.2), "limits": limits}
    if share:
        settings["share"] = Share(instance=name, lease_seconds=1.5, rebalance_seconds=0.2)
    path = Path(folder)
    async with (
        stopping() as stop,
        feedapi_client.SQLiteCursorStore(path / "demo.db") as store,
        feedapi_client.FeedConsumer(
            url, store=store, name="demo", follow=follow, **settings
        ) as consumer,
    ):
        stop.consumer = consumer
        with closing(_database(path)) as database:
            async for batch in consumer.batches():
                with suppress(LeaseLostError):  # the instance that has it delivers it again
                    await _apply(batch, database, path, sabotage)


async def _apply(batch: Batch, database: sqlite3.Connection, path: Path, how: str | None) -> None:
    steps = [(event.json()["entity"], event.json()["n"]) for event in batch.events]
    insert = "INSERT INTO effects (entity, n) VALUES (?, ?)"
    if how == "cursor-first":
        await batch.commit()
        _crash(path, steps)
        database.executemany(insert, steps)
        return
    if how is None:
        database.execute("BEGIN IMMEDIATE")
    try:
        database.executemany(insert, steps)
        _crash(path, steps)
        await batch.commit(transaction=None if how else database)
        if how is None:
            _crash(path, steps)
            database.execute("COMMIT")
    finally:
        if database.in_transaction:
            database.execute("ROLLBACK")


def _crash(path: Path, steps: list[Step]) -> None:
    for request in path.glob("crash-*") if steps else ():
        with suppress(FileNotFoundError):  # another instance has taken it
            request.unlink()
            os._exit(_CRASHED)


def _read_with_spark(scene: Scene) -> list[Step]:
    try:
        from feedapi_client.spark import JavaError, ensure_java, register
    except ImportError as missing:
        raise CommandError(str(missing).replace("[spark]", "[spark-local]")) from None
    try:
        ensure_java()
    except JavaError as error:
        raise CommandError(str(error)) from None
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder: Any = SparkSession.builder.master("local[2]").appName("feedapi demo")
    scene.publish(1.0)
    spark = builder.config(map=_SPARK_CONFIGURATION).getOrCreate()
    with scene.feed.serve() as url, ExitStack() as stack:
        stack.callback(spark.stop)
        spark.sparkContext.setLogLevel("ERROR")
        register(spark)
        print('spark.read.format("feedapi").load(url).orderBy("depth", "sequence")')
        frame = spark.read.format("feedapi").load(url).orderBy("depth", "sequence")
        frame = frame.select("partition", "depth", "sequence", "data").cache()
        frame.show(5, truncate=False)
        frame.groupBy("depth", "partition").count().orderBy("depth", "partition").show()
        rows = [orjson.loads(row.data) for row in frame.select("data").collect()]
    return [(row["entity"], row["n"]) for row in rows]


if __name__ == "__main__":
    import anyio

    logging.getLogger("feedapi_client").setLevel(logging.ERROR)  # what is lost is part of the demo
    anyio.run(partial(_read, **orjson.loads(sys.argv[1])))
