"""`FeedConsumer.run`, and what it has in common with `run_by_key`: tasks and failed attempts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any

import anyio
from anyio.abc import TaskGroup

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
from feedapi_client.runtime.iteration import Iteration
from feedapi_client.runtime.planning import Planning

log = logging.getLogger("feedapi_client.runtime.handlers")
lost_log = logging.getLogger("feedapi_client.consumer")

HANDLER = "async def handle(batch): ..."
"""What a handler looks like, for messages."""


class Running:
    """The tasks of one `run` or `run_by_key`, and what is told of its handlers."""

    def __init__(self, planning: Planning, log: logging.Logger = log) -> None:
        self.scope = anyio.CancelScope()
        self._planning, self._iteration = planning, planning.iteration
        self._log = log
        self._failure: BaseException | None = None
        self._tasks: TaskGroup

    async def run(self, work: Callable[[], Awaitable[object]]) -> None:
        """Await `work()` and all that it starts. The first error cancels the rest."""
        try:
            with self.scope:
                async with anyio.create_task_group() as self._tasks:
                    await work()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        if self._failure is not None:
            raise self._failure

    def start(self, task: Callable[..., Coroutine[Any, Any, object]], *args: Any) -> None:
        self._tasks.start_soon(task, *args)

    def start_beside(self, task: Callable[..., Coroutine[Any, Any, object]], *args: Any) -> None:
        self._tasks.start_soon(self._guarded, task, *args)

    async def _guarded(self, task: Callable[..., Coroutine[Any, Any, object]], *args: Any) -> None:
        try:
            await task(*args)
        except BaseException as error:  # noqa: BLE001 - raised by `run`, without a group around it
            self.end(failure_of(error, "a save or a task beside the handlers", own_task=True))

    def end(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.scope.cancel()

    def end_tasks(self) -> None:
        self._tasks.cancel_scope.cancel()

    # ------------------------------------------------------------------ what is told of handlers

    def tell_failure(self, partition: int, error: Exception) -> None:
        if self._iteration.listeners:
            self._iteration.listeners.tell(
                HandlerFailed(partition, type(error).__qualname__), error
            )

    def retries(
        self, partition: int, error: Exception, attempt: int, pause: float, *, of: str = ""
    ) -> None:
        """The handler gets its batch or event again. That is logged at a bounded rate (R14)."""
        iteration, handling = self._iteration, self._planning.partitions[partition].handling
        handling.pauses(pause)
        if iteration.listeners:
            iteration.listeners.tell(HandlerRetried(partition), error)
        iteration.failure_log.warn(
            partition,
            lambda: (
                f"feed {iteration.feed}, partition {partition}: {handling.error}; "
                f"attempt {attempt}{of} in {pause:.1f} s\n{failure_traceback(error)}"
            ),
            attempt=attempt,
        )

    def ended_by(self, partition: int, error: Exception, attempt: int | None = None) -> None:
        if self._failure is not None:
            return
        iteration, handling = self._iteration, self._planning.partitions[partition].handling
        iteration.ended_by_handler(partition, handling)
        if error is iteration.failure:
            return  # logged where it was found
        self._log.error(
            "feed %s, partition %d: %s, which ends the iteration\n%s",
            iteration.feed,
            partition,
            handling.error,
            failure_traceback(error),
            extra={"feed": iteration.feed, "partition": partition, "attempt": attempt},
        )

    def quarantined(self, events: Sequence[QuarantinedEvent]) -> None:
        feed = self._iteration.feed
        for event in events:
            self._planning.partitions[event.partition].handling.quarantined += 1
            if self._iteration.listeners:
                told = EventQuarantined(event.partition, event.error_type)
                self._iteration.listeners.tell(told)
            self._log.warning(
                "feed %s, partition %d: quarantined event %s (number %d up to cursor %r): "
                "the handler failed with %s",
                *(feed, event.partition, event.id, event.index, event.cursor, event.error_type),
                extra={"feed": feed, "partition": event.partition},
            )


class BatchHandler:
    """The application's handler of batches: notes when it gets one, and how it failed."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._planning: Planning
        self._iteration: Iteration
        self._running: Running
        self._raised: set[int] = set()

    async def __call__(self, batch: Batch) -> None:
        """Await ``handle(batch)``. Raises what the handler raises.

        A cancellation that nobody asked for is raised as a `StrayCancellationError` (R20).
        """
        partition = self._planning.partitions[batch.partition]
        if partition.handling.attempt_began is None:  # delivering it was the first attempt
            partition.handling.attempt(self._iteration.clock())
        self._raised.discard(batch.partition)
        try:
            await awaitable_of(self._handle(batch), "the handler", HANDLER)
        except LeaseLostError as error:
            if error.partition != batch.partition:
                self._failed(batch, error)
            raise  # no failure of the handler: another instance handles the batch
        except AlreadyDoneError as error:
            if not partition.is_saved(partition.batches, durably=True):
                self._failed(batch, error)
                raise
            # An earlier attempt has handled and committed it.
        except BaseException as error:  # noqa: BLE001 - raised
            failed = failure_of(error, "the handler", own_task=True)
            self._failed(batch, failed)
            raise failed  # noqa: B904 - the cause of a stray cancellation is set
        finally:
            partition.handling.returned()

    def _failed(self, batch: Batch, error: Exception) -> None:
        self._raised.add(batch.partition)
        handling = self._planning.partitions[batch.partition].handling
        handling.failed(f"the handler failed with {failure_line(error)}")
        self._running.tell_failure(batch.partition, error)

    def _commit_failed(self, batch: Batch, error: Exception) -> None:
        if batch.partition not in self._raised:
            handling = self._planning.partitions[batch.partition].handling
            handling.failed(f"the commit failed with {failure_line(error)}")

    # ------------------------------------------------------------------ attempts, see `Watch`

    def retrying(self, batch: Batch, error: Exception, attempt: int, pause: float) -> None:
        self._commit_failed(batch, error)
        self._running.retries(batch.partition, error, attempt, pause)

    async def pause(self, seconds: float) -> None:
        """Wait before the next attempt. Raises `NoFurtherAttempt` after a stop."""
        with anyio.move_on_after(seconds):
            await self._iteration.stopped.wait()
        if self._iteration.stopping:
            raise NoFurtherAttempt

    def quarantined(self, events: Sequence[QuarantinedEvent]) -> None:
        self._running.quarantined(events)

    # ------------------------------------------------------------------ the run

    async def run(
        self,
        running: Running,
        planning: Planning,
        next: Callable[[], Awaitable[Batch | None]],
        handle: Handler,
        handled: Callable[[Batch], Awaitable[None]],
        max_concurrency: int,
    ) -> None:
        """Have `handle`, which repeats what this handler does, handle all batches.

        `handled` commits and releases one. A task each: what a handler sets for its task ends with
        the batch.
        """
        self._running, self._planning = running, planning
        self._iteration = iteration = planning.iteration
        places = anyio.Semaphore(max_concurrency)

        async def work(batch: Batch) -> None:
            try:
                with iteration.listeners.handling(batch.partition):
                    await self._handle_once(handle, batch)
                await handled(batch)
            except NoFurtherAttempt:
                pass  # it comes again
            except BaseException as error:  # noqa: BLE001 - raised by `Running.run`
                self._ended(batch, failure_of(error, "the commit", own_task=True))
            else:
                iteration.handled_at = datetime.now(UTC)
            finally:
                places.release()

        async def deliver() -> None:
            await places.acquire()
            while (batch := await next()) is not None:
                running.start(work, batch)
                await places.acquire()

        await running.run(deliver)

    async def _handle_once(self, handle: Handler, batch: Batch) -> None:
        try:
            await handle(batch)
        except LeaseLostError as error:
            if error.partition != batch.partition:
                raise
            extra = {"feed": self._iteration.feed, "partition": batch.partition}
            lost_log.warning("%s", error, extra=extra)

    def _ended(self, batch: Batch, error: Exception) -> None:
        self._commit_failed(batch, error)
        iteration, handling = self._iteration, self._planning.partitions[batch.partition].handling
        self._running.ended_by(batch.partition, error, handling.attempts)
        if iteration.listeners:
            seconds = iteration.clock() - handling.delivered_at
            iteration.listeners.tell(BatchReleased(batch.partition, seconds), error)
        self._running.end(error)
