"""The application's process: how it consumes, and how it ends and starts again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeVar

import anyio
from httpx import AsyncClient

from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import (
    CommitOrderError,
    FeedError,
    FencedError,
    LineageError,
    LostPartitionError,
    StoreError,
)
from feedapi_client.model import Batch, FeedKey
from feedapi_client.options import FetchOptions, Limits
from feedapi_client.testing.simulator.http import SimulatedClient
from feedapi_client.testing.simulator.oracle import Oracle
from feedapi_client.testing.simulator.scenario import Settings
from feedapi_client.testing.simulator.store import ConnectionLostError, Database, Effect, Session
from feedapi_client.testing.simulator.trace import Trace
from feedapi_client.testing.simulator.transport import SimulatedPublisher, SimulatedTransport

T = TypeVar("T")

FEED = "http://simulated/feed"
RESTART_SECONDS = 0.5
_NEVER_RIGHT = (CommitOrderError, LineageError, LostPartitionError)
"""Errors that no fault of the simulation justifies."""


class Process:
    """One process of the application, from its start to its end."""

    def __init__(
        self,
        settings: Settings,
        publisher: SimulatedPublisher,
        database: Database,
        oracle: Oracle,
        random: Random,
        *,
        native: bool,
        follow: bool = True,
    ) -> None:
        self.transport = SimulatedTransport(publisher)
        self.session = Session(database)
        self.consumer: FeedConsumer | None = None
        self._fetch = FetchOptions(
            stream=5000 if settings.stream else False,
            event_types=("even",) if settings.selected else (),
        )
        self.key = FeedKey(FEED, "default", self._fetch.selection())
        self.leaving = False
        self.paused_until = 0.0
        self._settings = settings
        self._database = database
        self._oracle = oracle
        self._random = random
        self._native = native
        self._follow = follow
        self._now = publisher.now
        self._trace = publisher.trace

    def die(self) -> None:
        """What the process still does from now on has no effect."""
        self.transport.dead = self.session.dead = True

    def make_consumer(self, http: AsyncClient) -> FeedConsumer:
        """Return the consumer of this process."""
        settings = self._settings
        return FeedConsumer(
            FEED,
            store=self.session,
            follow=self._follow,
            v1_partitions=settings.partitions if settings.dialect == "v1" else None,
            start=settings.start,
            fetch=self._fetch,
            limits=Limits(
                max_concurrent_fetches=settings.concurrent,
                max_batch_bytes=settings.batch_bytes,
                max_buffered_bytes=settings.buffer_bytes,
            ),
            http=http,
        )

    async def run(self) -> None:
        """Consume until stopped or, without `follow`, to the end of the feed."""
        async with (
            SimulatedClient(self.transport.handle_async_request) as http,
            self.make_consumer(http) as self.consumer,
        ):
            self._oracle.began()
            await self._consume(self.consumer)
            while self.leaving:
                self.leaving = False
                self._oracle.began()
                await self._consume(self.consumer)

    async def _consume(self, consumer: FeedConsumer) -> None:
        if self._settings.way == "run":
            await consumer.run(self._handle, max_concurrency=self._random.choice((1, 3, 20)))
        elif self._settings.way == "batches":
            await self._iterate(consumer.batches().__anext__, self._handle_batch)
        else:
            await self._iterate(consumer.__aiter__().__anext__, self._handle_event)

    async def _iterate(
        self, following: Callable[[], Awaitable[T]], handle: Callable[[T], Awaitable[None]]
    ) -> None:
        before: StoreError | None = None
        while not self.leaving:
            try:
                item = await self._impatiently(following)
            except StopAsyncIteration:
                return
            except StoreError as error:
                # After an error the next call goes on, or raises that error again (R20).
                if not self._settings.stubborn or error is before:
                    raise
                self._trace.add("the application iterates on after {}", error)
                before = error
                await anyio.sleep(RESTART_SECONDS)
                continue
            await handle(item)

    # ------------------------------------------------------------------ handling

    async def _handle_event(self, event: Any) -> None:
        self.session.apply_at_once([_effect(event.partition, event)])
        await self._work()

    async def _handle_batch(self, batch: Batch) -> None:
        await self._handle(batch)

    async def _handle(self, batch: Batch) -> None:
        self._oracle.delivered(batch.partition, self.positions())
        await self._work()
        effects = [_effect(batch.partition, event) for event in batch.events]
        if not self._settings.transactional:
            self.session.apply_at_once(effects)
            await self._impatiently(batch.commit)
            return
        transaction = self.session.transaction()
        transaction.effects += effects
        await batch.commit(transaction=transaction)
        with anyio.CancelScope(shield=True):
            await transaction.commit()

    async def _work(self) -> None:
        if self._settings.handling:
            await anyio.sleep(self._random.uniform(0.0, self._settings.handling))
        await anyio.sleep(max(0.0, self.paused_until - self._now()))

    def positions(self) -> Any:
        """Return the durable positions of this consumer's partitions."""
        return self._database.positions.get(self.key, {})

    # ------------------------------------------------------------------ cancellation

    async def _impatiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await `call()`, which is now and then cancelled after a few steps and made again."""
        while self._random.random() < self._settings.impatience:
            steps = self._random.randint(0, 20)
            ended = await (self._natively if self._native else self._by_scope)(call, steps)
            if ended:
                return ended[0]
        return await call()

    async def _by_scope(self, call: Callable[[], Awaitable[T]], steps: int) -> list[T]:
        ended: list[T] = []
        failed: list[Exception] = []

        async def cancel_later() -> None:
            await self._few_steps(steps)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel_later)
            try:
                ended.append(await call())
            except Exception as error:  # noqa: BLE001 - raised below, without a group around it
                failed.append(error)
            tasks.cancel_scope.cancel()
        if failed:
            raise failed[0]
        return ended

    async def _natively(self, call: Callable[[], Awaitable[T]], steps: int) -> list[T]:
        async def called() -> list[T]:
            try:
                return [await call()]
            except StopAsyncIteration as end:
                raise _Ended from end

        task = asyncio.ensure_future(called())
        try:
            await self._few_steps(steps)
        finally:
            task.cancel()
            await asyncio.wait([task])
        try:
            return [] if task.cancelled() else task.result()
        except _Ended:
            raise StopAsyncIteration from None

    async def _few_steps(self, steps: int) -> None:
        for _ in range(steps):
            await anyio.sleep(self._random.choice((0.0, 0.0, 0.0, 0.003)))


class _Ended(Exception):  # noqa: N818 - not an error: no coroutine can raise StopAsyncIteration
    """The iteration is at its end."""


class Life:
    """Starts a process, and another one whenever it has ended.

    Arguments:
        start: makes the next process.
        native: whether tasks can be cancelled natively (asyncio).
    """

    def __init__(
        self,
        start: Callable[[], Process],
        *,
        oracle: Oracle,
        database: Database,
        trace: Trace,
        native: bool,
        now: Callable[[], float],
    ) -> None:
        self.process: Process | None = None
        self.over = False
        self.calm_since = float("inf")
        """When all faults had ended; some time later no error is justified any more."""
        self._start = start
        self._oracle = oracle
        self._database = database
        self._trace = trace
        self._native = native
        self._now = now
        self._down_until = 0.0
        self._scope = anyio.CancelScope()
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Live until `end`."""
        while not self.over:
            if self._now() < self._down_until:
                await anyio.sleep(self._down_until - self._now())
            self.process = self._start()
            self._trace.add("a process starts")
            await self.live(self.process)
            self.process = None
            await anyio.sleep(RESTART_SECONDS)

    async def live(self, process: Process) -> bool:
        """Run one process. Return whether it ended by itself and without an error."""
        ended = False
        with anyio.CancelScope() as self._scope:
            try:
                if self._native:
                    ended = await self._in_a_task(process)
                else:
                    await process.run()
                    ended = True
            except Exception as error:  # noqa: BLE001 - whatever ends a process is judged
                self._failed(process, error)
        self._oracle.traffic(process.transport)
        return ended

    async def _in_a_task(self, process: Process) -> bool:
        self._task = asyncio.ensure_future(process.run())
        try:
            await asyncio.wait([self._task])
        finally:
            self._task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([self._task])
        if self._task.cancelled():
            return False
        self._task.result()
        return True

    def _failed(self, process: Process, error: Exception) -> None:
        self._trace.add("the process ends with {}: {}", type(error).__name__, error)
        if process.session.dead:
            return
        fenced = isinstance(error, FencedError) and not self._database.failures
        expected = isinstance(error, (FeedError, ConnectionLostError))
        late = self._now() > self.calm_since
        if fenced or late or not expected or isinstance(error, _NEVER_RIGHT):
            self._oracle.violated("error", f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------------ what happens to it

    def happens(self, what: str, seconds: float = 0.0) -> None:
        """Let something happen to the process that runs now, if one does."""
        process = self.process
        if process is None:
            return
        if what in ("kill", "down"):
            process.die()
            self._scope.cancel()
            self._down_until = self._now() + seconds
        elif what == "cancel-natively" and self._task is not None:
            self._task.cancel()
        elif what in ("cancel", "cancel-natively"):
            self._scope.cancel()
        elif what == "pause":
            process.paused_until = self._now() + 10.0
        elif process.consumer is not None:
            process.leaving = what == "leave"
            process.consumer.stop()

    def end(self) -> None:
        """Cancel the process, and start none any more."""
        self.over = True
        self._scope.cancel()


def _effect(partition: int, event: Any) -> Effect:
    payload = event.json()
    return Effect(payload["entity"], payload["n"], partition)
