"""What `run_by_key(event_id=...)` has done ahead of the cursors, and under which claims.

See `feedapi_client.stores.done` for what the store keeps. Here are the claims of one session, and
what becomes of a handler that fails although its event is done.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio

from feedapi_client.errors import CommitOrderError, FeedError, FencedError, LeaseLostError
from feedapi_client.model import Event, being_handled
from feedapi_client.notifications import EventsPassedOver
from feedapi_client.quarantine.failure_text import failure_line
from feedapi_client.retry import Backoff, retry
from feedapi_client.runtime.key_order import KeyedBatch, KeyedEvent
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.runtime.planning import Planning
from feedapi_client.runtime.running import Running
from feedapi_client.stores.done import Claim, DoneEvent, stored_id

log = logging.getLogger(__name__)

_DIGEST_BYTES = 16
EventIdOf = Callable[[Event], object]


@dataclass(slots=True, eq=False)
class _Reading:
    """One partition since it was last read from its stored position."""

    number: int
    claim: Claim | None = None
    payloads: dict[str, bytes] = field(default_factory=dict)
    """A digest of the payload of each event whose cursor is not saved, by its identity."""


class DoneAhead:
    """Claims partitions, and remembers their events. `look` drops what was lost with its lease."""

    def __init__(
        self,
        planning: Planning,
        event_id: EventIdOf,
        running: Running,
        look: Callable[[], None],
        backoff: Callable[[], Backoff],
    ) -> None:
        self._planning, self._iteration = planning, planning.iteration
        self._event_id = event_id
        self._running = running
        self._look = look
        self._backoff = backoff
        self._readings: dict[int, _Reading] = {}

    # ------------------------------------------------------------------ claims

    def is_claimed(self, partition: RuntimePartition) -> bool:
        """Whether its events may be handled. If not, it is queued again once a claim is made."""
        reading = self._readings.get(partition.id)
        if reading is None or reading.number != partition.readings:
            reading = self._readings[partition.id] = _Reading(partition.readings)
            self._running.start_beside(self._claim, partition, reading)
        return reading.claim is not None

    async def _claim(self, partition: RuntimePartition, reading: _Reading) -> None:
        planning, position = self._planning, partition.entry.position
        ancestors = planning.planner.graph.ancestors(partition.id)
        revision = 0 if position is None else position.revision

        async def claim() -> Claim:
            return await planning.positions.claim([partition.id, *ancestors], revision)

        try:
            made = await retry(claim, self._backoff(), sleep=anyio.sleep)
        except FencedError as error:
            if self._readings.get(partition.id) is not reading:
                return
            if partition.entry.position is position:
                self._refused(partition, error)
            else:  # changed by this consumer itself: its cursor was transferred, say
                del self._readings[partition.id]
                planning.offer(partition)
            return
        reading.claim = made
        planning.offer(partition)
        self._iteration.wake()

    def _refused(self, partition: RuntimePartition, error: FencedError) -> None:
        self._readings.pop(partition.id, None)
        if self._planning.sharing is not None:
            self._planning.lose(partition)
            self._look()
        else:
            self._iteration.fail(error)

    # ------------------------------------------------------------------ what is delivered

    def identify(self, work: KeyedBatch) -> Collection[int]:
        """Note the identities of a batch. Return which of its events are done already.

        An event without one, or with that of another event, gets an error in its place, see
        `attempt`.
        """
        reading = self._readings[work.batch.partition]
        claim = reading.claim
        assert claim is not None
        work.claim = claim.number
        work.ids = [self._identity(event, reading) for event in work.batch.events]
        done = {index for index, id in enumerate(work.ids) if id in claim.done}
        for index in done:
            id = work.ids[index]
            assert isinstance(id, str)
            work.passes.setdefault(claim.done[id], set()).add(id)
        if done:
            self._passed_over(work, len(done))
        return done

    def _identity(self, event: Event, reading: _Reading) -> str | Exception:
        try:
            id = stored_id(self._event_id(event))
        except Exception as error:  # noqa: BLE001 - handled like an error of the handler
            return error
        digest = hashlib.blake2b(event.raw, digest_size=_DIGEST_BYTES).digest()
        if reading.payloads.setdefault(id, digest) == digest:
            return id
        return FeedError(
            "two events with one event_id have different payloads: event_id has to return what no "
            "other event of the feed has",
            feed=self._iteration.feed,
            partition=event.partition,
        )

    def _passed_over(self, work: KeyedBatch, count: int) -> None:
        partition = work.batch.partition
        self._planning.partitions[partition].handling.passed_over += count
        if self._iteration.listeners:
            self._iteration.listeners.tell(EventsPassedOver(partition, count))

    # ------------------------------------------------------------------ what is handled

    async def attempt(self, item: KeyedEvent, handle: Callable[[Event], Awaitable[object]]) -> None:
        """Handle an event that may be done already.

        Raises what the handler raises, unless its transaction was committed all the same.
        """
        id = item.work.ids[item.index]
        if isinstance(id, Exception):
            raise id
        claim = self._claim_of(item.work)
        if claim is not None and id in claim.done:  # by an equal event in flight
            item.work.passes.setdefault(claim.done[id], set()).add(id)
            self._passed_over(item.work, 1)
            return
        with being_handled(item.event, partial(self._done, item, id)):
            try:
                await handle(item.event)
            except Exception as error:
                if not item.tried or not await self._is_done(item, id):
                    raise
                self._log_failed_after(item, error)
        if item.tried and (claim := self._claim_of(item.work)) is not None:
            claim.done[id] = item.work.batch.partition

    def _claim_of(self, work: KeyedBatch) -> Claim | None:
        reading = self._readings.get(work.batch.partition)
        if reading is None or reading.claim is None or reading.claim.number != work.claim:
            return None
        return reading.claim

    async def _done(self, item: KeyedEvent, id: str, transaction: Any) -> None:
        planning, work = self._planning, item.work
        partition = planning.partitions[work.batch.partition]
        if self._iteration.over:
            raise CommitOrderError(
                "the event can't be done: its iteration has ended, and what was not committed is "
                "read again by the next one",
                feed=self._iteration.feed,
                partition=partition.id,
            )
        self._look()
        if work.lost:
            raise self._lease_lost(partition.id)
        item.tried = True
        work.passes.setdefault(partition.id, set()).add(id)
        try:
            await planning.positions.done(DoneEvent(partition.id, work.claim, id), transaction)
        except FencedError as error:
            if not work.lost:
                self._refused(partition, error)
            if planning.sharing is None:
                raise
            raise self._lease_lost(partition.id) from error

    async def _is_done(self, item: KeyedEvent, id: str) -> bool:
        if item.work.lost:
            return False  # whoever has the lease now finds out
        event = DoneEvent(item.work.batch.partition, item.work.claim, id)
        return await self._planning.positions.is_done(event)

    def _lease_lost(self, partition: int) -> LeaseLostError:
        return LeaseLostError(
            "the lease of this partition was lost while the event was in flight: roll its "
            "transaction back. It is delivered again, by the instance that has the lease",
            feed=self._iteration.feed,
            partition=partition,
        )

    def _log_failed_after(self, item: KeyedEvent, error: Exception) -> None:
        iteration, batch = self._iteration, item.work.batch
        log.warning(
            "feed %s, partition %d: the event is done, although its handler failed with %s",
            iteration.feed,
            batch.partition,
            failure_line(error),
            extra={"feed": iteration.feed, "partition": batch.partition},
        )

    # ------------------------------------------------------------------ what is passed

    def passed(self, works: Collection[KeyedBatch]) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for work in works:
            for partition, ids in work.passes.items():
                found.setdefault(partition, set()).update(ids)
        return found

    def forget(self, work: KeyedBatch) -> None:
        claim = self._claim_of(work)
        if claim is None:
            return
        for ids in work.passes.values():
            for id in ids:
                claim.done.pop(id, None)
        payloads = self._readings[work.batch.partition].payloads
        for each in work.ids:
            if isinstance(each, str):
                payloads.pop(each, None)
