"""An application of a user's own, as a process of a simulated history."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import orjson

from feedapi_client.model import Batch, Event, Position, make_event
from feedapi_client.quarantine.policy import Handler, Retry
from feedapi_client.stores.base import CursorStore
from feedapi_client.testing.simulator.effects import Effects, Found
from feedapi_client.testing.simulator.oracle import Oracle
from feedapi_client.testing.simulator.process import Process
from feedapi_client.testing.simulator.store import ConnectionLostError, Effect
from feedapi_client.testing.simulator.watched_store import (
    Killed,
    StoredPositions,
    WatchedStore,
    is_simulated,
)

Start = Callable[[Any], Handler | AbstractAsyncContextManager[Handler]]
Applied = Callable[[Any], Found | Awaitable[Found]]
Payload = Callable[[int, int], Any]
Moment = Literal["before the commit", "after the commit", "after the handler"]

MOMENTS: tuple[Moment, ...] = ("before the commit", "after the commit", "after the handler")


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """What the user gave: see `simulate`."""

    handler: Handler | Start
    applied: Applied | None
    event: Payload
    on_failure: Literal["raise", "retry"] | Retry
    max_concurrency: int | None

    @asynccontextmanager
    async def started(self, store: CursorStore) -> AsyncIterator[Handler]:
        """Start the application in a new process: give its handler."""
        if is_handler(self.handler):
            yield self.handler  # type: ignore[misc]
            return
        made: Any = self.handler(store)  # type: ignore[arg-type]
        if hasattr(made, "__aenter__"):
            async with made as handler:
                yield handler
        else:
            yield made

    async def look(self, store: CursorStore, effects: Effects) -> None:
        """Check what the handler wrote so far."""
        if self.applied is None:
            return
        found = self.applied(store)
        if isinstance(found, Awaitable):
            with anyio.CancelScope(shield=True):
                effects.check(await found)
        else:
            effects.check(found)


def is_handler(given: Any) -> bool:
    """Return whether it is a handler itself, and not a function that makes one."""
    called = given if inspect.isroutine(given) or not callable(given) else type(given).__call__
    return inspect.iscoroutinefunction(given) or inspect.iscoroutinefunction(called)


class Call:
    """One call of the handler: its events, and whether they count as handled already."""

    def __init__(self, batch: Batch, effects: list[Effect]) -> None:
        self.batch = batch
        self.effects = effects
        self.handled = False


class Calls:
    """The last call of the handler for each partition, over all lives of the process."""

    def __init__(self, oracle: Oracle) -> None:
        self.last: dict[int, Call] = {}
        self._oracle = oracle

    def begin(self, batch: Batch, effects: list[Effect]) -> Call:
        """Record that the handler is called."""
        call = self.last[batch.partition] = Call(batch, effects)
        return call

    def handled(self, call: Call) -> None:
        """Record that the handler is done with the events: it returned, or committed them."""
        if not call.handled:
            call.handled = True
            for effect in call.effects:
                self._oracle.effect(effect)

    def saved(self, partition: int, position: Position) -> None:
        """Record that a position is durable, and with it the batch that it belongs to."""
        call = self.last.get(partition)
        if call is not None and call.batch.cursor == position.cursor:
            self.handled(call)


class ApplicationProcess(Process):
    """One process that runs the user's handler over the user's store."""

    def __init__(
        self,
        *args: Any,
        application: Application,
        positions: StoredPositions,
        calls: Calls,
        effects: Effects,
        failed: Callable[[BaseException], None],
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.session: WatchedStore = WatchedStore(positions)
        self.dies: Moment | None = None
        """When it is killed during the next call of the handler."""
        self._application = application
        self._positions = positions
        self._effects = effects
        self._failed = failed
        self._calls = calls
        self._call: Handler | None = None

    async def run(self) -> None:
        """Consume until stopped or, without `follow`, to the end of the feed."""
        store = self._positions.store
        try:
            async with self._application.started(store) as self._call:
                await super().run()
        except Killed:
            pass
        except BaseExceptionGroup as group:
            rest = group.split(Killed)[1]
            if rest is not None:
                raise rest from None
        except Exception as error:
            if is_simulated(error):
                raise ConnectionLostError from error
            self._failed(error)
            raise
        finally:
            await self._application.look(store, self._effects)

    async def _consume(self, consumer: Any) -> None:
        concurrency = self._application.max_concurrency or self._random.choice((1, 3, 20))
        await consumer.run(
            self._handle,
            on_failure=self._application.on_failure,
            max_concurrency=concurrency,
        )

    # ------------------------------------------------------------------ one call of the handler

    async def _handle(self, batch: Batch) -> None:
        assert self._call is not None
        self._oracle.delivered(batch.partition, self.positions())
        await self._work()
        effects = [self._effect(batch.partition, event) for event in batch.events]
        call = self._calls.begin(batch, effects)
        events = [self._event(batch.partition, effect) for effect in call.effects]
        await self._call(Batch(batch.partition, events, batch.cursor, self._commit))
        self.session.joined(batch.partition)
        self._calls.handled(call)
        self._may_die("after the handler")

    def _event(self, partition: int, effect: Effect) -> Event:
        payload = self._application.event(effect.entity, effect.n)
        return make_event(partition, orjson.dumps(payload))

    async def _commit(self, batch: Batch, transaction: Any) -> None:
        """Commit what was delivered: the handler has called ``batch.commit``."""
        call = self._calls.last[batch.partition]
        self._may_die("before the commit")
        await call.batch.commit(transaction)
        if transaction is None:
            self._calls.handled(call)
        self._may_die("after the commit")

    def _may_die(self, moment: Moment) -> None:
        if self.session.dead:
            raise Killed
        if self.dies == moment:
            self._trace.add("the process is killed {}", moment)
            self.die()
            raise Killed
