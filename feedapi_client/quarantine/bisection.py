"""Find the failing event of a batch by dry runs, and quarantine it.

A dry run calls the handler with the first events of the batch. ``batch.commit`` raises
`DryRunPassed` in it, so that the handler's transaction rolls back: a dry run that comes that far
has passed and has left nothing behind. Each dry run halves the events in question, until one event
is left whose predecessors pass and which does not.

- An ORM session is flushed before, because what it holds back may be what fails.
- A constraint that the database checks only at the end of a transaction fails without a failing
  event. Such an error is raised.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from feedapi_client.model import Batch, FeedKey
from feedapi_client.quarantine.batch_delivery import BatchDelivery
from feedapi_client.quarantine.failure_text import note_limit
from feedapi_client.quarantine.policy import Quarantine, may_be_an_events_fault
from feedapi_client.quarantine.record import quarantined
from feedapi_client.stores.caller_thread import in_callers_thread
from feedapi_client.stores.threads import in_thread

Attempt = Callable[[], Awaitable[None]]


class DryRunPassed(BaseException):
    """Raised by ``batch.commit`` in a dry run: the events passed.

    The handler's transaction has to roll back. It is not an `Exception`, so that the handler's own
    ``except Exception`` does not see it. As a cancellation it must not be swallowed.
    """


class FailedBatch:
    """A batch whose handler failed: finds its failing events and has the others handled.

    Arguments:
        retry: calls an attempt as often as the user's `Retry` says, and raises its last error.
        in_a_row: number of events quarantined last without a gap, by partition; shared by all
            batches of a consumer.
    """

    def __init__(
        self,
        delivery: BatchDelivery,
        feed: FeedKey,
        quarantine: Quarantine,
        retry: Callable[[Attempt], Awaitable[None]],
        in_a_row: dict[int, int],
    ) -> None:
        self._delivery = delivery
        self._feed = feed
        self._quarantine = quarantine
        self._retry = retry
        self._in_a_row = in_a_row
        self._rolls_back = False  # whether the handler's commit rolled the last dry run back
        self._passing = 0  # number of the remaining events that are known to pass, from the first

    async def recover(self, error: Exception) -> None:
        """Quarantine the failing events, have the others handled, and commit.

        Raises:
            `error`, because of which the batch failed, if it can't be an event's fault; or the
            error of a later attempt, likewise.
        """
        delivery = self._delivery
        if not delivery.remaining or not self._may_be_an_events_fault(error):
            raise error
        while delivery.remaining:
            cause = await self._find_failing_event()
            if cause is not None:
                self._quarantine_event(cause)
            if self._rolls_back and delivery.remaining and await self._deliver_rest(cause):
                return
        await delivery.save(None)

    async def _deliver_rest(self, cause: Exception | None) -> bool:
        """Return whether the remaining events are handled; False if another one of them fails."""
        try:
            if cause is None:
                # No event was found: the failure may pass by itself.
                await self._retry(self._delivery.deliver)
            else:
                await self._delivery.deliver()
        except Exception as error:
            if (
                cause is None
                or self._delivery.is_beyond_recovery(error)
                or not self._may_be_an_events_fault(error)
            ):
                raise
            return False
        return True

    async def _find_failing_event(self) -> Exception | None:
        """Find the first event that fails, which is then the one at `_passing`.

        Returns its error, or None if none fails (any more).
        """
        remaining = self._delivery.remaining
        if self._passing == len(remaining):
            # All passed and the batch failed again: what was known is not true any more.
            self._passing = 0
        while self._passing < len(remaining):
            high = await self._halve()
            try:
                await self._retry(partial(self._dry_run, high))
            except Exception as error:  # noqa: BLE001 - whatever the handler raises is the result
                return error
            # What failed among these events has passed by itself. Others may come behind them.
        return None

    async def _halve(self) -> int:
        """Return how many of the remaining events to try so that the last of them is in question.

        All before it passed, as far as they are still among the remaining.
        """
        remaining = self._delivery.remaining
        low, high = self._passing, len(remaining)
        while high - low > 1:
            # Without a rollback passing events are done with, so that they are tried one by one.
            middle = (low + high) // 2 if self._rolls_back else low + 1
            before = len(remaining)
            try:
                await self._dry_run(middle)
            except Exception:  # noqa: BLE001 - the last dry run decides what becomes of its error
                high = middle
            else:
                high -= before - len(remaining)
                low = self._passing
        return high

    async def _dry_run(self, count: int) -> None:
        """Try the first `count` remaining events; those that stay handled leave the remaining.

        Raises what the handler raises.
        """
        rolled_back = False

        async def commit(_: Batch, transaction: Any) -> None:
            nonlocal rolled_back
            rolled_back = True
            if hasattr(transaction, "flush"):
                await _flush(transaction)
            raise DryRunPassed

        delivery = self._delivery
        try:
            await delivery.call_handler(delivery.remaining[:count], commit)
        except* DryRunPassed:
            pass
        self._rolls_back = rolled_back
        if rolled_back:
            self._passing = count
        else:
            del delivery.remaining[:count]
            self._passing = 0

    def _may_be_an_events_fault(self, error: Exception) -> bool:
        return may_be_an_events_fault(self._quarantine, error)

    def _quarantine_event(self, error: Exception) -> None:
        """Move the event at `_passing` from the remaining events to the quarantined ones."""
        delivery, partition = self._delivery, self._delivery.batch.partition
        index, event = delivery.remaining[self._passing]
        earlier = delivery.quarantined
        follows = index == (earlier[-1].index + 1 if earlier else 0)
        in_a_row = self._in_a_row.get(partition, 0) + 1 if follows else 1
        if not self._may_be_an_events_fault(error):
            raise error
        if in_a_row > self._quarantine.limit:
            note_limit(error, self._feed, partition, self._quarantine.limit)
            raise error
        self._in_a_row[partition] = in_a_row
        record = quarantined(self._feed, event, delivery.batch.cursor, index, error)
        delivery.quarantined.append(record)
        del delivery.remaining[self._passing]


async def _flush(session: Any) -> None:
    """Let an ORM session write what it holds back; a synchronous one in a thread."""
    if inspect.iscoroutinefunction(session.flush):
        await session.flush()
    else:
        await in_callers_thread(session.flush, otherwise=in_thread)
