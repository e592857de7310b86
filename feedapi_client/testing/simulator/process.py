"""The application's process: it is killed, cancelled, paused, and its store is slow and fails."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, get_args

import anyio
import httpx
import orjson

from feedapi_client import (
    Batch,
    CursorStore,
    FeedConsumer,
    FeedKey,
    FencedError,
    Limits,
    Position,
    Retry,
)
from feedapi_client.model import make_event
from feedapi_client.testing.simulator.network import FEED, Feed, Network
from feedapi_client.testing.simulator.oracle import (
    Call,
    Found,
    Oracle,
    Positions,
    StoreModel,
    Trace,
)

Handler = Callable[[Batch], Awaitable[object]]
Start = Callable[[Any], Handler | AbstractAsyncContextManager[Handler]]
Applied = Callable[[Any], Found | Awaitable[Found]]
Payload = Callable[[int, int], Any]
Moment = Literal["before the commit", "after the commit", "after the handler"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)

_STALL_SECONDS = 60.0
"""The longest time that an operation takes while the store stalls."""


class ConnectionLostError(Exception):
    """The store's connection broke: before an operation took effect, or after it."""


class Killed(BaseException):
    """The process is gone. Not an `Exception`, because no handler of errors runs in such a case."""


def is_simulated(error: BaseException) -> bool:
    """Return whether an error goes back to a failure that the simulation has caused."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if isinstance(each, (ConnectionLostError, Killed)):
            return True
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            left += (each.__cause__, each.__context__, *getattr(each, "exceptions", ()))
    return False


# ---------------------------------------------------------------------- the store


class Trouble:
    """What goes wrong at the store, whichever process asks it.

    Attributes:
        kind: "fails" (half of the operations that fail take effect before) or "stalls".
        part: the part of the operations that it hits, until the virtual time `until`.
        failures: how often it has hit one.
    """

    def __init__(self, *, latency: float, random: Random, trace: Trace) -> None:
        self.kind, self.part, self.until = "", 0.0, 0.0
        self.failures = 0
        self._latency = latency
        self._random = random
        self._trace = trace

    async def before(self) -> None:
        """Take the time of a request to the store, or fail."""
        await anyio.sleep(self._random.uniform(0.0, self._latency))
        if self._hits("stalls", self.part):
            await anyio.sleep(self._random.uniform(0.0, _STALL_SECONDS))
        self.fail("the store fails")

    async def after(self) -> None:
        """Take the time of a reply, or lose it."""
        await anyio.sleep(self._random.uniform(0.0, self._latency))
        self.fail("the store's reply is lost")

    def fail(self, how: str) -> None:
        """Raise `ConnectionLostError`, as often as drawn."""
        if self._hits("fails", self.part / 2):
            self._trace.add(how)
            raise ConnectionLostError

    def _hits(self, kind: str, part: float) -> bool:
        there = self.kind == kind and self._trace.now() < self.until
        hit = there and self._random.random() < part
        self.failures += hit
        return hit


class Flaky:
    """The connection of one process to the application's store: a `CursorStore`.

    In a process that was killed, which is `dead`, nothing goes on.
    """

    def __init__(self, store: CursorStore, model: StoreModel, trouble: Trouble) -> None:
        self.dead = False
        self._store = store
        self._model = model
        self._trouble = trouble
        self._joined: dict[int, Position] = {}
        """What the handler has saved in its own transactions."""

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        await self._before()
        found = await self._store.load(feed)
        self._model.loaded(found)
        await self._model.probe(self._store, feed, found)
        return found

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`."""
        if transaction is None:
            await self._before()
            await self._saved(self._store.save(feed, positions), positions)
            self._model.succeeded(positions)
            await self._trouble.after()
        else:
            # Without a pause: SQLite has one writer at a time, and it would keep others waiting.
            self._check_alive()
            self._trouble.fail("the store fails")
            await self._saved(self._store.save(feed, positions, transaction=transaction), positions)
            self._joined |= positions

    async def _saved(self, saving: Awaitable[None], positions: Positions) -> None:
        self._model.began(positions)
        try:
            await saving
        except FencedError as error:
            self._model.refused(positions, error)
            raise

    def joined(self, partition: int) -> None:
        """The handler returned: what it saved in its own transaction is durable."""
        if partition in self._joined:
            self._model.succeeded({partition: self._joined.pop(partition)})

    async def _before(self) -> None:
        self._check_alive()
        await self._trouble.before()
        self._check_alive()

    def _check_alive(self) -> None:
        if self.dead:
            raise Killed


# ---------------------------------------------------------------------- the application


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
        given: Any = self.handler
        made = given if _is_handler(given) else given(store)
        if hasattr(made, "__aenter__"):
            async with made as handler:
                yield handler
        else:
            yield made

    async def look(self, store: CursorStore, oracle: Oracle) -> None:
        """Check what the handler wrote so far."""
        if self.applied is None:
            return
        found = self.applied(store)
        if isinstance(found, Awaitable):
            with anyio.CancelScope(shield=True):
                found = await found
        oracle.effects(found)  # type: ignore[arg-type]


def _is_handler(given: Any) -> bool:
    """Return whether it is a handler itself, and not a function that makes one."""
    called = given if inspect.isroutine(given) or not callable(given) else type(given).__call__
    return inspect.iscoroutinefunction(given) or inspect.iscoroutinefunction(called)


# ---------------------------------------------------------------------- the process


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What is around a process: the same for all processes of a history."""

    application: Application
    store: CursorStore
    feed: Feed
    oracle: Oracle
    model: StoreModel
    trouble: Trouble
    limits: Limits
    max_concurrency: int
    handling: float
    """The longest time until the handler is called with a batch, in seconds."""


class Process:
    """One process, from its start to its end.

    Attributes:
        dies: when it is killed during the next call of the handler.
        paused_until: the virtual time up to which it hangs.
        scope: cancelling it cancels the process.
        error: what it ended with, unless the simulation has caused that.
    """

    def __init__(self, world: World, number: int, *, follow: bool) -> None:
        self.dies: Moment | None = None
        self.paused_until = 0.0
        self.scope = anyio.CancelScope()
        self.error: BaseException | None = None
        self._world = world
        self._number = number
        self._network = Network(world.feed)
        self._store = Flaky(world.store, world.model, world.trouble)
        self._http = httpx.AsyncClient(transport=self._network, trust_env=False)
        self._consumer = FeedConsumer(
            FEED, store=self._store, follow=follow, limits=world.limits, http=self._http
        )

    @property
    def dead(self) -> bool:
        """Whether it was killed: whatever it still does has no effect."""
        return self._store.dead

    def kill(self) -> None:
        """End it at once."""
        self._store.dead = self._network.dead = True
        self.scope.cancel()

    def stop(self) -> None:
        """End it after the batches in flight."""
        self._consumer.stop()

    async def run(self) -> bool:
        """Consume until it ends. Return whether it ended by itself and without an error."""
        others = _tasks()
        with self.scope:
            try:
                await self._run()
            except Killed:
                pass
            except BaseExceptionGroup as group:
                rest = group.split(Killed)[1]
                if isinstance(rest, Exception):
                    self.error = rest
                elif rest is not None:
                    raise rest from None
            except Exception as error:  # noqa: BLE001 - whatever ends a process is judged
                self.error = error
            else:
                return not self.dead
            finally:
                # What the application leaves behind ends with its process.
                for task in _tasks() - others:
                    task.cancel()
        return False

    async def _run(self) -> None:
        application = self._world.application
        async with application.started(self._world.store) as handler, self._http, self._consumer:

            async def handle(batch: Batch) -> None:
                await self._handle(handler, batch)

            await self._consumer.run(
                handle,
                on_failure=application.on_failure,
                max_concurrency=application.max_concurrency or self._world.max_concurrency,
            )

    async def _handle(self, handler: Handler, batch: Batch) -> None:
        world, partition = self._world, batch.partition
        parent = world.feed.parents.get(partition)
        world.oracle.delivered(partition, parent, world.model.stored)
        await anyio.sleep(world.feed.random.uniform(0.0, world.handling))
        await anyio.sleep(max(0.0, self.paused_until - world.feed.now()))
        call = world.oracle.calls[partition] = Call(self._number, batch)
        payloads = (world.application.event(entity, n) for entity, n in call.events)
        events = [make_event(partition, orjson.dumps(payload)) for payload in payloads]
        await handler(Batch(partition, events, batch.cursor, self._commit))
        self._store.joined(partition)
        world.oracle.handled(call)
        self._may_die("after the handler")

    async def _commit(self, batch: Batch, transaction: Any) -> None:
        """Commit what was delivered: the handler has called ``batch.commit``."""
        call = self._world.oracle.calls[batch.partition]
        self._may_die("before the commit")
        await call.batch.commit(transaction)
        if transaction is None:
            self._world.oracle.handled(call)
        self._may_die("after the commit")

    def _may_die(self, moment: Moment) -> None:
        if self.dies == moment and not self.dead:
            self._world.feed.trace.add("the process is killed {}", moment)
            self.kill()
        if self.dead:
            raise Killed


def _tasks() -> set[asyncio.Task[Any]]:
    """Return the tasks of this event loop that are not done; none on trio.

    trio's tasks end with the block that has started them.
    """
    try:
        return asyncio.all_tasks()
    except RuntimeError:
        return set()
