"""The application's process, its network and its store: all of them fail."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, get_args

import anyio
import httpx
import orjson

from feedapi_client import Batch, CursorStore, FeedConsumer, FeedKey, Position, Retry
from feedapi_client.model import make_event
from feedapi_client.testing.publisher import Publisher, Response
from feedapi_client.testing.publisher.messages import parse_request
from feedapi_client.testing.simulator.oracle import Call, Found, Oracle, Trace
from feedapi_client.testing.simulator.scenario import drawn

Handler = Callable[[Batch], Awaitable[object]]
Start = Callable[[Any], Handler | AbstractAsyncContextManager[Handler]]
Applied = Callable[[Any], Found | Awaitable[Found]]
Payload = Callable[[int, int], Any]
Moment = Literal["before the commit", "after the commit", "after the handler"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
StoreTrouble = Literal["fails", "stalls"]

FEED = "http://simulated/feed"
_SILENT_SECONDS = 30.0
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


@dataclass(frozen=True, slots=True)
class Application:
    """What the user gave: see `simulate`."""

    handler: Handler | Start
    applied: Applied | None
    event: Payload
    on_failure: Literal["raise", "retry"] | Retry
    max_concurrency: int | None

    @asynccontextmanager
    async def started(self, store: CursorStore) -> AsyncIterator[Handler]:
        given: Any = self.handler
        made = given if _is_handler(given) else given(store)
        if hasattr(made, "__aenter__"):
            async with made as handler:
                yield handler
        else:
            yield made

    async def look(self, store: CursorStore, oracle: Oracle) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What stays the same during a history. Times are the longest ones, without a fault."""

    partitions: int = drawn(1, 1, 2, 3, 4, 12)
    page_size: int = drawn(1, 5, 20, 100)
    checkpoint_every: int = drawn(1, 4, 30)
    vary: bool = drawn(False, True)
    latency: float = drawn(0.005, 0.02, 0.3)
    store_latency: float = drawn(0.001, 0.01, 0.2)
    handling: float = drawn(0.0, 0.01, 0.3, 1.0)
    max_concurrency: int = drawn(1, 3, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What is around a process: the same for all processes of a history.

    Attributes:
        store_faults: what goes wrong with the store: how, the part of its operations, until when.
    """

    application: Application
    store: CursorStore
    publisher: Publisher
    oracle: Oracle
    settings: Settings
    random: Random
    trace: Trace
    store_faults: list[tuple[StoreTrouble, float, float]] = field(default_factory=list)

    async def sleep(self, longest: float) -> None:
        await anyio.sleep(self.random.uniform(0.0, longest))


class Flaky:
    """The connection of one process to the application's store: a `CursorStore`.

    Operations take time and fail: half of those that fail take effect before. In a process that was
    killed nothing goes on.
    """

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        await self._before()
        return await self._world.store.load(feed)

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        world = self._world
        if transaction is not None:
            # Without a pause: SQLite has one writer at a time, and it would keep others waiting.
            self._may_fail()
            await world.store.save(feed, positions, transaction=transaction)
            return
        await self._before()
        await world.store.save(feed, positions)
        world.trace.add("saved {}", positions)
        world.oracle.stored(positions)
        await world.sleep(world.settings.store_latency)
        self._may_fail()

    async def _before(self) -> None:
        await self._world.sleep(self._world.settings.store_latency)
        if self._hits("stalls"):
            await self._world.sleep(_STALL_SECONDS)
        self._may_fail()

    def _may_fail(self) -> None:
        if self._process.dead:
            raise Killed
        if self._hits("fails"):
            self._world.trace.add("the store's connection breaks")
            raise ConnectionLostError

    def _hits(self, trouble: StoreTrouble) -> bool:
        now, draw = self._world.trace.now(), self._world.random.random
        return any(
            how == trouble and now < until and draw() < part / 2
            for how, part, until in self._world.store_faults
        )


class Network(httpx.AsyncBaseTransport):
    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        world = self._world
        if self._process.dead:
            raise httpx.ConnectError("simulated: the process is gone", request=request)
        await world.sleep(world.settings.latency)
        scope = {
            "method": request.method,
            "path": request.url.path,
            "query_string": request.url.query,
            "headers": request.headers.raw,
        }
        publisher = world.publisher
        answer = publisher.respond(parse_request(publisher.path, scope, world.trace.now())).whole()
        world.trace.add(
            "GET {} -> {}",
            request.url.raw_path.decode(),
            f"{answer.status} {len(answer.body.splitlines())} lines"
            if answer.send_head
            else answer.ending,
        )
        if answer.ending == "hang":
            await anyio.sleep(request.extensions["timeout"]["read"] or _SILENT_SECONDS)
            raise httpx.ReadTimeout("simulated: silence", request=request)
        if not answer.send_head:
            raise httpx.ConnectError("simulated: connection refused", request=request)
        return httpx.Response(answer.status, headers=answer.headers, content=_sent(answer))


async def _sent(answer: Response) -> AsyncIterator[bytes]:
    yield answer.body
    if answer.ending != "complete":
        raise httpx.RemoteProtocolError("simulated: the connection is gone")


class Process:
    """One process, from its start to its end.

    Attributes:
        consumer: what it consumes with.
        dead: whether it was killed: whatever it still does has no effect.
        dies: when it is killed during the next call of the handler.
        paused_until: the virtual time up to which it hangs.
        scope: cancelling it cancels the process.
        error: what it ended with, unless the simulation has caused that.
    """

    def __init__(self, world: World, *, follow: bool) -> None:
        self.dead = False
        self.dies: Moment | None = None
        self.paused_until = 0.0
        self.scope = anyio.CancelScope()
        self.error: BaseException | None = None
        self._world = world
        self._http = httpx.AsyncClient(transport=Network(world, self), trust_env=False)
        store = Flaky(world, self)
        self.consumer = FeedConsumer(FEED, store=store, follow=follow, http=self._http)

    def kill(self) -> None:
        self.dead = True
        self.scope.cancel()

    async def run(self) -> bool:
        """Consume until it ends. Return whether it ended by itself and without an error."""
        others, ended = _tasks(), False
        with self.scope:
            try:
                await self._run()
                ended = not self.dead
            except Exception as error:  # noqa: BLE001 - whatever ends a process is judged
                self.error = error
            except Killed:
                pass
            except BaseExceptionGroup as group:
                rest = group.split((Killed, Exception))[1]  # errors beside it are results of it
                if rest is not None:
                    raise rest from None
            finally:
                # What the application leaves behind ends with its process.
                for task in _tasks() - others:
                    task.cancel()
        return ended

    async def _run(self) -> None:
        application = self._world.application
        async with application.started(self._world.store) as handler, self._http, self.consumer:

            async def handle(batch: Batch) -> None:
                await self._handle(handler, batch)

            await self.consumer.run(
                handle,
                on_failure=application.on_failure,
                max_concurrency=application.max_concurrency or self._world.settings.max_concurrency,
            )

    async def _handle(self, handler: Handler, batch: Batch) -> None:
        world, partition = self._world, batch.partition
        await world.sleep(world.settings.handling)
        await anyio.sleep(max(0.0, self.paused_until - world.trace.now()))
        call = world.oracle.calls[partition] = Call(batch)
        payloads = (world.application.event(entity, n) for entity, n in call.events)
        events = [make_event(partition, orjson.dumps(payload)) for payload in payloads]
        await handler(Batch(partition, events, batch.cursor, self._commit))
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
            self._world.trace.add("the process is killed {}", moment)
            self.kill()
        if self.dead:
            raise Killed


def _tasks() -> set[asyncio.Task[Any]]:
    """Return the tasks of asyncio that are not done. trio's end with the block of their parent."""
    try:
        return asyncio.all_tasks()
    except RuntimeError:
        return set()
