"""The scenario of ``feedapi demo``: a publisher, and a consumer that crashes now and then."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import anyio

from feedapi_client.cli.demo.consumer import DemoConsumer
from feedapi_client.cli.demo.effects import Effects
from feedapi_client.cli.demo.event_log import EventLog
from feedapi_client.cli.demo.instances import Instances
from feedapi_client.cli.demo.proof import Verdict, prove
from feedapi_client.cli.demo.publisher import DemoPublisher
from feedapi_client.model import DialectName
from feedapi_client.stores.sqlite import SQLiteCursorStore


class Scenario:
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
            effects = Effects(path)
            try:
                await self._consume(url, path, effects)
                return prove(self.publisher.steps(), effects.steps())
            finally:
                effects.close()

    async def _consume_alone(
        self, consumer: DemoConsumer, url: str, path: Path, effects: Effects
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

    async def _share(self, instances: Instances, url: str, path: Path, _: Effects) -> None:
        async def publish() -> None:
            await instances.reading.wait()
            await self.publisher.run(on_tick=lambda: None)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish)
            await instances.run(url, path, self.publisher.events)
