"""One process of the application: how it consumes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from math import inf
from random import Random
from typing import Any, Literal, TypeVar

import anyio
from httpx import AsyncClient

from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import FencedError, LeaseLostError, StoreError
from feedapi_client.model import Batch, Event, FeedKey, Position
from feedapi_client.options import FetchOptions, Limits, RetryPolicy
from feedapi_client.quarantine.policy import OnFailure, Quarantine, Retry
from feedapi_client.runtime import session as runtime
from feedapi_client.status import PartitionState, PartitionStatus
from tests.simulation.clock import sleep
from tests.simulation.http import simulated_client
from tests.simulation.keyed import InFlight, Keys, entity_of, identity_of
from tests.simulation.knowledge import Deliveries, Knowledge
from tests.simulation.late_commits import LateCommits
from tests.simulation.oracle import Oracle, Reports
from tests.simulation.random_cancellation import RandomCancellation
from tests.simulation.scenario import Settings
from tests.simulation.shared import SharedSession, share
from tests.simulation.store import (
    ConnectionLostError,
    Effect,
    SimulatedDatabase,
    SimulatedQuarantine,
    StoreSession,
)
from tests.simulation.transport import SimulatedPublisher, SimulatedTransport

T = TypeVar("T")

FEED = "http://simulated/feed"
RESTART_SECONDS = 0.5
SMALL_BUFFER = 1024 * 1024
"""A limit of buffered bytes from which on a history doesn't come near it."""
_READ = (PartitionState.READING, PartitionState.CAUGHT_UP, PartitionState.RETRYING)
_HANGS_EACH = 13
"""Of so many events one hangs, with `Settings.hangs`."""
HELD_SECONDS = 0.4
"""How long an application that commits late waits for one more batch."""


class HandlerError(Exception):
    """The application can't handle an event."""


def is_poison(entity: int, n: int) -> bool:
    """Return whether no attempt to handle this event ever succeeds."""
    return (entity + 3 * n) % 11 == 5


class Process:
    """One process of the application, from its start to its end.

    Attributes:
        number: tells the processes of a history apart.
        overlaps: another process of the same name ran at the same time: one may fence the other.
        rolled_back: the application went on after it rolled back a commit: it fences itself.
        partitions, lineage: see `FeedConsumer`.
        leaving: the loop is to be left at the next batch, and another iteration to be begun: of the
            consumer that is open ("leave"), or after entering it again ("reenter").
        paused_until: the virtual time up to which the application hangs.
        ends_by: the virtual time at which the grace period of a stop is over.
    """

    def __init__(
        self,
        settings: Settings,
        publisher: SimulatedPublisher,
        database: SimulatedDatabase,
        oracle: Oracle,
        random: Random,
        *,
        number: int,
        native: bool,
        follow: bool = True,
        partitions: Collection[int] | None = None,
        lineage: Mapping[int, int | None] | None = None,
    ) -> None:
        self.number = number
        self.transport = SimulatedTransport(publisher)
        self.session = (
            SharedSession(database, settings.lock_seconds)
            if settings.instances
            else StoreSession(database)
        )
        self.consumer: FeedConsumer | None = None
        self.overlaps = False
        self.rolled_back = False
        self.leaving: Literal["leave", "reenter"] | None = None
        self.paused_until = 0.0
        self.ends_by = inf
        self._fetch = FetchOptions(
            stream=5000 if settings.stream else False,
            event_types=("even",) if settings.selected else (),
        )
        self.key = FeedKey(FEED, "default", self._fetch.selection())
        self._settings = settings
        self._database = database
        self._oracle = oracle
        self._random = random
        self._late = LateCommits(self.session, publisher.trace, settings.commit_every)
        self._impatience = RandomCancellation(settings.impatience, random, native=native)
        self._known_changes = oracle.changes
        self._follow = follow
        self.reads_to_the_end = not follow
        """Whether it is to end by itself, when everything is read."""
        self.partitions = partitions
        self.lineage = lineage
        self._iterates = False
        self.keys: Keys | None = None
        """What it handles by key, while it does."""
        self._hung = False
        self.knowledge: Knowledge | None = None
        """What it must know of its leases, as one of several instances."""
        self.reports = Reports(publisher.world, self.transport, oracle, self._shown_reports)
        self.session.on_save = self._saving
        if isinstance(self.session, SharedSession):
            self.knowledge = self.session.knowledge = Knowledge(oracle.violated, publisher.now)
            self.session.changes = lambda: oracle.changes
            self.transport.on_fetch = self._fetching
            self.transport.on_answer = self.knowledge.answered
            self.transport.on_listed = self._listed
        self._now = publisher.now
        self._trace = publisher.trace

    # A status of all partitions takes long: most of the time only a part of it is looked at.

    @property
    def _entered(self) -> runtime.Session | None:
        return None if self.consumer is None else self.consumer._session

    def _shown_reports(self) -> Sequence[str]:
        return () if self._entered is None else tuple(self._entered.iteration.reports)

    def _status_of(self, partition: int) -> PartitionStatus | None:
        if self._entered is None:
            return None
        return self._entered.board.status().partitions.get(partition)

    def tell(self) -> None:
        """Let the oracle know what the consumer has reported so far."""
        if not self.session.dead:
            self._oracle.heard(self._shown_reports())

    def _saving(
        self,
        positions: Mapping[int, Position],
        stored: Mapping[int, Position],
        began: float,
    ) -> None:
        self.reports.saving(positions, stored)
        if self._settings.way == "keys":
            self._oracle.passing(positions, stored)
        if any(position.status == "drained" for position in positions.values()):
            now = self._now() - (anyio.current_time() - began)
            self._oracle.draining(positions, stored, self.transport.evidence, now)

    def _listed(self, partitions: Iterable[int]) -> None:
        """A discovery is answered."""
        assert self.knowledge is not None
        self.knowledge.waits()
        self.knowledge.lists(partitions)

    def _fetching(self, partition: int, cursor: str) -> None:
        """A partition is asked for: after a claim behind what was stored by then."""
        assert isinstance(self.session, SharedSession)
        if self.knowledge is not None and not self.session.dead:
            self.knowledge.fetches(partition, self.positions().get(partition))
        claimed = self.session.claimed.pop(partition, None)
        if claimed is not None:
            self._oracle.started(partition, cursor, claimed.stored, known=claimed.changes)

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
            ordered=settings.ordered,
            partitions=self.partitions,
            lineage=self.lineage,
            share=share(self.number, settings) if settings.instances else None,
            fetch=self._fetch,
            limits=Limits(
                max_concurrent_fetches=settings.concurrent,
                max_batch_bytes=settings.batch_bytes,
                max_batch_events=settings.batch_events,
                max_buffered_bytes=settings.buffer_bytes,
            ),
            retry=RetryPolicy(
                refused_for=settings.refused_for,
                give_up_after=inf if settings.give_up_after is None else settings.give_up_after,
            ),
            on_error=settings.on_error,
            http=http,
        )

    async def run(self) -> None:
        """Consume until stopped or, without `follow`, to the end of the feed."""
        async with simulated_client(self.transport.handle_async_request) as http:
            consumer = self.consumer = self.make_consumer(http)
            if self.knowledge is not None:
                self.knowledge.status_of = self._status_of
                consumer._listeners.attach(Deliveries(self.knowledge, self._status_of))
            again = True
            while again:
                async with consumer:
                    await self._iterations(consumer)
                again, self.leaving = self.leaving == "reenter", None

    async def _iterations(self, consumer: FeedConsumer) -> None:
        """Begin an iteration, and another one whenever the loop was left."""
        self.reports.check()
        while True:
            self._oracle.began(self.number)
            self.transport.passed.clear()
            self._iterates = True
            try:
                await self._consume(consumer)
            finally:
                self._iterates, self.ends_by = False, inf
                self.tell()
            self.reports.forget()
            if self.leaving != "leave":
                return
            self.leaving = None

    async def _consume(self, consumer: FeedConsumer) -> None:
        if self._settings.way == "keys":
            await self._by_key(consumer)
        elif self._settings.way == "run":
            at_once = self._random.choice((1, 3, 20))
            await consumer.run(self._handle, on_failure=self._on_failure(), max_concurrency=at_once)
        elif self._settings.way == "batches":
            await self._iterate(consumer.batches().__anext__, self._handle_batch)
        else:
            await self._iterate(consumer.__aiter__().__anext__, self._handle_event)

    async def _by_key(self, consumer: FeedConsumer) -> None:
        settings = self._settings
        self.keys = Keys(self._oracle.violated, self._now)
        counted = InFlight(self._oracle.violated, settings.in_flight)
        if not settings.instances:  # what is lost with a lease is not released
            consumer._listeners.attach(counted)
        try:
            await consumer.run_by_key(
                self._handle_keyed,
                key=entity_of,
                event_id=identity_of if settings.transactional else None,
                max_concurrency=self._random.choice((1, 3, 20)),
                max_in_flight=settings.in_flight,
                on_failure=self._on_failure(),
            )
        finally:
            self.keys = None
            if not settings.instances:
                consumer._listeners.detach(counted)

    def look(self) -> None:
        """Check what the consumer says of events that hang. One of several loses some of them."""
        if self.keys is None or self.consumer is None or self.shares or self.session.dead:
            return
        hanging = self.keys.hanging()
        if hanging is not None and self.consumer.status()[hanging].state in _READ:
            self.keys.named(hanging, self.consumer.health())

    def _on_failure(self) -> OnFailure:
        quarantine = Quarantine(
            to=SimulatedQuarantine(self.session), limit=10**6, errors=(HandlerError,)
        )
        match self._settings.on_failure:
            case "retry":
                # By key also a commit of which nobody knows whether it took effect.
                by_key = (ConnectionLostError,) if self._settings.way == "keys" else ()
                return Retry(attempts=None, base_delay=0.05, errors=(HandlerError, *by_key))
            case "quarantine":
                return quarantine
            case "retry, then quarantine":
                errors = (HandlerError,)
                return Retry(attempts=3, base_delay=0.05, errors=errors, then=quarantine)
            case _:
                return "raise"

    async def _iterate(
        self, following: Callable[[], Awaitable[T]], handle: Callable[[T], Awaitable[None]]
    ) -> None:
        before: StoreError | None = None
        self._late.drop()
        while not self.leaving:
            try:
                if self._holds_back:
                    item = await self._next_or_commit(following)
                else:
                    item = await self._impatience.call(following)
            except StopAsyncIteration:
                return
            except StoreError as error:
                # After an error the next call goes on, or raises that error again (R20). Another
                # consumer's save is no reason to try again.
                if isinstance(error, FencedError) or not self._settings.stubborn or error is before:
                    raise
                self._trace.add("the application iterates on after {}", error)
                before = error
                await sleep(RESTART_SECONDS)
                continue
            await handle(item)

    # ------------------------------------------------------------------ handling

    async def _handle_event(self, event: Any) -> None:
        self.session.apply_at_once([self._effect(event.partition, event)])
        await self._work()

    async def _handle_batch(self, batch: Batch) -> None:
        if not self._holds_back:
            try:
                await self._handle(batch)
            except LeaseLostError as error:  # rolled back: whoever has the lease delivers it again
                self._trace.add("{}", error)
            return
        self._received(batch)
        await self._work()
        if self._late.add(batch, [self._effect(batch.partition, e) for e in batch.events]):
            await self._late.commit()

    async def _handle_keyed(self, event: Event) -> None:
        assert self.keys is not None
        keys, effect = self.keys, self._effect(event.partition, event)
        if not self.session.dead:
            keys.begin(effect.entity, event.partition)
            self._oracle.delivered(event.partition, self.positions())
        try:
            await self._work()
            await self._hang(effect)
            self._fail([effect])
            if self._settings.transactional:
                await self._do(event, effect)
            else:
                self.session.apply_at_once([effect])
        finally:
            keys.end(effect.entity)

    async def _do(self, event: Event, effect: Effect) -> None:
        while self._rolls_back():
            with closing(self.session.transaction()) as transaction:
                await event.done(transaction)
        with closing(self.session.transaction()) as transaction:
            transaction.effects.append(effect)
            await event.done(transaction)
            self._fail([effect])
            with anyio.CancelScope(shield=True):
                await transaction.commit()

    async def _hang(self, effect: Effect) -> None:
        """Take very long for one event, once in a process. Not of several: others wait for it."""
        chosen = (effect.entity + effect.n) % _HANGS_EACH == 0 and not self.shares
        if self._settings.hangs and chosen and not (self._hung or self._oracle.calm):
            self._hung = True
            await sleep(self._settings.hangs)

    def _received(self, batch: Batch) -> None:
        self.reports.check()
        self._oracle.delivered(
            batch.partition,
            self.positions(),
            known=self._known_changes,
            loaded=self.session.known,
        )
        limit = self._settings.buffer_bytes
        if limit < SMALL_BUFFER and self._entered is not None:
            self._oracle.buffered(self._entered.buffer.used, limit)

    def stop(self, grace: float | None = None) -> None:
        """Call `stop` of its consumer, if it has one by now."""
        if self.consumer is None:
            return
        self.reads_to_the_end = False
        self.consumer.stop(grace=grace)
        if grace is not None and self._iterates and self._settings.way in ("run", "keys"):
            self.ends_by = min(self.ends_by, self._now() + grace)

    @property
    def iterates(self) -> bool:
        """Whether an iteration has begun and not ended."""
        return self._iterates

    @property
    def hears_of_a_rollback(self) -> bool:
        """Whether each discovery of `refused_for` has listed one as open that was over (R11)."""
        since, now = self.transport.evidence.open_since, self._now()
        over = (id for id, position in self.positions().items() if position.status != "open")
        longest = max((now - since.get(id, now) for id in over), default=0.0)
        return not self._follow and longest >= self._settings.refused_for

    @property
    def commits_too_late(self) -> bool:
        """Whether a grace period ended with a loop, which it does not cancel: see `stop`."""
        cut_short = self.consumer is not None and self.consumer.cut_short
        return cut_short and self._settings.way in ("batches", "events")

    @property
    def shares(self) -> bool:
        """Whether other instances share the feed with it: none may fence another one."""
        return bool(self._settings.instances)

    @property
    def _holds_back(self) -> bool:
        return self._settings.commit_every > 1 and self._settings.transactional and self._follow

    async def _next_or_commit(self, following: Callable[[], Awaitable[T]]) -> T:
        """Await the next item. Whenever none comes for a while, commit what is held back."""
        while True:
            if self._late.rolled_back:
                await self._late.commit()
            with anyio.move_on_after(HELD_SECONDS):
                return await self._impatience.call(following)
            await self._late.commit()

    async def _handle(self, batch: Batch) -> None:
        self._received(batch)
        await self._work()
        effects = [self._effect(batch.partition, event) for event in batch.events]
        self._fail(effects)
        if not self._settings.transactional:
            self.session.apply_at_once(effects)
            await self._impatience.call(batch.commit)
            return
        while self._rolls_back():
            with closing(self.session.transaction()) as transaction:
                await batch.commit(transaction=transaction)
            if self._settings.careless:
                self.rolled_back = True
                return
        with closing(self.session.transaction()) as transaction:
            transaction.effects += effects
            await batch.commit(transaction=transaction)
            self._fail(effects)
            with anyio.CancelScope(shield=True):
                await transaction.commit()

    def _rolls_back(self) -> bool:
        """Return whether to roll a transaction back."""
        share = 0.0 if self._oracle.calm else self._settings.rollbacks
        return bool(share) and self._random.random() < share

    def _fail(self, effects: list[Effect]) -> None:
        """Raise HandlerError now and then, and for events that can't be handled."""
        settings = self._settings
        if settings.poison and any(is_poison(effect.entity, effect.n) for effect in effects):
            raise HandlerError("poison")
        if settings.flaky and not self._oracle.calm and self._random.random() < settings.flaky:
            raise HandlerError("flaky")

    async def _work(self) -> None:
        longest = self._settings.handling
        seconds = self._random.uniform(0.0, longest) if longest else 0.0
        await sleep(seconds)
        if self.paused_until > self._now():
            await sleep(self.paused_until - self._now())

    def _effect(self, partition: int, event: Any) -> Effect:
        payload = event.json()
        return Effect(payload["entity"], payload["n"], partition, self.number)

    def positions(self) -> Mapping[int, Position]:
        """Return the durable positions of this consumer's partitions."""
        return self._database.positions.get(self.key, {})
