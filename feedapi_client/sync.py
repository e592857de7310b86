"""`SyncFeedConsumer`: the same consumer for programs without async."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context, copy_context
from functools import partial
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, cast

import anyio
import anyio.lowlevel
import orjson

from feedapi_client.arguments import (
    check_count,
    check_not_awaitable,
    check_plain_function,
    check_seconds,
)
from feedapi_client.causes import failure_of
from feedapi_client.consumer import BatchIterator, EventIterator, FeedConsumer
from feedapi_client.errors import CommitOrderError
from feedapi_client.http.io import AsyncHTTP
from feedapi_client.model import (
    Batch,
    Event,
    FeedKey,
    Partition,
    Payload,
    being_handled,
    remembers,
)
from feedapi_client.notifications import Listeners
from feedapi_client.options import FetchOptions, Limits, RetryPolicy, Share
from feedapi_client.quarantine.handling import DryRunPassed
from feedapi_client.quarantine.policy import OnFailure
from feedapi_client.runtime.loop_thread import LoopThread, NotOpenError
from feedapi_client.status import ConsumerStatus, Health
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.threads import LOOK_SECONDS, CallerThread

T = TypeVar("T")

D = TypeVar("D", bound="Batch[Any] | Event[Any]")

_HANDLER = "def handle(batch): ..."
_EVENT_HANDLER = "def handle(event): ..."


class SyncBatch(Generic[Payload]):
    """A batch of `SyncFeedConsumer`: events closed by a checkpoint, and their commit.

    Like `Batch`: iterating gives its events, its length is their number, and it is always true.

    Attributes:
        partition: the partition of all its events.
        events: the events, oldest first.
        cursor: resumes *after* the last of the events.
    """

    __slots__ = ("_batch", "_committed", "_loop", "cursor", "events", "partition")

    def __init__(self, batch: Batch[Payload], loop: LoopThread) -> None:
        self.partition: int = batch.partition
        self.events: Sequence[Event[Payload]] = batch.events
        self.cursor: str = batch.cursor
        self._batch = batch
        self._loop = loop
        self._committed = False

    def commit(self, transaction: Any = None) -> None:
        """Save the cursor. Returns when it is saved, as `Batch.commit` does, and raises the same.

        Arguments:
            transaction: the caller's own synchronous transaction, such as a `sqlite3.Connection`.
                The cursor is then saved as a part of it. Its statements run in the thread that
                calls this method, and in no other.

        Interruption: Ctrl-C is raised when the save is through or undone. One that strikes in a
        statement of the caller's transaction leaves that to be rolled back.
        """

        async def commit(caller: CallerThread) -> None:
            with caller.lent():
                await self._batch.commit(transaction)

        try:
            self._loop.call(commit)
        except NotOpenError as error:
            raise CommitOrderError(
                f"a batch up to cursor {self.cursor!r} can't be committed: {error}",
                partition=self.partition,
            ) from None
        self._committed = True

    def __iter__(self) -> Iterator[Event[Payload]]:
        """Iterate over the events."""
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __bool__(self) -> bool:
        return True  # even without events

    def __repr__(self) -> str:
        return f"<SyncBatch{repr(self._batch).removeprefix('<Batch')}"


class SyncFeedConsumer(Generic[Payload]):
    """Reads a feed as `FeedConsumer` does, from ordinary code.

    ::

        with SyncFeedConsumer("https://service/myfeed", store=store) as consumer:
            for batch in consumer.batches():
                with connection:                          # a transaction of sqlite3
                    apply(connection, batch.events)
                    batch.commit(transaction=connection)  # cursor and effects: exactly once

    Takes the arguments of `FeedConsumer`, with the same meaning. Consume in one of four ways:
    ``for event in consumer``, ``for batch in consumer.batches()``, ``consumer.run(handle)``,
    ``consumer.run_by_key(handle, key=key)``.

    An event loop in a thread of its own fetches, decodes pages, and saves cursors. The application
    gets whole batches from it. `decoder`, handlers and the statements of the caller's transaction
    run in threads of the application. The functions that options take (`RetryPolicy.decide`,
    `Share.on_assigned` and `on_release`, which are asynchronous) run in the event loop's thread; so
    does the `key` of `run_by_key`, and with it the `decoder`.

    Leaving: the block may be left at any time. What was not committed is read again the next time.
    Afterwards no thread, task or connection of the consumer is left.

    Ctrl-C: `KeyboardInterrupt` is raised wherever the main thread waits for the consumer, and
    leaves it usable. A second one, while the first is dealt with, is raised at once.

    Concurrency: one thread at a time iterates. `status`, `health`, `topology` and `stop` may be
    called in any thread. Works where an event loop runs already, as in a notebook, which it blocks
    like any ordinary call. After a fork: make it before or after, and enter it in the process that
    uses it. Needs real threads: not those of gevent or eventlet.

    Arguments:
        http: an `httpx.AsyncClient` for this consumer alone. It is used in the event loop's thread,
            and closed with the consumer, because its connections belong to that event loop.
    """

    def __init__(
        self,
        url: str,
        *,
        store: CursorStore | None = None,
        name: str = "default",
        start: Literal["first", "last"] | Mapping[int, str] | None = None,
        ordered: bool = True,
        follow: bool = True,
        partitions: Collection[int] | None = None,
        decoder: Callable[[bytes], Payload] = orjson.loads,
        v1_partitions: int | None = None,
        lineage: Mapping[int, int | None] | None = None,
        share: Share | None = None,
        feed_name: str | None = None,
        fetch: FetchOptions | None = None,
        retry: RetryPolicy | None = None,
        limits: Limits | None = None,
        on_error: Literal["raise", "park"] = "raise",
        http: AsyncHTTP | None = None,
    ) -> None:
        self._consumer: _Consumer[Payload] = _Consumer(
            url,
            store=store,
            name=name,
            start=start,
            ordered=ordered,
            follow=follow,
            partitions=partitions,
            decoder=decoder,
            v1_partitions=v1_partitions,
            lineage=lineage,
            share=share,
            feed_name=feed_name,
            fetch=fetch,
            retry=retry,
            limits=limits,
            on_error=on_error,
            http=http,
        )
        self._http = http
        self._loop: LoopThread | None = None

    def __repr__(self) -> str:
        return f"<SyncFeedConsumer {self.key}>"

    def __enter__(self) -> Self:
        """Load the cursors and discover the feed, as entering a `FeedConsumer` does."""
        if self._loop is not None:
            raise RuntimeError("the consumer is open already")
        # It must not hold this object: one that is forgotten unclosed ends its thread.
        held = _opened(self._consumer, self._http)
        loop = LoopThread(held, f"feedapi {self.key.name}")
        self._finalizer = weakref.finalize(self, loop.end)
        self._consumer.stop_asked = False
        self._loop = loop
        try:
            loop.open()
        except BaseException:
            self._loop = None
            loop.close()
            self._finalizer.detach()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        loop = self._loop
        if loop is not None:
            loop.check_waits()
            self._loop = None
            loop.close()
            self._finalizer.detach()  # not of one that an interruption has left open

    # ------------------------------------------------------------------ four ways to consume

    def __iter__(self) -> Iterator[Event[Payload]]:
        """Iterate over events.

        A batch is committed when the loop asks for the event after its last one.
        """
        return _Events(self, EventIterator(BatchIterator(self._consumer)))

    def batches(self) -> Iterator[SyncBatch[Payload]]:
        """Iterate over batches of all partitions, one at a time. See `FeedConsumer.batches`.

        Nothing is committed but by ``batch.commit(...)``.
        """
        return _Batches(self, BatchIterator(self._consumer))

    def run(
        self,
        handle: Callable[[SyncBatch[Payload]], object],
        *,
        threads: int = 1,
        on_failure: OnFailure = "raise",
    ) -> None:
        """Call ``handle(batch)`` for each batch, as `FeedConsumer.run` does.

        With one thread that is the calling one. With more they are threads of `run`, which end
        with it: partitions are handled at once, each one's batches in order. A batch that the
        handler has not committed itself is committed when it returns.

        `on_failure` as in `FeedConsumer.run`. A thread can't be cancelled: when a handler ends
        the iteration by raising, the others finish and commit what they have, and then `run`
        raises.

        Interruption: after Ctrl-C nothing new is delivered. With several threads the handlers
        finish and commit what they have, unless there is a second Ctrl-C. Then, and after the grace
        period of `stop`, handlers that still run are left behind; their commits raise
        `CommitOrderError`.

        Raises TypeError for a handler that is asynchronous, and TypeError or ValueError for other
        arguments, before anything is delivered.
        """
        check_plain_function("the handler", handle, _HANDLER)
        check_count("threads", threads)
        loop = self._open_loop()
        consumer, store = self._consumer, self.store  # a thread must not keep this object alive

        def called(batch: Batch[Payload]) -> DryRunPassed | None:
            given = SyncBatch(batch, loop)
            try:
                result = _handled(handle, given)
            except DryRunPassed as passed:
                return passed
            check_not_awaitable(result, "the handler", _HANDLER)
            if not given._committed:
                _check_thread(store)
            return None

        async def consume(work: Callable[[Batch[Payload]], Awaitable[None]]) -> None:
            await consumer.run(work, on_failure=on_failure, max_concurrency=threads)

        _run(loop, consumer, called, consume, threads)

    def run_by_key(
        self,
        handle: Callable[[Event[Payload]], object],
        *,
        key: Callable[[Event[Payload]], Hashable],
        event_id: Callable[[Event[Payload]], object] | None = None,
        threads: int = 32,
        max_in_flight: int = 10_000,
        on_failure: OnFailure = "raise",
    ) -> None:
        """Call ``handle(event)`` for each event: different keys at once, each one's in order.

        As `FeedConsumer.run_by_key` does, in so many threads; with one, in the calling one. For
        handlers that wait, such as for a service. What computes needs processes: let the handler
        wait for a `concurrent.futures.ProcessPoolExecutor` of your own, which gets ``event.raw``.

        With `event_id` the handler calls ``event.done(transaction=...)`` as its last step, in the
        transaction of its own thread.

        `key` and `event_id` are called in the event loop's thread, for each event before it is
        handled: they have to be quick. `threads`, ends and interruption as in `run`: what a thread
        handles is finished, and its cursor saved, unless an earlier event of the partition is not
        done.

        Raises TypeError for a handler that is asynchronous or a key that is no function, and
        TypeError or ValueError for other arguments, before anything is delivered.
        """
        check_plain_function("the handler", handle, _EVENT_HANDLER)
        check_count("threads", threads)
        loop, consumer, store = self._open_loop(), self._consumer, self.store

        def called(event: Event[Payload]) -> None:
            with _done_in_thread(event, loop):
                check_not_awaitable(_handled(handle, event), "the handler", _EVENT_HANDLER)
            _check_thread(store)

        async def consume(work: Callable[[Event[Payload]], Awaitable[None]]) -> None:
            await consumer.run_by_key(
                work,
                key=key,
                event_id=event_id,
                max_concurrency=threads,
                max_in_flight=max_in_flight,
                on_failure=on_failure,
            )

        _run(loop, consumer, called, consume, threads)

    # ------------------------------------------------------------------ beside an iteration

    def stop(self, *, grace: float | None = None) -> None:
        """End the iteration after the batches in flight. See `FeedConsumer.stop`.

        May be called in any thread, and in a signal handler::

            signal.signal(signal.SIGTERM, lambda *_: consumer.stop(grace=30))

        What is in flight can be committed for at most `grace` seconds. Then a commit raises
        `CommitOrderError`, and `run` leaves behind what still runs in its threads. In the thread
        that `run` was called in it waits for the handler.
        """
        check_seconds("grace", grace)
        if self._loop is not None:
            self._consumer.stop_asked = True
            self._loop.post(partial(self._consumer.stop, grace=grace))

    def status(self) -> ConsumerStatus:
        """A snapshot of every partition. Costs time linear in their number."""
        return self._now(self._consumer.status)

    def health(self) -> Health:
        """Return whether the consumer works, and what is wrong. See `FeedConsumer.health`."""
        return self._now(self._consumer.health)

    def topology(self) -> Mapping[int, Partition]:
        """Return the partitions and edges of the last good discovery. Not to be changed."""
        return self._now(self._consumer.topology)

    @property
    def feed(self) -> str:
        """The feed's URL, without credentials and query."""
        return self._consumer.feed

    @property
    def key(self) -> FeedKey:
        """What cursors are stored under."""
        return self._consumer.key

    @property
    def store(self) -> CursorStore:
        """Where cursors are kept."""
        return self._consumer.store

    @property
    def limits(self) -> Limits:
        """The limits that it was given."""
        return self._consumer.limits

    @property
    def instance(self) -> str | None:
        """The name of this instance in `PartitionStatus.owner`; None without `share`."""
        return self._consumer.instance

    @property
    def _listeners(self) -> Listeners:
        """What `feedapi_client.telemetry` is attached to."""
        return self._consumer._listeners

    @property
    def cut_short(self) -> bool:
        """Whether the grace period of `stop` was over before all in flight was committed."""
        return self._consumer.cut_short

    def _now(self, function: Callable[[], T]) -> T:
        """Call a function in the event loop, or here when there is none."""
        loop = self._loop

        async def call(_: CallerThread) -> T:
            return function()

        if loop is None or loop.is_current:
            return function()
        try:
            return loop.call(call)
        except NotOpenError:
            return function()  # it was closed meanwhile

    def _open_loop(self) -> LoopThread:
        if self._loop is None:
            raise RuntimeError("the consumer is not open: use it inside 'with'")
        return self._loop


@asynccontextmanager
async def _opened(consumer: _Consumer[Any], http: AsyncHTTP | None) -> AsyncIterator[None]:
    # Once the entry has begun, which it does before it first waits.
    asyncio.get_running_loop().call_soon(consumer.stop_if_asked)
    try:
        async with consumer:
            yield
    finally:
        if http is not None:
            with anyio.CancelScope(shield=True):
                await http.aclose()


@contextmanager
def _done_in_thread(event: Event[Any], loop: LoopThread) -> Iterator[None]:
    """Let `Event.done` use the transaction of the calling thread, within the block."""
    remember = remembers(event)
    if remember is None:
        yield
        return

    def call(transaction: Any) -> Awaitable[None]:
        async def work(caller: CallerThread) -> None:
            with caller.lent():
                await remember(transaction)

        try:
            loop.call(work)
        except NotOpenError as error:
            raise CommitOrderError(
                f"the event can't be done: {error}", partition=event.partition
            ) from None
        return cast(Awaitable[None], None)  # nothing is left to be awaited

    with being_handled(event, call):
        yield


def _handled(handle: Callable[[T], object], delivered: T) -> object:
    """Call the handler. A `CancelledError` of something that it awaited is its failure (R20)."""
    try:
        return handle(delivered)
    except asyncio.CancelledError as error:
        raise failure_of(error, "the handler")  # noqa: B904 - its cause is set


def _check_thread(store: CursorStore) -> None:
    """Check that the consumer may save a cursor on its own while this thread waits."""
    check = getattr(store, "check_thread", None)  # of a library whose transactions have threads
    if check is not None:
        check()


class _Consumer(FeedConsumer[Payload]):
    leave_behind: Callable[[], None] | None = None
    stop_asked = False
    """Whether `stop` was called since the entry began, perhaps before an event loop ran."""

    def stop_if_asked(self) -> None:
        if self.stop_asked:
            self.stop()

    def _cut_short(self, grace: float) -> None:
        super()._cut_short(grace)
        if self.cut_short and self.leave_behind is not None:
            self.leave_behind()


class _Batches(Generic[Payload]):
    def __init__(self, consumer: SyncFeedConsumer[Payload], source: BatchIterator[Payload]) -> None:
        self._consumer = consumer
        self._source = source
        self._batch: Batch[Payload] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SyncBatch[Payload]:
        loop = self._consumer._open_loop()
        # One may be there that an interrupted call has left.
        if self._batch is None and not loop.call(self._advance):
            raise StopIteration
        assert self._batch is not None
        batch = SyncBatch(self._batch, loop)
        self._batch = None
        return batch

    async def _advance(self, _: CallerThread) -> bool:
        # Kept here, in the event loop: a thread that is interrupted gets no result.
        self._batch = await anext(self._source, None)
        return self._batch is not None


class _Events(Generic[Payload]):
    """``for event in consumer``. One call to the event loop for each batch."""

    def __init__(self, consumer: SyncFeedConsumer[Payload], source: EventIterator[Payload]) -> None:
        self._consumer = consumer
        self._source = source

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event[Payload]:
        while True:
            for event in self._source.events:
                return event
            _check_thread(self._consumer.store)
            if not self._consumer._open_loop().call(self._advance):
                raise StopIteration

    async def _advance(self, _: CallerThread) -> bool:
        try:
            await self._source.next_batch()
        except StopAsyncIteration:
            return False
        return True


def _run(
    loop: LoopThread,
    consumer: _Consumer[Any],
    called: Callable[[D], BaseException | None],
    consume: Callable[[Callable[[D], Awaitable[None]]], Awaitable[None]],
    threads: int,
) -> None:
    """Await `consume` with what has the handler called in so many threads; one is this one.

    `called` calls the handler, and returns what a dry run ends with.
    """
    if threads > 1:
        _HandlerThreads(loop, consumer, called, threads).run(consume)
        return

    async def run(caller: CallerThread) -> None:
        async def work(delivered: D) -> None:
            if (passed := await caller.run(partial(called, delivered))) is not None:
                raise passed

        await consume(work)

    loop.call(run)


class _HandlerThreads(Generic[D]):
    """The threads of `SyncFeedConsumer.run` and `run_by_key`."""

    def __init__(
        self,
        loop: LoopThread,
        consumer: _Consumer[Any],
        called: Callable[[D], BaseException | None],
        threads: int,
    ) -> None:
        self._loop = loop
        self._consumer = consumer
        self._called = called
        self._pool = CallerThread()
        self._threads = [
            threading.Thread(target=self._pool.wait, name=f"feedapi handler {n}", daemon=True)
            for n in range(threads)
        ]
        self._busy: set[int] = set()
        self._waiting: set[anyio.CancelScope] = set()
        self._scope: anyio.CancelScope
        self._ending: BaseException | None = None

    def run(self, consume: Callable[[Callable[[D], Awaitable[None]]], Awaitable[None]]) -> None:
        async def run(_: CallerThread) -> None:
            self._consumer.leave_behind = self._leave_behind
            with anyio.CancelScope() as self._scope:
                await consume(self._work)

        try:
            for thread in self._threads:
                thread.start()
            self._loop.call(run)
        finally:
            # What still runs was interrupted twice, or had its grace period.
            self._pool.is_over = True
            self._loop.post(self._leave_behind)
            self._pool.over()
            for thread in self._threads:
                while thread.is_alive() and thread.ident not in self._busy:
                    thread.join(LOOK_SECONDS)
        if self._ending is not None:
            raise self._ending

    async def _work(self, delivered: D) -> None:
        """Have a thread handle what is delivered, and wait for it even if then cancelled."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        ended: BaseException | None = None
        with anyio.CancelScope(shield=True) as waiting:
            self._waiting.add(waiting)
            try:
                ended = await self._pool.run(partial(self._in_thread, delivered, copy_context()))
            finally:
                self._waiting.discard(waiting)
        if waiting.cancelled_caught:
            await anyio.lowlevel.checkpoint()  # of a task that is cancelled
            raise CommitOrderError("its handler was left behind", partition=delivered.partition)
        if isinstance(ended, DryRunPassed):
            raise ended
        if ended is not None:  # SystemExit, say, which must not end the event loop
            self._ending = ended
            self._scope.cancel()
            await anyio.sleep_forever()

    def _in_thread(self, delivered: D, context: Context) -> BaseException | None:
        self._busy.add(threading.get_ident())
        try:
            return context.run(self._called, delivered)
        except Exception:
            raise
        except BaseException as error:  # noqa: BLE001 - raised in the thread that called `run`
            return error
        finally:
            self._busy.discard(threading.get_ident())

    def _leave_behind(self) -> None:
        for waiting in list(self._waiting):
            waiting.cancel()
