"""The scenario of ``feedapi demo``: a publisher, and a consumer that crashes now and then."""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio

from feedapi_client.cli.demo.consumer import DemoConsumer
from feedapi_client.cli.demo.effects import Effects
from feedapi_client.cli.demo.event_log import EventLog
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
    ) -> None:
        self.url = ""
        self.log = EventLog()
        self.consumer = DemoConsumer(self.log, sabotage=sabotage)
        self.publisher = DemoPublisher(
            self.log,
            dialect=dialect,
            events=events,
            seconds=seconds,
            seed=seed,
            crashes=crashes,
            crash_consumer=self.consumer.crash,
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
            return await self._run(url, Path(directory, "demo.db"))

    async def _run(self, url: str, path: Path) -> Verdict:
        effects = Effects(path)
        try:
            async with SQLiteCursorStore(path) as store, anyio.create_task_group() as tasks:
                tasks.start_soon(self._publish)
                while not self.publisher.done:
                    await self.consumer.run(url, store, effects, follow=True)
                # Each crash is followed by another run, until one reads to the end.
                while await self.consumer.run(url, store, effects, follow=False):
                    pass
            return prove(self.publisher.steps(), effects.steps())
        finally:
            effects.close()

    async def _publish(self) -> None:
        await self.publisher.run(on_tick=self.consumer.take_status)
        self.consumer.stop()
