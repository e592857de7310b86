"""`FeedConsumer`: a feed as an async iterator."""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Literal, Self

import anyio
import orjson

from feedapi_client.client import FeedClient
from feedapi_client.errors import LeaseLostError
from feedapi_client.http.transport import AsyncHTTP
from feedapi_client.lineage.missing_edges import checked_lineage
from feedapi_client.model import Batch, Decoder, Event, FeedKey, Partition
from feedapi_client.options import FetchOptions, Limits, RetryPolicy, Share
from feedapi_client.quarantine.handler import retrying_handler
from feedapi_client.quarantine.policy import Handler, OnFailure
from feedapi_client.runtime.background import Background
from feedapi_client.runtime.cancellation import finish
from feedapi_client.runtime.driver import Driver, Settings
from feedapi_client.runtime.grace import GracePeriod
from feedapi_client.runtime.handlers import WatchedHandler
from feedapi_client.runtime.observers import Observers
from feedapi_client.runtime.session import Session
from feedapi_client.sharing.coordinator import Coordinator, instance_name
from feedapi_client.status import ConsumerStatus, Health, Problem, ProblemName
from feedapi_client.stores.base import CursorStore
from feedapi_client.stores.leases import LeaseStore
from feedapi_client.stores.memory import MemoryCursorStore

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0


class FeedConsumer:
    """Reads a feed: every event in order within its partition and, with its cursors in the
    application's own transaction, exactly once.

    ::

        async with FeedConsumer("https://service/myfeed", store=store) as consumer:
            async for event in consumer:
                ...

    Entering the block loads the cursors and discovers the feed. For an empty store that is the
    bootstrap: nothing published after it is missed. Then consume in one of three ways:
    ``async for event in consumer``, ``async for batch in consumer.batches()``,
    ``await consumer.run(handle)``. One at a time: beginning another one ends the one before. Each
    starts from what is committed, so an iteration that was left early loses nothing.

    Concurrency: runs on asyncio and on trio. Not thread-safe.

    Cancellation: every await may be cancelled; a save that began is finished first.

    Arguments:
        url: the feed's endpoint. Its query is sent with every request; credentials in it become
            basic authentication.
        store: where cursors are kept; without one in memory, for as long as the object lives.
        name: tells consumers of the same feed apart. Two at a time with one name fence each other:
            one of them ends with `FencedError`. With `share` they divide the partitions instead.
        start: where a new name begins: "first", "last", or a cursor for each partition (the others
            begin at the first event).
        ordered: a partition is read only after those that it starts after. False reads all at once.
        follow: go on at the end of the feed. False ends the iteration once every partition was read
            to its end.
        partitions: read only these; order is kept among them. None reads all.
        decoder: what `Event.json` uses.
        v1_partitions: the number of partitions of a ZeroEventHub (version 1) feed, which can't be
            discovered.
        lineage: the parent of each child that has to wait for it, where the publisher leaves
            `startsAfterPartition` out: ``{1: 0, 2: 0}``. Such edges are added to every discovery.
            One that contradicts the discovery, or that names a partition that is neither listed
            nor stored, is a `LineageError`.
        share: several instances with one name divide the partitions, see `Share`. A commit then
            raises `LeaseLostError` if another instance has taken its partition over, and the
            iteration goes on. The store has to implement `LeaseStore`, as the shipped ones do.
        fetch, retry, limits: see `FetchOptions`, `RetryPolicy`, `Limits`.
        on_error: what a partition that can't go on does: "raise" ends the iteration, "park" stops
            it and its descendants.
        http: the caller's `httpx.AsyncClient`, for authentication, TLS, proxies or HTTP/2. It is
            used as it is and stays open.

    Raises, on entry or while iterating: `NegotiationError`, `ProtocolError`, `TransportError`,
    `StoreError` and their subclasses.
    """

    def __init__(
        self,
        url: str,
        *,
        store: CursorStore | None = None,
        name: str = "default",
        start: Literal["first", "last"] | Mapping[int, str] = "first",
        ordered: bool = True,
        follow: bool = True,
        partitions: Collection[int] | None = None,
        decoder: Decoder = orjson.loads,
        v1_partitions: int | None = None,
        lineage: Mapping[int, int] | None = None,
        share: Share | None = None,
        fetch: FetchOptions | None = None,
        retry: RetryPolicy | None = None,
        limits: Limits | None = None,
        on_error: Literal["raise", "park"] = "raise",
        http: AsyncHTTP | None = None,
    ) -> None:
        if on_error not in ("raise", "park"):
            raise ValueError(f"on_error must be 'raise' or 'park', not {on_error!r}")
        if not name:
            raise ValueError("name must not be empty")
        if isinstance(start, str) and start not in ("first", "last"):
            raise ValueError(
                f"start must be 'first', 'last' or a mapping of partition to cursor, not {start!r}"
            )
        fetch, retry, limits = fetch or FetchOptions(), retry or RetryPolicy(), limits or Limits()
        self._new_client = partial(
            FeedClient,
            url,
            http=http,
            v1_partitions=v1_partitions,
            fetch=fetch,
            retry=retry,
            limits=limits,
            decoder=decoder,
        )
        # Now, and before anything else looks at the URL, to refuse an impossible one at once.
        self._client: FeedClient | None = self._new_client()
        self.feed = self._client.feed
        self.store: CursorStore = MemoryCursorStore() if store is None else store
        self.key = FeedKey(url, name, fetch.selection())
        self._share = share
        if share is not None and not isinstance(self.store, LeaseStore):
            raise TypeError(
                f"share needs a store that keeps leases, and {type(self.store).__name__} does not "
                "implement LeaseStore"
            )
        self._instance = None if share is None else instance_name(share)
        self.limits = limits
        self.observers = Observers()
        """What `feedapi_client.telemetry` is attached to."""
        self._settings = Settings(
            key=self.key,
            start=start,
            ordered=ordered,
            follow=follow,
            partitions=None if partitions is None else frozenset(partitions),
            lineage=checked_lineage(lineage),
            on_error=on_error,
            stream=fetch.streaming,
            limits=limits,
            retry=retry,
            observers=self.observers,
        )
        self.cut_short = False
        """Whether the grace period of `stop` was over before all in flight of the last iteration
        was committed."""
        self._tasks: Background | None = None
        self._session: Session | None = None
        self._opening: Session | None = None
        # Of sessions that never began to iterate, because their opening failed or was cancelled:
        # what they have saved is not reported again.
        self._reports: Collection[str] = ()
        self._closed_since = datetime.now(UTC)
        self._begun = False
        self._stop_next = False
        self._signalled = False
        # What the end of a grace period cancels: the handlers of `run`, or the block of a loop.
        self._handlers: anyio.CancelScope | None = None
        self._grace: GracePeriod | None = None
        self._block: int | None = None
        self._loops_in_block = False
        self._signal_handlers = ExitStack()

    def __repr__(self) -> str:
        return f"<FeedConsumer {self.key}: {self._session!r}>"

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError("the consumer is open already")
        try:
            self._stop_next = self._signalled = False
            self._session, self._begun = await self._open_session(), False
            tasks = Background()
            await tasks.open()
        except BaseException:
            await self._close_client()
            raise
        self._tasks = tasks
        self._block, self.cut_short = anyio.get_current_task().id, False
        self._grace = GracePeriod(self._cut_short)
        tasks.start_soon(self._grace.run)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        assert self._tasks is not None
        self._signal_handlers.close()
        if self._session is not None:
            self._session.close()
        tasks, self._tasks = self._tasks, None
        self._closed_since = datetime.now(UTC)
        try:
            if self.cut_short and isinstance(error, anyio.get_cancelled_exc_class()):
                return await tasks.close(kind, error, traceback)  # ends its own cancellation
            # Without the exception: the group would wrap it, and an application catches what it
            # raised.
            await tasks.close()
            return None
        finally:
            await self._close_client()

    async def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await finish(_close(client))

    # ------------------------------------------------------------------ three ways to consume

    def __aiter__(self) -> AsyncIterator[Event]:
        """Iterate over events.

        A batch is committed when the loop asks for the event after its last one.
        """
        return _Events(_Batches(self))

    def batches(self) -> AsyncIterator[Batch]:
        """Iterate over batches of all partitions, one at a time.

        Nothing is committed but by ``await batch.commit(...)``, in the order of delivery.
        Committing may skip batches: a cursor covers all before it. Raises `CommitOrderError`
        without `follow` when a partition can't start because the last batch of its parent was not
        committed.
        """
        return _Batches(self)

    async def run(
        self, handle: Handler, *, on_failure: OnFailure = "raise", max_concurrency: int = 32
    ) -> None:
        """Await ``handle(batch)`` for each batch.

        Partitions concurrently, up to `max_concurrency` at once, each one's batches in order. A
        batch that the handler has not committed itself is committed when it returns.

        `on_failure` says what becomes of a batch whose handler raises: "raise" (the exception
        cancels the other handlers and is raised here), "retry" or a `Retry`, "quarantine" or a
        `Quarantine`; see `feedapi_client.quarantine`.

        Returns at the end of the feed (without `follow`) or after `stop`. Cancelling `run` cancels
        the handlers.
        """
        watched = WatchedHandler(handle)
        handle = await retrying_handler(watched, on_failure, self.key, self.store, watched)
        session = await self._begin()
        delivery = session.delivery
        watched.watch(session.driver)
        failure: list[BaseException] = []
        slots = anyio.Semaphore(max_concurrency)

        async def work(batch: Batch) -> None:
            try:
                try:
                    with session.driver.observers.handling(batch):
                        await handle(batch)
                except LeaseLostError as error:
                    if error.partition != batch.partition:
                        raise
                    log.warning(
                        "%s", error, extra={"feed": self.feed, "partition": batch.partition}
                    )
                await delivery.handled(batch)
            except Exception as error:  # noqa: BLE001 - raised below, without a group around it
                watched.raised(batch, error)
                failure.append(error)
                tasks.cancel_scope.cancel()
            else:
                watched.over(batch)
            finally:
                slots.release()

        try:
            async with anyio.create_task_group() as tasks:
                self._handlers = tasks.cancel_scope
                await slots.acquire()
                while (batch := await delivery.next()) is not None:
                    tasks.start_soon(work, batch)
                    await slots.acquire()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._handlers = None
            session.close()
        if failure:
            raise failure[0]

    @property
    def instance(self) -> str | None:
        """The name of this instance in `PartitionStatus.owner`; None without `share`."""
        return self._instance

    def stop(self, *, grace: float | None = None) -> None:
        """End the iteration after the batches in flight. To be called from the event loop.

        What is in flight can be finished and committed, for at most `grace` seconds; None sets no
        limit. Then the rest is cancelled, a warning says of which partitions, and `cut_short` is
        True. Nothing is lost: what was not committed is read again.

        - `run` cancels the handlers that still run, and returns.
        - Of a loop in the task that entered the consumer's ``async with`` block, the block is
          cancelled. The program goes on behind it.
        - A loop in another task is not cancelled, but its `Batch.commit` raises `CommitOrderError`.
          So does that of a loop whose calls run in tasks of their own: `asyncio.wait_for` makes
          such ones before Python 3.12. anyio's and asyncio's `timeout` don't.

        May be called again, to shorten the grace period. Called after an iteration has ended, it
        ends the next one as soon as that begins; while one begins, and perhaps waits for a feed
        that is down, it ends at once.
        """
        if self._session is None or self._tasks is None:
            return
        if self._session.over:
            self._stop_next = True
            if self._opening is not None:
                self._opening.stop()
        self._session.stop()
        if grace is not None and self._grace is not None:
            self._grace.begin(grace)

    def install_signal_handlers(self, *, grace: float | None = 30.0) -> None:
        """End gracefully on SIGTERM and SIGINT (Ctrl-C), until the consumer is closed.

        The first signal calls `stop` with this `grace`, and no iteration begins any more. The
        second one cancels at once what is in flight. From then on signals do what they did before.

        Raises:
            RuntimeError: the consumer is not open, or this is not the main thread.
            NotImplementedError: asyncio can't handle signals on Windows.
        """
        if self._tasks is None:
            raise RuntimeError("the consumer is not open: use it inside 'async with'")
        receiver = anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT)
        signals = self._signal_handlers.enter_context(receiver)
        self._tasks.start_soon(self._stop_on, signals, grace)

    async def _stop_on(self, signals: AsyncIterator[signal.Signals], grace: float | None) -> None:
        number = await anext(signals)
        log.info(
            "feed %s: %s: ends after what is in flight",
            self.feed,
            number.name,
            extra={"feed": self.feed, "signal": number.name},
        )
        self._signalled = True
        self.stop(grace=grace)
        await anext(signals)
        self._signal_handlers.close()
        self.stop(grace=0)

    def _cut_short(self, grace: float) -> None:
        """Cancel what is in flight: the grace period is over."""
        if self._session is None or self._session.over or self._tasks is None:
            return
        self.cut_short = True
        self._session.report_unfinished(grace)
        if self._handlers is not None:
            self._handlers.cancel()
        elif self._loops_in_block:
            self._tasks.cancel_block()
        else:
            self._session.close()

    def status(self) -> ConsumerStatus:
        """A snapshot of every partition. Costs time linear in their number."""
        return ConsumerStatus(self.feed) if self._session is None else self._session.status()

    def topology(self) -> Mapping[int, Partition]:
        """Return the partitions and edges of the last good discovery. Not to be changed.

        With `lineage` and `partitions` applied; empty before the first discovery.
        """
        return {} if self._session is None else self._session.topology()

    def health(self) -> Health:
        """Return whether the consumer works, and what is wrong. Costs as much as `status`.

        May be called at any time, also before entry and after an error. Before the consumer is
        entered it is live and not ready.
        """
        if self._opening is not None:
            return self._opening.health(opening=True)
        if self._session is None or self._tasks is None:
            text = "the consumer is not entered" if self._session is None else "it was left"
            problem = Problem(ProblemName.NOT_OPEN, None, self._closed_since, text)
            return Health(live=True, ready=False, problems=(problem,))
        return self._session.health()

    # ------------------------------------------------------------------ sessions

    async def _open_session(self) -> Session:
        if self._client is None:
            self._client = self._new_client()
        share = None if self._share is None else self._coordinator
        session = Session(self._settings, self._client, self.store, share=share)
        session.reports.extend(dict.fromkeys(self._reports))
        self._opening, self._reports = session, session.reports
        if self._stop_next or self._signalled:  # since the last one ended
            session.stop()
        try:
            await session.open()
        finally:
            self._opening = None
        return session

    def _coordinator(self, driver: Driver) -> Coordinator:
        assert self._share is not None
        assert self._instance is not None
        assert isinstance(self.store, LeaseStore)
        return Coordinator(self._share, self.store, self.key, driver, name=self._instance)

    async def _begin(self) -> Session:
        """The session of a new iteration.

        It is the one that entry opened, or a new one from what is committed.
        """
        if self._tasks is None or self._session is None:
            raise RuntimeError("the consumer is not open: use it inside 'async with'")
        self._loops_in_block = False
        if self._begun:
            if self._grace is not None:
                self._grace.forget()
            await self._session.aclose()
            self._session = await self._open_session()
            self._stop_next = self.cut_short = False
        self._begun = True
        if not self._session.over:  # it is if `stop` came before it was open
            self._reports = ()
        self._tasks.start_soon(self._session.run)
        return self._session

    async def _begin_loop(self) -> Session:
        """`_begin` for a loop of the application, in whatever task that runs."""
        session = await self._begin()
        self._loops_in_block = anyio.get_current_task().id == self._block
        return session


async def _close(client: FeedClient) -> None:
    with anyio.move_on_after(_CLOSE_SECONDS):
        await client.aclose()


class _Batches:
    """`FeedConsumer.batches()`. A class, not a generator: leaving the loop needs no clean-up."""

    def __init__(self, consumer: FeedConsumer) -> None:
        self._consumer = consumer
        self._session: Session | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        if self._session is None:
            self._session = await self._consumer._begin_loop()
        batch = await self._session.delivery.advance()
        if batch is None:
            self._session.close()
            raise StopAsyncIteration
        return batch

    def watch(self, events: Iterator[Event]) -> None:
        """Let the watchdog see whether the application takes the events of its batch."""
        assert self._session is not None
        self._session.delivery.takes_from(events)

    async def commit(self, batch: Batch) -> None:
        """Commit a batch in the application's place; see `Delivery.commit`."""
        assert self._session is not None
        await self._session.delivery.commit(batch)


class _Events:
    """``async for event in consumer``."""

    def __init__(self, batches: _Batches) -> None:
        self._batches = batches
        self._batch: Batch | None = None
        self._events: Iterator[Event] = iter(())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while True:
            for event in self._events:
                return event
            if self._batch is not None:
                # Kept until it is through: after an error the next call tries again (R20).
                await self._batches.commit(self._batch)
                self._batch = None
            self._batch = await self._batches.__anext__()
            self._events = iter(self._batch.events)
            self._batches.watch(self._events)
