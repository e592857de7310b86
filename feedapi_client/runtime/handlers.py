"""The application's handler, watched: when it got a batch, and how it failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime

import anyio

from feedapi_client.arguments import awaitable_of
from feedapi_client.causes import failure_of
from feedapi_client.errors import AlreadyDoneError, LeaseLostError
from feedapi_client.model import Batch
from feedapi_client.notifications import (
    BatchReleased,
    EventQuarantined,
    HandlerFailed,
    HandlerRetried,
)
from feedapi_client.quarantine.failure_text import failure_line, failure_traceback
from feedapi_client.quarantine.handling import NoFurtherAttempt
from feedapi_client.quarantine.policy import Handler
from feedapi_client.quarantine.record import QuarantinedEvent
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.partition import RuntimePartition

log = logging.getLogger(__name__)

HANDLER = "async def handle(batch): ..."
"""What a handler looks like, for messages."""


class WatchedHandler:
    """Calls the application's handler, and notes each call and each failure.

    Arguments:
        handle: the application's handler.
    """

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._driver: Driver
        self._again: set[int] = set()
        self._raised: set[int] = set()

    def watch(self, driver: Driver) -> None:
        """Note what becomes of the batches of this session, before it delivers one."""
        self._driver = driver

    async def __call__(self, batch: Batch) -> None:
        """Await ``handle(batch)``. Raises what the handler raises.

        A cancellation that nobody asked for is raised as a `StrayCancellationError` (R20).
        """
        partition = self._driver.partitions[batch.partition]
        if batch.partition in self._again:  # delivering it was the first attempt
            partition.handling.attempt(self._driver.clock())
        self._again.add(batch.partition)
        self._raised.discard(batch.partition)
        try:
            await awaitable_of(self._handle(batch), "the handler", HANDLER)
            partition.handling.returned()
        except LeaseLostError as error:
            if error.partition != batch.partition:
                self._note_failure(batch, error)
            raise  # no failure of the handler: another instance handles the batch
        except AlreadyDoneError as error:
            if not partition.is_saved(partition.batches, durably=True):
                self._note_failure(batch, error)
                raise
            partition.handling.returned()  # an earlier attempt has handled and committed it
        except BaseException as error:  # noqa: BLE001 - raised
            failed = failure_of(error, "the handler", own_task=True)
            self._note_failure(batch, failed)
            raise failed  # noqa: B904 - the cause of a stray cancellation is set

    def _note_failure(self, batch: Batch, error: Exception) -> None:
        self._raised.add(batch.partition)
        handling = self._driver.partitions[batch.partition].handling
        handling.failed(f"the handler failed with {failure_line(error)}")
        if self._driver.listeners:
            failed = HandlerFailed(batch.partition, type(error).__qualname__)
            self._driver.listeners.tell(failed, error)

    def over(self, batch: Batch) -> None:
        """The batch was handled."""
        self._driver.handled_at = datetime.now(UTC)
        self._again.discard(batch.partition)

    def retrying(self, batch: Batch, error: Exception, attempt: int, pause: float) -> None:
        """Log that the handler gets the batch again, at a bounded rate (R14)."""
        partition = self._driver.partitions[batch.partition]
        if batch.partition not in self._raised:
            partition.handling.failed(f"the commit failed with {failure_line(error)}")
        partition.handling.pauses(pause)
        if self._driver.listeners:
            self._driver.listeners.tell(HandlerRetried(batch.partition), error)
        self._driver.failure_log.warn(
            batch.partition,
            lambda: (
                f"{self._failure(partition)}; attempt {attempt} in {pause:.1f} s\n"
                f"{failure_traceback(error)}"
            ),
            attempt=attempt,
        )

    async def pause(self, seconds: float) -> None:
        """Wait before the next attempt. Raises `NoFurtherAttempt` after a stop."""
        with anyio.move_on_after(seconds):
            await self._driver.stopped.wait()
        if self._driver.stopping:
            raise NoFurtherAttempt

    def raised(self, batch: Batch, error: Exception) -> None:
        """Log that the handler has ended the iteration."""
        partition = self._driver.partitions[batch.partition]
        if batch.partition not in self._raised:
            partition.handling.failed(f"the commit failed with {failure_line(error)}")
        self._driver.ended_by_handler(partition)
        if self._driver.listeners:
            seconds = self._driver.clock() - partition.handling.delivered_at
            self._driver.listeners.tell(BatchReleased(partition.id, seconds), error)
        if error is self._driver.failure:
            return  # logged where it was found
        log.error(
            "%s, which ends the iteration\n%s",
            self._failure(partition),
            failure_traceback(error),
            extra={
                "feed": self._driver.feed,
                "partition": batch.partition,
                "attempt": partition.handling.attempts,
            },
        )

    def quarantined(self, events: Sequence[QuarantinedEvent]) -> None:
        """Count events that went into quarantine."""
        for event in events:
            self._driver.partitions[event.partition].handling.quarantine()
            if self._driver.listeners:
                told = EventQuarantined(event.partition, event.error_type)
                self._driver.listeners.tell(told)

    def _failure(self, partition: RuntimePartition) -> str:
        return f"feed {self._driver.feed}, partition {partition.id}: {partition.handling.error}"
