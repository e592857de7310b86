"""`RuntimePartition`: what each of its methods changes."""

from __future__ import annotations

import anyio
import pytest

from feedapi_client import FeedUnavailableError, Limits, NegotiationError, Position, RetryPolicy
from feedapi_client.errors import RequestRefusedError
from feedapi_client.lineage.planner import Entry, State
from feedapi_client.runtime.board import partition_status
from feedapi_client.runtime.buffer import BufferBudget, memory_of
from feedapi_client.runtime.partition import ReadEnd, RuntimePartition
from feedapi_client.runtime.slots import Slot
from feedapi_client.status import PartitionState
from tests.runtime.helpers import LIMITS, batch, runtime_partition

pytestmark = pytest.mark.anyio

OUTAGE = FeedUnavailableError("no answer", feed="f", partition=0)
REFUSAL = RequestRefusedError("gone", status=410, feed="f", partition=0)


def started(buffer: BufferBudget | None = None, cursor: str = "a") -> RuntimePartition:
    partition = runtime_partition(buffer)
    partition.start(cursor)
    return partition


# ---------------------------------------------------------------------- what is read


def test_a_partition_reads_from_the_cursor_it_is_started_with() -> None:
    partition = runtime_partition()
    assert not partition.started
    partition.start("a")
    assert partition.started
    assert partition.read_cursor == "a"


def test_what_is_received_is_pending_and_counted() -> None:
    buffer = BufferBudget(1000)
    partition = started(buffer)
    partition.received(batch("b", size=30))
    partition.received(batch("c", size=12))
    assert partition.read_cursor == "c"
    size = memory_of(batch("b", size=30)) + memory_of(batch("c", size=12))
    assert size > 42
    assert (partition.pending_bytes, buffer.used, buffer.deliverable) == (size, size, size)
    assert partition.last_event is not None


def test_a_batch_without_events_is_no_sign_of_a_last_event() -> None:
    partition = started()
    partition.received(batch("b", events=0))
    assert partition.pending
    assert partition.last_event is None


def test_stopping_drops_what_was_not_delivered() -> None:
    buffer = BufferBudget(1000)
    partition = started(buffer)
    partition.received(batch("b"))
    partition.announce()
    partition.reached_end(ReadEnd("b", closed=True))
    partition.stop()
    assert not partition.started
    assert not partition.pending
    assert not partition.deliverable
    assert partition.end is None
    assert (partition.pending_bytes, buffer.used, buffer.deliverable) == (0, 0, 0)
    assert partition.read_cursor == "a"


def test_after_a_stop_it_reads_on_from_what_was_delivered() -> None:
    partition = started()
    partition.received(batch("b"))
    partition.take(1)
    partition.received(batch("c"))
    partition.stop()
    partition.start("a")
    assert partition.read_cursor == "b", "the application has the batch up to b"


async def test_a_stop_cancels_the_request_under_way() -> None:
    partition = started()
    scope = anyio.CancelScope()
    partition.begin_request(scope)
    partition.stop()
    assert scope.cancel_called
    assert partition.fetching, "its task has not unwound yet"
    partition.end_request(scope)
    assert not partition.fetching


async def test_a_stop_marks_the_slot_of_the_request_under_way() -> None:
    """The scope of a slot is cancelled also to give the slot back: that is no stop."""
    partition, slot = started(), Slot()
    partition.begin_request(slot.scope, slot)
    slot.give_back()
    assert not slot.stopped
    partition.stop()
    assert slot.stopped


async def test_a_request_that_is_over_does_not_end_the_one_that_has_begun_since() -> None:
    """Otherwise a partition would be taken for idle, and asked by two requests at once."""
    partition = started()
    first, second = anyio.CancelScope(), anyio.CancelScope()
    partition.begin_request(first)
    partition.end_request(first)
    partition.begin_request(second)
    partition.end_request(first)
    assert partition.fetching
    partition.cancel_request()
    assert second.cancel_called
    assert not first.cancel_called
    partition.end_request(second)
    assert not partition.fetching


def test_the_end_is_taken_once() -> None:
    partition = started()
    partition.reached_end(ReadEnd("a", closed=False))
    assert partition.take_end() == ReadEnd("a", closed=False)
    assert partition.end is None


def test_reading_on_forgets_the_end_that_was_seen() -> None:
    partition = started()
    partition.reached_end(ReadEnd("a", closed=False))
    partition.read_on()
    assert partition.end is None


def test_an_uncommitted_end_stays_until_the_partition_is_stopped() -> None:
    partition = started()
    partition.end_uncommitted(ReadEnd("a", closed=True))
    assert partition.at_end
    partition.stop()
    assert not partition.at_end
    assert partition.end is None


def test_r15_the_poll_delay_grows_to_its_maximum_and_falls_back_on_progress() -> None:
    limits = Limits(poll_interval=1.0, max_poll_interval=3.0)
    partition = runtime_partition(poll_interval=1.0, max_poll_interval=3.0)
    delays = [partition.poll_delay]
    for _ in range(3):
        partition.polled(limits)
        delays.append(partition.poll_delay)
    partition.progressed(limits)
    delays.append(partition.poll_delay)
    assert delays == [1.0, 2.0, 3.0, 3.0, 1.0]


@pytest.mark.parametrize(
    ("stream", "seconds", "grows"),
    [(True, 1.5, False), (True, 0.5, True), (400, 0.3, False), (400, 0.1, True), (0, 9.0, True)],
)
@pytest.mark.anyio
async def test_r15_the_poll_delay_of_a_stream_that_was_held_open_does_not_grow(
    stream: bool | int, seconds: float, grows: bool
) -> None:
    partition, now = started(), [0.0]
    slot = Slot(clock=lambda: now[0])
    partition.begin_request(slot.scope, slot)
    partition.answered(stream=stream)
    now[0] = seconds
    partition.end_request(slot.scope)
    before = partition.poll_delay
    partition.polled(LIMITS)
    assert (partition.poll_delay > before) is grows


def test_r15_a_maximum_below_the_poll_interval_does_not_shorten_it() -> None:
    partition = runtime_partition(poll_interval=5.0, max_poll_interval=1.0)
    partition.polled(Limits(poll_interval=5.0, max_poll_interval=1.0))
    assert partition.poll_delay == 5.0


# ---------------------------------------------------------------------- what is delivered


def test_what_is_pending_is_deliverable_once_it_is_announced() -> None:
    partition = started()
    partition.announce()
    assert not partition.deliverable, "nothing is pending"
    partition.received(batch("b"))
    assert not partition.deliverable
    partition.announce()
    assert partition.deliverable


def test_r03_a_delivery_joins_what_is_pending_up_to_the_batch_limit() -> None:
    buffer = BufferBudget(1000)
    partition = started(buffer)
    for cursor in "bcd":
        partition.received(batch(cursor, events=2, size=100))
    events, cursor = partition.take(250)
    assert (len(events), cursor) == (4, "c")
    size = memory_of(batch("d", events=2, size=100))
    assert (partition.pending_bytes, buffer.used, buffer.deliverable) == (size, size, size)
    assert (partition.batches, partition.events) == (1, 4)


def test_a_batch_larger_than_the_limit_is_delivered_whole() -> None:
    partition = started()
    partition.received(batch("b", size=500))
    events, cursor = partition.take(1)
    assert (len(events), cursor) == (1, "b")


def test_r04_a_partition_with_a_batch_in_flight_delivers_nothing_more() -> None:
    partition = started()
    partition.received(batch("b"))
    partition.received(batch("c"))
    partition.announce()
    partition.take(1)
    assert partition.in_flight
    assert not partition.deliverable
    partition.release()
    assert not partition.in_flight
    assert partition.deliverable


def test_r16_a_waiting_fetch_is_woken_when_the_application_takes_something() -> None:
    partition = started()
    partition.received(batch("b"))
    taken = partition.taken()
    assert not taken.is_set()
    partition.take(1)
    assert taken.is_set()


# ---------------------------------------------------------------------- what is committed


def test_r05_a_save_counts_once_it_is_acknowledged() -> None:
    partition = started()
    partition.saved(1, Position("b", "open", 2), durable=True)
    assert partition.has_saves
    assert partition.committed == 0
    assert partition.acknowledge() == Position("b", "open", 2)
    assert partition.committed == 1
    assert not partition.has_saves
    assert partition.acknowledge() is None


def test_r05_saving_a_batch_again_forgets_the_save_that_was_rolled_back() -> None:
    partition = started()
    partition.saved(1, Position("b", "open", 2), durable=False)
    partition.saved(1, Position("b", "open", 2), durable=False)
    assert partition.position_before(1) is None
    assert partition.position_before(2) == Position("b", "open", 2)


def test_r05_only_a_save_outside_of_a_transaction_is_durable() -> None:
    partition = started()
    partition.saved(1, Position("b"), durable=False)
    assert partition.is_saved(1)
    assert not partition.is_saved(1, durably=True)
    partition.saved(1, Position("b"), durable=True)
    assert partition.is_saved(1, durably=True)


def test_r05_a_batch_is_overtaken_by_a_later_save_or_an_acknowledged_one() -> None:
    partition = started()
    partition.saved(2, Position("c"), durable=True)
    assert partition.is_overtaken(1)
    assert not partition.is_overtaken(2), "it may have been rolled back"
    partition.acknowledge()
    assert partition.is_overtaken(2)
    assert not partition.is_overtaken(3)


# ---------------------------------------------------------------------- what fails


async def test_r14_failures_are_counted_until_a_request_succeeds() -> None:
    partition = started()
    assert not partition.failing
    for attempts in (1, 2):
        assert partition.failures.failed(OUTAGE) >= 0
        assert partition.failures.attempts == attempts
    assert partition.failing
    assert partition.error is OUTAGE
    assert partition.failures.retry_at is not None
    partition.failures.recovered()
    assert not partition.failing
    assert (partition.failures.attempts, partition.error, partition.failures.since) == (
        0,
        None,
        None,
    )


async def test_r14_a_fatal_error_is_raised_and_shown() -> None:
    partition = started()
    error = NegotiationError("no feed")
    with pytest.raises(NegotiationError):
        partition.failures.failed(error)
    assert partition.error is error


async def test_r14_failing_for_too_long_is_fatal() -> None:
    partition = RuntimePartition(
        Entry(0), buffer=BufferBudget(1), limits=LIMITS, retry=RetryPolicy(give_up_after=0)
    )
    with pytest.raises(FeedUnavailableError):
        partition.failures.failed(OUTAGE)


def test_an_error_keeps_the_time_of_the_first_in_a_row() -> None:
    partition = started()
    partition.failures.show(OUTAGE)
    first = partition.failures.since
    partition.failures.show(REFUSAL)
    assert partition.error is REFUSAL
    assert partition.failures.since is first


def test_a_partition_that_is_started_again_has_no_error_and_no_time_of_one() -> None:
    partition = started()
    partition.failures.show(OUTAGE)
    partition.stop()
    partition.start("a")
    assert (partition.error, partition.failures.since) == (None, None)


# ---------------------------------------------------------------------- status


def test_status_of_a_partition_that_was_never_read() -> None:
    status = partition_status(Entry(7, waits_for=(3,)), None, None)
    assert (status.partition, status.state, status.waits_for) == (7, PartitionState.WAITING, (3,))
    assert (status.caught_up, status.cursor) == (None, None)


def test_status_shows_a_partition_as_superseded_only_after_the_save() -> None:
    entry = Entry(7, state=State.SUPERSEDED)
    assert partition_status(entry, None, None, unsaved=True).state is PartitionState.READING
    assert partition_status(entry, None, None).state is PartitionState.SUPERSEDED


def test_status_of_a_partition_that_fails_while_it_is_read_is_retrying() -> None:
    partition = started()
    partition.entry.state = State.READING
    partition.failures.show(OUTAGE)
    status = partition_status(partition.entry, partition, partition.failures.since)
    assert status.state is PartitionState.RETRYING
    assert status.error is not None
    assert status.since == partition.failures.since


def test_a_partition_is_caught_up_once_all_that_was_read_is_committed() -> None:
    partition = started()
    partition.received(batch("b"))
    partition.take(1)
    partition.entry.state = State.CAUGHT_UP
    partition.note_caught_up()
    assert partition.caught_up_at is None
    partition.release()
    partition.note_caught_up()
    assert partition.caught_up_at is None, "the batch was not committed"
    partition.entry.position = Position("b")
    partition.note_caught_up()
    assert partition.caught_up_at is not None


def test_its_repr_shows_what_it_does() -> None:
    partition = runtime_partition()
    assert repr(partition) == (
        "<RuntimePartition 0: waiting, stopped at '_first', 0 bytes pending>"
    )
    partition.start("a")
    partition.received(batch("b", size=7))
    partition.take(1)
    assert "pausing at 'b', 0 bytes pending, in flight" in repr(partition)
