"""Bugs of the runtime: what is fetched when, what is delivered, what a commit saves."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC
from typing import Any

import anyio
import pytest

from feedapi_client.client import FetchResponse
from feedapi_client.errors import FencedError
from feedapi_client.lineage.states import Save
from feedapi_client.model import Batch, FeedInfo
from feedapi_client.protocol.page import CheckpointedEvents, Outcome, PageReader
from feedapi_client.retry import Backoff
from feedapi_client.runtime import delivery, planning, trouble
from feedapi_client.runtime.delivery import Delivery
from feedapi_client.runtime.fetching import Request
from feedapi_client.runtime.loop import Background
from feedapi_client.runtime.partition import BufferBudget, RuntimePartition
from feedapi_client.runtime.planning import Planning
from feedapi_client.runtime.positions import Positions
from feedapi_client.runtime.scheduling import Agenda
from feedapi_client.runtime.session import Session
from feedapi_client.runtime.topology import DiscoveryTimer, Topology
from feedapi_client.runtime.trouble import Trouble
from feedapi_client.stores.base import translated

# ---------------------------------------------------------------------- what is read


def rest_of_a_torn_page_is_delivered(patch: pytest.MonkeyPatch) -> None:
    """Events behind the last checkpoint of a response that broke off are delivered."""
    rest = PageReader.rest

    def all_of_it(self: PageReader) -> list[CheckpointedEvents]:
        batches = rest(self)
        left = self._open
        return [*batches, CheckpointedEvents(left, self.cursor, 0)] if left else batches

    patch.setattr(PageReader, "rest", all_of_it)


def the_buffer_limit_drops(patch: pytest.MonkeyPatch) -> None:
    """What does not fit into the buffer is dropped, and read on behind it."""
    received = RuntimePartition.received

    def dropping(self: RuntimePartition, batch: CheckpointedEvents) -> None:
        received(self, batch if self.budget.has_room else batch._replace(events=[]))

    patch.setattr(RuntimePartition, "received", dropping)


def the_buffer_is_never_freed(patch: pytest.MonkeyPatch) -> None:
    """Bytes that were delivered still count as buffered."""
    add = BufferBudget.add

    def never_less(self: BufferBudget, size: int, *, deliverable: bool = False) -> None:
        add(self, max(size, 0), deliverable=deliverable)

    patch.setattr(BufferBudget, "add", never_less)


def a_stopped_partition_keeps_its_batches(patch: pytest.MonkeyPatch) -> None:
    """A partition that is stopped keeps what is pending, and delivers it when it starts again."""
    stop = RuntimePartition.stop

    def keeping(self: RuntimePartition) -> None:
        pending = list(self.pending)
        stop(self)
        self.pending.extend(pending)

    patch.setattr(RuntimePartition, "stop", keeping)


def a_cancelled_request_delivers(patch: pytest.MonkeyPatch) -> None:
    """A request whose partition was stopped still delivers what it has read.

    Equivalent in a simulation: a cancelled request reads no further chunk, and of one chunk all is
    received at once. Only if a chunk arrives in the very instant of the cancellation (trio then
    delivers it) is there something to receive, and no two virtual times are the same.
    """

    patch.setattr(Request, "counts", True)


def reading_goes_on_from_the_old_cursor(patch: pytest.MonkeyPatch) -> None:
    """After a stop a partition reads on behind what was dropped and not delivered."""
    stop = RuntimePartition.stop

    def from_what_was_read(self: RuntimePartition) -> None:
        read = self.read_cursor
        stop(self)
        self.read_cursor = read

    patch.setattr(RuntimePartition, "stop", from_what_was_read)


def a_response_is_never_closed(patch: pytest.MonkeyPatch) -> None:
    """A response that was left before its end is not closed."""
    leave = FetchResponse.__aexit__

    async def forgetting(self: FetchResponse, kind: Any, error: Any, traceback: Any) -> None:
        if error is None:
            await leave(self, kind, error, traceback)

    patch.setattr(FetchResponse, "__aexit__", forgetting)


def a_cancellation_is_lost_at_the_exit(patch: pytest.MonkeyPatch) -> None:
    """The consumer cancels the task that leaves it, and takes another cancellation for its own."""
    close = Background.close

    async def as_a_group(self: Background) -> None:
        self._group.cancel_scope.cancel()
        await close(self)

    patch.setattr(Background, "close", as_a_group)


# ---------------------------------------------------------------------- what is delivered


def batch_loses_an_event(patch: pytest.MonkeyPatch) -> None:
    """A batch that is joined from several checkpoints loses its first event."""
    take = Delivery._take

    def losing(self: Delivery, partition: Any) -> Batch:
        batch = take(self, partition)
        if len(batch.events) < 3:
            return batch
        return Batch(batch.partition, batch.events[1:], batch.cursor, batch.committer)

    patch.setattr(Delivery, "_take", losing)


def two_batches_in_flight(patch: pytest.MonkeyPatch) -> None:
    """A partition's next batch is delivered while one of it is in flight."""
    take = RuntimePartition.take

    def and_queue_again(self: RuntimePartition, *bounds: Any) -> Any:
        taken = take(self, *bounds)
        self.in_flight = False
        self.queued = False
        return taken

    patch.setattr(RuntimePartition, "take", and_queue_again)


def joined_batch_has_its_first_cursor(patch: pytest.MonkeyPatch) -> None:
    """A batch that is joined from several checkpoints has the cursor of the first of them."""
    take = RuntimePartition.take

    def too_early(self: RuntimePartition, *bounds: Any) -> Any:
        first = self.pending[0].cursor
        events, _ = take(self, *bounds)
        return events, first

    patch.setattr(RuntimePartition, "take", too_early)


def a_wake_up_is_lost(patch: pytest.MonkeyPatch) -> None:
    """The iterating task is not woken when something is ready for it."""

    def offer(self: Planning, partition: Any) -> None:
        if not partition.queued and self._is_deliverable(partition):
            partition.queued = True
            self._ready.append(partition)

    patch.setattr(Planning, "offer", offer)


def actions_are_lost(patch: pytest.MonkeyPatch) -> None:
    """An action of the planner that is interrupted is not carried out by the next caller."""

    async def save(self: Planning, action: Save) -> None:
        self._todo.popleft()
        await self.positions.save(action.positions)

    patch.setattr(Planning, "_save", save)


# ---------------------------------------------------------------------- what a commit saves


def a_commit_saves_what_was_read(patch: pytest.MonkeyPatch) -> None:
    """A commit saves the cursor behind what was read, and not behind its batch."""
    commit = Delivery._commit

    async def too_far(self: Delivery, partition: Any, number: int, batch: Batch, tx: Any) -> None:
        read = Batch(batch.partition, batch.events, partition.read_cursor, batch.committer)
        await commit(self, partition, number, read, tx)

    patch.setattr(Delivery, "_commit", too_far)


def a_failed_commit_counts_as_made(patch: pytest.MonkeyPatch) -> None:
    """A commit is noted before its save: when that fails, the next attempt does nothing."""

    async def noted_first(
        self: Delivery, partition: Any, number: int, batch: Batch, transaction: Any
    ) -> None:
        if partition.is_saved(number):
            return
        before = partition.position_before(number)
        position = self._planner.checkpoint(partition.id, batch.cursor, after=before)
        partition.saved(number, position, durable=transaction is None)
        await self._planning.positions.save({partition.id: position}, transaction)

    patch.setattr(Delivery, "_commit", noted_first)


def run_forgets_the_commit(patch: pytest.MonkeyPatch) -> None:
    """`run` does not commit the batch of a handler that has not done so."""

    async def handled(self: Delivery, batch: Batch) -> None:
        self.release(batch.partition)

    patch.setattr(Delivery, "handled", handled)


def fencing_is_swallowed(patch: pytest.MonkeyPatch) -> None:
    """A save that the store refuses as another consumer's counts as made."""
    save = Positions.save

    async def forgiving(self: Positions, positions: Any, transaction: Any = None, *_: Any) -> None:
        with suppress(FencedError):
            await save(self, positions, transaction)

    patch.setattr(Positions, "save", forgiving)


def a_save_is_cancelled_in_the_middle(patch: pytest.MonkeyPatch) -> None:
    """A save that began is cancelled with its caller, and may be through all the same (R20)."""

    async def unshielded(self: Positions, positions: Any, transaction: Any = None, *_: Any) -> None:
        save = self._store.save(self._key, positions, transaction=transaction)
        await translated(save, "saving cursors", self._key.url)

    async def at_once(call: Any, **_: Any) -> None:
        await call

    patch.setattr(Positions, "save", unshielded)
    patch.setattr(delivery, "finish", at_once)
    patch.setattr(planning, "finish", at_once)


def an_iteration_does_not_wait_for_a_save(patch: pytest.MonkeyPatch) -> None:
    """A new iteration begins while the one before it still saves."""

    async def aclose(self: Session) -> None:
        self.close()

    patch.setattr(Session, "aclose", aclose)


# ---------------------------------------------------------------------- what is scheduled


def a_failing_slot_is_never_returned(patch: pytest.MonkeyPatch) -> None:
    """The share of slots for failing partitions is used up once and for all."""
    take = Agenda._take

    def keeping(self: Agenda) -> tuple[int, Any, int] | None:
        found = take(self)
        if found is not None and found[0]:
            self._failing += 1
        return found

    patch.setattr(Agenda, "_take", keeping)


def a_slot_is_never_returned(patch: pytest.MonkeyPatch) -> None:
    """A slot without work is not counted as free."""

    async def worker(self: Agenda) -> None:
        assert self._work is not None
        while (found := self._take()) is not None:
            failing, job, place = found
            self._failing += failing
            try:
                await self._work(job, place)
            finally:
                self._failing -= failing
        await anyio.Event().wait()

    patch.setattr(Agenda, "_worker", worker)


def retries_without_a_pause(patch: pytest.MonkeyPatch) -> None:
    """Whatever failed is tried again at once."""
    pause = Backoff.pause

    def at_once(self: Backoff, error: Exception) -> float:
        pause(self, error)
        return 0.0

    patch.setattr(Backoff, "pause", at_once)


def a_refusal_leads_to_no_discovery(patch: pytest.MonkeyPatch) -> None:
    """A refused partition waits for the next discovery of the interval (R10)."""
    patch.setattr(DiscoveryTimer, "refused", lambda self, delay: None)


def pauses_by_the_time_of_day(patch: pytest.MonkeyPatch) -> None:
    """How long a refused partition still pauses is taken from the clock that people set."""
    ask_again = Trouble.ask_again

    def by_the_clock(self: Trouble, **how: Any) -> float:
        until = ask_again(self, **how)
        if not until or self.retry_at is None:
            return until
        return self._clock() + (self.retry_at - trouble.datetime.now(UTC)).total_seconds()

    patch.setattr(Trouble, "ask_again", by_the_clock)


def the_first_token_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Fetches keep the token and the dialect of the first discovery."""
    discovered = Topology.discovered

    def once(self: Topology, info: FeedInfo) -> None:
        if self.info is None:
            discovered(self, info)

    patch.setattr(Topology, "discovered", once)


# ---------------------------------------------------------------------- what is shown


def caught_up_too_early(patch: pytest.MonkeyPatch) -> None:
    """A partition counts as caught up although events of it are not committed."""
    patch.setattr(
        RuntimePartition, "is_caught_up", property(lambda self: self.last_contact is not None)
    )


def a_silent_page_is_the_end(patch: pytest.MonkeyPatch) -> None:
    """One empty answer is the end of a closed partition: no other is awaited."""
    end = PageReader._end

    def at_once(self: PageReader) -> Outcome:
        outcome = end(self)
        return Outcome.END if outcome is Outcome.EMPTY else outcome

    patch.setattr(PageReader, "_end", at_once)


def a_grace_period_never_ends(patch: pytest.MonkeyPatch) -> None:
    """A stop waits for what is in flight for as long as that takes."""
    patch.setattr(Session, "end_within", lambda self, seconds: None)


def a_stop_waits_for_the_feed(patch: pytest.MonkeyPatch) -> None:
    """A stop does not end an iteration that waits for its first discovery."""
    patch.setattr(Session, "stop", lambda self: self.iteration.stop())
