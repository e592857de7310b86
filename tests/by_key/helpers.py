"""What the tests of `run_by_key` share: a feed in this process, and an application that looks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import orjson

from feedapi_client import Event, FeedConsumer, FeedKey
from feedapi_client.quarantine.operations import list_events
from feedapi_client.quarantine.quarantine_store import QuarantineStore
from tests.consumer.helpers import SAFETY_LIMIT, LocalFeed

_OF_RUN = ("key", "max_concurrency", "max_in_flight", "on_failure", "event_id")


def entity(event: Event) -> str:
    return str(event.json()["entity"])


def number(event: Event) -> int:
    return int(event.json()["n"])


async def drain(consumer: FeedConsumer, handle: Any, **options: Any) -> None:
    with anyio.fail_after(SAFETY_LIMIT):
        await consumer.run_by_key(handle, **{"key": entity, **options})


class KeyFeed(LocalFeed):
    """A feed that is handled by key. Options are those of the consumer and of `run_by_key`."""

    def split_options(self, options: dict[str, Any]) -> tuple[FeedConsumer, dict[str, Any]]:
        """The consumer, and what is left for `run_by_key`."""
        of_run = {name: options.pop(name) for name in _OF_RUN if name in options}
        return self.consume(**options), of_run

    async def drain(self, handle: Any, *, follow: bool = False, **options: Any) -> FeedConsumer:
        """Handle all that is there, or until the handler stops the consumer."""
        consumer, of_run = self.split_options({"follow": follow, **options})
        async with consumer:
            await drain(consumer, handle, **of_run)
        return consumer

    @asynccontextmanager
    async def draining(
        self, handle: Any, *, crashes: bool = False, **options: Any
    ) -> AsyncIterator[FeedConsumer]:
        """Handle what comes during the block. At its end the consumer is stopped, or crashes."""
        consumer, of_run = self.split_options(options)
        async with consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: drain(consumer, handle, **of_run))
            yield consumer
            if crashes:
                tasks.cancel_scope.cancel()
            consumer.stop()


class Application:
    """Handles events, notes their order, and fails a test where two of one key overlap.

    Attributes:
        blocked: what the handlers of some keys wait for.
        poison: the numbers of events that fail.
    """

    def __init__(self, *blocked: str, poison: Iterable[int] = ()) -> None:
        self.payloads: list[Any] = []
        self.running: set[str] = set()
        self.most = 0
        self.gate = anyio.Event()
        self.blocked = dict.fromkeys(blocked, self.gate)
        self.poison = set(poison)

    async def __call__(self, event: Event) -> None:
        if number(event) in self.poison:
            raise RuntimeError("poison")
        key = entity(event)
        assert key not in self.running, f"two events of {key} at once"
        self.running.add(key)
        self.most = max(self.most, len(self.running))
        try:
            if key in self.blocked:
                await self.blocked[key].wait()
            else:
                await anyio.lowlevel.checkpoint()
        finally:
            self.running.discard(key)
        self.payloads.append(event.json())

    async def replayed(self, batch: Any) -> None:
        """Handle what was in quarantine."""
        for event in batch.events:
            await self(event)

    @property
    def numbers(self) -> list[int]:
        return [payload["n"] for payload in self.payloads]

    def of(self, key: str) -> list[int]:
        return [payload["n"] for payload in self.payloads if payload["entity"] == key]


async def kept(quarantine: QuarantineStore, feed: FeedKey | None = None) -> list[int]:
    """The numbers of the events in quarantine."""
    return [orjson.loads(event.raw)["n"] async for event in list_events(quarantine, feed)]
