"""`FeedConsumer`: a feed as an async iterator."""

from __future__ import annotations

import math
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Iterator,
    Mapping,
)
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Generic, Literal, Self

import anyio
import orjson

from feedapi_client.arguments import (
    OneProcess,
    check_async_function,
    check_count,
    check_instance,
    check_partitions,
    check_plain,
    check_plain_function,
    check_seconds,
    check_word,
    checked_lineage,
    checked_start,
)
from feedapi_client.client import FeedClient
from feedapi_client.errors import FeedError
from feedapi_client.http.io import AsyncHTTP
from feedapi_client.model import (
    MAX_PARTITION,
    Batch,
    Event,
    FeedInfo,
    FeedKey,
    Partition,
    Payload,
    Reached,
)
from feedapi_client.notifications import Listener, Listeners, Subscription
from feedapi_client.options import FetchOptions, Limits, RetryPolicy, Share
from feedapi_client.quarantine.aside import Aside
from feedapi_client.quarantine.handling import retrying_handler
from feedapi_client.quarantine.policy import OnFailure
from feedapi_client.retry import gives_up_after
from feedapi_client.runtime.by_key import EVENT_HANDLER, ByKey
from feedapi_client.runtime.delegating import READ
from feedapi_client.runtime.iteration import ConsumerSettings, Paused, log_end
from feedapi_client.runtime.loop import Background, finish
from feedapi_client.runtime.planning import Planning
from feedapi_client.runtime.running import HANDLER, BatchHandler, Running
from feedapi_client.runtime.session import Session
from feedapi_client.sharing.coordinator import Coordinator, instance_name
from feedapi_client.status import ConsumerStatus, Health, Problem, ProblemName
from feedapi_client.stores.base import CursorStore, PatientStore
from feedapi_client.stores.done import DoneStore
from feedapi_client.stores.leases import LeaseStore
from feedapi_client.stores.sqlite import MemoryCursorStore

_CLOSE_SECONDS = 5.0
_LEFT = "it was left and iterates no more"
_A_STORE = "a cursor store, such as SQLiteCursorStore('cursors.db'), or None"
_A_DONE_STORE = "one that remembers what is done (event_id), such as SQLiteCursorStore"
_LOCK_PART = 10
"""A part of a lease: the longest wait of a commit for a row that another transaction holds."""


class FeedConsumer(Generic[Payload]):
    """Reads a feed: every event in order within its partition and, with its cursors in the
    application's own transaction, exactly once.

    ::

        async with FeedConsumer("https://service/myfeed", store=store) as consumer:
            async for event in consumer:
                ...

    Entering the block loads the cursors and discovers the feed. For an empty store that is the
    bootstrap: nothing published after it is missed. Then consume in one of five ways:
    ``async for event in consumer``, ``async for batch in consumer.batches()``,
    ``await consumer.run(handle)``, ``await consumer.run_by_key(handle, key=key)``,
    ``await consumer.delegate(read)``. One at a time: beginning another one ends the one before.
    Each starts from what is committed, so an iteration that was left early loses nothing.

    Concurrency: runs on asyncio and on trio. Not thread-safe.

    Cancellation: every await may be cancelled; a save that began is finished first.

    Generic over what `Event.json` returns: ``FeedConsumer[Order]`` with a `decoder` that returns an
    ``Order``.

    Arguments:
        url: the feed's endpoint. Its query is sent with every request; credentials in it become
            basic authentication.
        store: where cursors are kept; without one in memory, for as long as the object lives.
        name: tells consumers of the same feed apart. Two at a time with one name fence each other:
            one of them ends with `FencedError`. With `share` they divide the partitions instead.
        start: where a new name begins: "first", "last", or a cursor for each partition (the others
            begin at the first event). None is "first", and a `StoreError` where the store holds
            cursors of this name for what looks like the same feed: under another host name, with
            another selection of events, with or without a trailing slash (R7).
        ordered: a partition is read only after those that it starts after. False reads all at once.
        follow: go on at the end of the feed. False ends the iteration once every partition was read
            to its end.
        partitions: read only these; order is kept among them. None reads all.
        decoder: what `Event.json` uses.
        v1_partitions: the number of partitions of a ZeroEventHub (version 1) feed, which can't be
            discovered.
        lineage: the parent of each child that has to wait for it, where the publisher leaves
            `startsAfterPartition` out: ``{1: 0, 2: 0}``. Such edges are added to every discovery.
            One may be given before its child is listed. One to a partition that was never seen is
            reported, and one that contradicts the discovery is a `LineageError`. ``{3: None}``: 3
            comes after nobody, although partition 0 of a Go publisher is closed (R8).
        share: several instances with one name divide the partitions, see `Share`. A commit then
            raises `LeaseLostError` if another instance has taken its partition over, and the
            iteration goes on. The store has to implement `LeaseStore`, as the shipped ones do.
        feed_name: what cursors, leases and quarantined events are stored under instead of the URL.
            A feed that moves, or that is reached by another host name, keeps them. Cursors that are
            stored under the URL are adopted once, in one transaction, and a report says so; while
            an instance that shares the feed under its URL is alive, the entry waits for its end.
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
        check_plain("name", name, "str")
        if not name:
            raise ValueError("name must not be empty")
        check_word("on_error", on_error, ("raise", "park"))
        check_plain("ordered", ordered, "bool")
        check_plain("follow", follow, "bool")
        if partitions is not None:
            check_partitions("partitions", partitions)
        check_instance("store", store, CursorStore, _A_STORE)
        check_instance("share", share, Share, "a Share or None")
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
        self._decoder = decoder
        # Now, and before anything else looks at the URL, to refuse an impossible one at once.
        self._client: FeedClient | None = self._new_client()
        self.feed = self._client.feed
        self.store: CursorStore = MemoryCursorStore() if store is None else store
        key = FeedKey(url, name, fetch.selection())
        self.key = key if feed_name is None else FeedKey.named(feed_name, name, key.filters)
        self._share = share
        leases = self.store if share is None or share.leases is None else share.leases
        if share is not None and not isinstance(leases, LeaseStore):
            raise TypeError(
                f"share needs a store that keeps leases, and {type(leases).__name__} does not "
                "implement LeaseStore"
            )
        self._leases = leases if isinstance(leases, LeaseStore) else None
        limit_lock_waits = getattr(self.store, "limit_lock_waits", None)
        if share is not None and limit_lock_waits is not None:
            # One that is paused within a commit must not end the others, or keep a handler waiting.
            limit_lock_waits(self.key, share.lease_seconds / _LOCK_PART)
        self._named: tuple[OneProcess, str] | None = None
        self._process = OneProcess()
        self.limits = limits
        self.retry = replace(retry, give_up_after=gives_up_after(retry, following=follow))
        """What counts once the consumer is running."""
        self._entry_patience = gives_up_after(retry)
        self._wait_for_server(self._entry_patience)
        self._listeners = Listeners()
        self._settings = ConsumerSettings(
            key=self.key,
            adopts=None if feed_name is None else key,
            start=None if start is None else checked_start(start),
            ordered=ordered,
            follow=follow,
            partitions=None if partitions is None else frozenset(partitions),
            lineage=checked_lineage(lineage),
            on_error=on_error,
            stream=fetch.streaming,
            limits=limits,
            retry=self.retry,
            paused=Paused(),
            listeners=self._listeners,
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
        self._handlers: anyio.CancelScope | None = None
        """Those of `run` and `run_by_key`, which the end of a grace period cancels."""
        self._entering = False

    def __repr__(self) -> str:
        return f"<FeedConsumer {self.key}: {self._session!r}>"

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            self._process.check("the consumer")
            raise RuntimeError("the consumer is open already")
        self._entering, self._stop_next = True, False
        tasks = Background()
        await tasks.open()
        try:
            self._session, self._begun = await self._open_session(), False
        except BaseException:
            try:
                await tasks.close()
            finally:
                await self._close_client()
            raise
        finally:
            self._entering = self._stop_next = False
        self._tasks, self._process = tasks, OneProcess()
        self.cut_short = False
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._tasks is not None
        if self._session is not None:
            self._session.close()
        tasks, self._tasks = self._tasks, None
        self._closed_since = datetime.now(UTC)
        try:
            # Without the exception: the group would wrap it, and an application catches what it
            # raised.
            await tasks.close()
        finally:
            await self._close_client()

    async def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await finish(_close(client))

    # ------------------------------------------------------------------ five ways to consume

    def __aiter__(self) -> AsyncIterator[Event[Payload]]:
        """Iterate over events.

        A batch is committed when the loop asks for the event after its last one.
        """
        return EventIterator(BatchIterator(self))

    def batches(self) -> AsyncIterator[Batch[Payload]]:
        """Iterate over batches of all partitions, one at a time.

        Nothing is committed but by ``await batch.commit(...)``, in the order of delivery.
        Committing may skip batches: a cursor covers all before it. Raises `CommitOrderError`
        without `follow` when a partition can't start because the last batch of its parent was not
        committed.
        """
        return BatchIterator(self)

    async def run(
        self,
        handle: Callable[[Batch[Payload]], Awaitable[object]],
        *,
        on_failure: OnFailure = "raise",
        max_concurrency: int = 32,
    ) -> None:
        """Await ``handle(batch)`` for each batch.

        Partitions concurrently, up to `max_concurrency` at once, each one's batches in order. A
        batch that the handler has not committed itself is committed when it returns.

        `on_failure` says what becomes of a batch whose handler raises: "raise" (the exception
        cancels the other handlers and is raised here), "retry" or a `Retry`, "quarantine" or a
        `Quarantine`; see `feedapi_client.quarantine`.

        Returns at the end of the feed (without `follow`) or after `stop`, which lets no batch be
        tried again: it comes again. Cancelling `run` cancels the handlers.

        Raises TypeError for a handler that is not asynchronous, and TypeError or ValueError for
        other arguments, before anything is delivered.
        """
        check_async_function("the handler", handle, HANDLER)
        check_count("max_concurrency", max_concurrency)
        watched = BatchHandler(handle)
        adopts = self._settings.adopts
        with self._logged():
            aside = Aside(on_failure, self.key, self.store, adopts=adopts)
            await aside.prepare()
            handle = retrying_handler(watched, aside, watched)
        session = await self._begin()
        await self._handle(session, watched, handle, session.delivery.handled, max_concurrency)

    async def delegate(
        self,
        read: Callable[[int, str], Awaitable[Reached]],
        *,
        late: Mapping[int, float] | None = None,
    ) -> None:
        """Watch the feed, and let somebody else read it: worker processes, a cluster.

        ``await read(partition, cursor)`` is called for each partition that has an event behind its
        cursor, for any number of them at once, and one at a time of each. What it returns is
        committed, and read on from:

        - ``Reached(cursor)``: the cursor behind the last event that was read;
        - the cursor that was given: nothing was read. The consumer asks again itself, and finds out
          what a failure was about with all its patience (R6, R10, R13, R14);
        - ``more=True``: events are known to follow. It is called again without a poll.

        Polls ask for one event, read nothing ahead, keep no payload and take any. All else is as
        with `run`: order, splits, refusals, retries, `status`.

        Arguments:
            read: an async function of a partition and a cursor. What it raises cancels the others,
                ends the iteration and is raised here.
            late: partitions that were drained by empty answers alone (R6), each with the time,
                as `time.time`, until which it is asked again. Each is asked at least once. None:
                those are asked that the store holds, and events behind their ends are reported.

        Returns at the end of the feed (without `follow`) or after `stop`. Cancelling it cancels
        what is being read.

        Raises TypeError for a function that is not asynchronous or returns something else, and
        ValueError for a cursor that is none.
        """
        check_async_function("read", read, READ)
        session = await self._begin()
        delegation = session.delegate(read, late)
        watched = BatchHandler(delegation.handle)
        await self._handle(session, watched, watched, delegation.handled, MAX_PARTITION + 1)

    async def _handle(
        self,
        session: Session,
        watched: BatchHandler,
        handle: Callable[[Batch], Awaitable[object]],
        handled: Callable[[Batch], Awaitable[None]],
        max_concurrency: int,
    ) -> None:
        """Handle all batches of a session, `max_concurrency` at once."""
        planning, running = session.planning, Running(session.planning)
        with self._handling(session, running.scope):
            next = session.delivery.next
            await watched.run(running, planning, next, handle, handled, max_concurrency)

    async def run_by_key(
        self,
        handle: Callable[[Event[Payload]], Awaitable[object]],
        *,
        key: Callable[[Event[Payload]], Hashable],
        event_id: Callable[[Event[Payload]], object] | None = None,
        max_concurrency: int = 32,
        max_in_flight: int = 10_000,
        on_failure: OnFailure = "raise",
    ) -> None:
        """Await ``handle(event)`` for each event: different keys at once, each one's in order.

        For handlers that wait, such as for a call of a service for each event. Events of one `key`
        are handled one at a time, in the order of the feed, also across partitions and splits.
        Cursors are saved by the consumer: that of the last checkpoint before which all events are
        done. At least once: a crash repeats at most `max_in_flight` events. Exactly once: give
        `event_id`, and let the last step of each transaction be
        ``await event.done(transaction=...)``, see `Event.done`.

        Arguments:
            handle: an async function of an event.
            key: a function of an event that returns what its order matters for. Any hashable value.
                An event whose key can't be found is treated as if its handler had raised the error.
            event_id: a function of an event that returns what no other event of the feed has: a
                str, bytes, int or UUID. What is done ahead of the cursor is then remembered in the
                cursor's store, which has to implement `DoneStore`, until the cursor has passed it.
                All instances of one name use it, or none.
            max_concurrency: handlers at once.
            max_in_flight: events that were delivered and whose cursor is not saved, at most; more
                only where checkpoints are further apart. They also take `Limits.max_buffered_bytes`
                of memory at most, beside the buffer. An event that takes long holds the cursor of
                its partition back, and nobody else until this is reached.
            on_failure: what becomes of an event whose handler raises: "raise" (the exception
                cancels the other handlers and is raised here), "retry" or a `Retry`, "quarantine"
                or a `Quarantine`. Other keys go on while an event waits for its next attempt.

        Returns at the end of the feed (without `follow`) or after `stop`. A stop begins no further
        event and no further attempt: what was begun is finished, and the cursor is saved as far as
        all before it is done. The rest comes again. Cancelling `run_by_key` cancels the handlers.

        Raises TypeError for a handler that is not asynchronous or a key that is no function, and
        TypeError or ValueError for other arguments, before anything is delivered.
        """
        check_async_function("the handler", handle, EVENT_HANDLER)
        check_plain_function("key", key)
        if event_id is not None:
            check_plain_function("event_id", event_id)
            check_instance("store", self.store, DoneStore, _A_DONE_STORE)
        check_count("max_concurrency", max_concurrency)
        check_count("max_in_flight", max_in_flight)
        adopts = self._settings.adopts
        with self._logged():
            failures = Aside(
                on_failure, self.key, self.store, adopts=adopts, key=key, decoder=self._decoder
            )
            await failures.prepare()
        session = await self._begin()
        by_key = ByKey(
            session.planning,
            session.delivery,
            handle,
            key,
            failures,
            event_id=event_id,
            max_concurrency=max_concurrency,
            max_in_flight=max_in_flight,
        )
        with self._handling(session, by_key.scope):
            await by_key.run()

    @contextmanager
    def _handling(self, session: Session, handlers: anyio.CancelScope) -> Iterator[None]:
        """Let the end of a grace period cancel the handlers, and end the session with them."""
        self._handlers = handlers
        try:
            yield
        finally:
            self._handlers = None
            session.close()

    @property
    def instance(self) -> str | None:
        """The name of this instance in `PartitionStatus.owner`; None without `share`.

        Each process has one of its own, also where the consumer was made before a fork.
        """
        if self._share is None:
            return None
        if self._named is None or not self._named[0].is_this:
            self._named = OneProcess(), instance_name(self._share)
        return self._named[1]

    def stop(self, *, grace: float | None = None) -> None:
        """End the iteration after the batches in flight. To be called from the event loop.

        Such as by a signal, from before the consumer is entered::

            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)

        What is in flight can be finished and committed, for at most `grace` seconds; None sets no
        limit. Then `run` and `run_by_key` cancel the handlers that still run, and return. A loop is
        not cancelled, but what it commits then raises `CommitOrderError`: a limit for its block is
        the application's, such as ``anyio.move_on_after``. A warning says of which partitions that
        is, and `cut_short` is True. Nothing is lost: what was not committed is read again.

        May be called again, to shorten the grace period. Called after an iteration has ended, it
        ends the next one as soon as that begins; while one begins, and perhaps waits for a feed
        that is down, it ends at once. So does the entry of the consumer, whatever it waits for: the
        block is entered, and its iteration has nothing to deliver.
        """
        check_seconds("grace", grace)
        if self._entering:
            self._stop_next = True
            if self._opening is not None:
                self._opening.stop()
        if self._session is None or self._tasks is None:
            return
        if self._session.over:
            self._stop_next = True
            if self._opening is not None:
                self._opening.stop()
        self._session.stop()
        if grace is not None:
            self._session.end_within(grace)

    def pause(self, *partitions: int) -> None:
        """Fetch and deliver nothing new of these partitions; of all where none is given.

        Also of those that are not known yet. What is in flight can be committed, and leases are
        kept. It holds for the life of this object, also in later iterations, until `resume`. To be
        called from the event loop.

        Raises ValueError for what is no partition's number.
        """
        check_partitions("pause", partitions, empty=True)
        self._set_paused(partitions, paused=True)

    def resume(self, *partitions: int) -> None:
        """Read paused partitions on, from where they were; all where none is given.

        To be called from the event loop. Raises ValueError for what is no partition's number.
        """
        check_partitions("resume", partitions, empty=True)
        self._set_paused(partitions, paused=False)

    def _set_paused(self, partitions: Collection[int], *, paused: bool) -> None:
        self._settings.paused.set(partitions, paused=paused)
        if self._session is not None:
            self._session.planning.pauses_changed()

    def subscribe(self, listener: Listener) -> Subscription:
        """Call ``listener(notification)`` for each of `feedapi_client.notifications` from now on.

        A plain function, called in the event loop: it must not block. What it raises is logged and
        does not stop the consumer. It holds across iterations, until the subscription is closed::

            with consumer.subscribe(listener):
                ...

        Raises TypeError for what is no function, or one with ``async``.
        """
        check_plain_function("the listener", listener)
        return self._listeners.add(listener)

    def _cut_short(self, grace: float) -> None:
        """Cancel what is in flight: the grace period is over."""
        if self._session is None or self._session.over or self._tasks is None:
            return
        self.cut_short = True
        self._session.report_unfinished(grace)
        if self._handlers is not None:
            self._handlers.cancel()
        else:
            self._session.close()

    def status(self) -> ConsumerStatus:
        """A snapshot of every partition. Costs time linear in their number."""
        return ConsumerStatus(self.feed) if self._session is None else self._session.board.status()

    def topology(self) -> Mapping[int, Partition]:
        """Return the partitions and edges of the last good discovery. Not to be changed.

        With `lineage` and `partitions` applied; empty before the first discovery.
        """
        return {} if self._session is None else self._session.topology()

    @property
    def info(self) -> FeedInfo | None:
        """The last good discovery, as the publisher gave it; None before the first one."""
        return None if self._session is None else self._session.info

    def preceding(self, partition: int) -> list[int]:
        """Return the partitions that come before a listed one, drained or not."""
        return [] if self._session is None else self._session.preceding(partition)

    def health(self) -> Health:
        """Return whether the consumer works, and what is wrong. Costs as much as `status`.

        May be called at any time, also before entry and after an error. Before the consumer is
        entered it is live and not ready.
        """
        if self._opening is not None:
            return self._opening.board.health(opening=True)
        if self._session is None or self._tasks is None:
            text = "the consumer is not entered" if self._session is None else _LEFT
            problem = Problem(ProblemName.NOT_OPEN, None, self._closed_since, text)
            return Health(live=True, ready=False, problems=(problem,))
        return self._session.board.health()

    # ------------------------------------------------------------------ sessions

    async def _open_session(self) -> Session:
        if self._client is None:
            self._client = self._new_client()
        share = None if self._share is None else self._coordinator
        session = Session(
            self._settings,
            self._client,
            self.store,
            leases=self._leases,
            share=share,
            cut_short=self._cut_short,
        )
        reports = session.iteration.reports
        reports.extend(dict.fromkeys(self._reports))
        self._opening, self._reports = session, reports
        if self._stop_next:  # since the last one ended
            session.stop()
        self._wait_for_server(self._entry_patience)
        try:
            await session.open()
        finally:
            self._opening = None
        self._wait_for_server(gives_up_after(self.retry))
        return session

    def _wait_for_server(self, seconds: float) -> None:
        if isinstance(self.store, PatientStore):
            self.store.wait_for_server(None if math.isinf(seconds) else seconds)

    def _coordinator(self, planning: Planning) -> Coordinator:
        assert self._share is not None
        assert self.instance is not None
        assert self._leases is not None
        return Coordinator(self._share, self._leases, self.key, planning, name=self.instance)

    async def _begin(self) -> Session:
        """The session of a new iteration.

        It is the one that entry opened, or a new one from what is committed.
        """
        if self._tasks is None or self._session is None:
            raise RuntimeError("the consumer is not open: use it inside 'async with'")
        self._process.check("the consumer")
        if self._begun:
            await self._session.aclose()
            with self._logged():
                self._session = await self._open_session()
            self._stop_next = self.cut_short = False
        self._begun = True
        if not self._session.over:  # it is if `stop` came before it was open
            self._reports = ()
        self._tasks.start_soon(self._session.run)
        self._tasks.start_soon(self._session.end_grace)
        return self._session

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Log what ends an iteration before anything is read."""
        try:
            yield
        except FeedError as error:
            log_end(self.feed, error)
            raise


async def _close(client: FeedClient) -> None:
    with anyio.move_on_after(_CLOSE_SECONDS):
        await client.aclose()


class BatchIterator(Generic[Payload]):
    """`FeedConsumer.batches()`. A class, not a generator: leaving the loop needs no clean-up."""

    def __init__(self, consumer: FeedConsumer[Payload]) -> None:
        self._consumer = consumer
        self._session: Session | None = None
        self._turn = _Turn()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch[Payload]:
        with self._turn:
            return await self._next()

    async def _next(self) -> Batch[Payload]:
        if self._session is None:
            self._session = await self._consumer._begin()
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


class EventIterator(Generic[Payload]):
    """``async for event in consumer``."""

    def __init__(self, batches: BatchIterator[Payload]) -> None:
        self._batches = batches
        self._batch: Batch[Payload] | None = None
        self.events: Iterator[Event[Payload]] = iter(())
        """Those of the batch in flight that were not taken yet."""
        self._turn = _Turn()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event[Payload]:
        while True:
            for event in self.events:
                return event
            await self.next_batch()

    async def next_batch(self) -> None:
        """Commit the batch whose events were taken, and get the next one's."""
        with self._turn:
            await self._next_batch()

    async def _next_batch(self) -> None:
        if self._batch is not None:
            # Kept until it is through: after an error the next call tries again (R20).
            await self._batches.commit(self._batch)
            self._batch = None
        self._batch = await self._batches.__anext__()
        self.events = iter(self._batch.events)
        self._batches.watch(self.events)


class _Turn:
    """Of one iterator: one task at a time asks it, as with a generator."""

    def __init__(self) -> None:
        self._taken = False

    def __enter__(self) -> None:
        if self._taken:
            raise RuntimeError(
                "anext(): another task waits for this iterator already; several tasks share a "
                "feed through FeedConsumer.run"
            )
        self._taken = True

    def __exit__(self, *_: object) -> None:
        self._taken = False
