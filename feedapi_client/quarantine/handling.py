"""A batch whose handler fails: attempts, the search for the failing event, and the save.

A dry run calls the handler with the first events of the batch; ``batch.commit`` raises
`DryRunPassed` in it, so that the handler's transaction rolls back. Each halves the events in
question. A handler that returns without a commit has no transaction that could be rolled back: its
events count as handled, and it gets the rest one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

import anyio

from feedapi_client.model import Batch, Committer, Event
from feedapi_client.quarantine.aside import Aside, is_final
from feedapi_client.quarantine.policy import Handler
from feedapi_client.quarantine.record import QuarantinedEvent
from feedapi_client.retry import retry
from feedapi_client.stores.threads import in_callers_thread, in_thread


class DryRunPassed(BaseException):
    """Raised by ``batch.commit`` in a dry run: the events passed.

    The handler's transaction has to roll back. It is not an `Exception`, so that the handler's own
    ``except Exception`` does not see it. As a cancellation it must not be swallowed.
    """


class NoFurtherAttempt(BaseException):
    """The consumer was stopped: the batch comes again. No `Exception`, which would be a failure."""


class Watch(Protocol):
    def retrying(self, batch: Batch, error: Exception, attempt: int, pause: float) -> None: ...

    async def pause(self, seconds: float) -> None:
        """Wait before the next attempt. Raises `NoFurtherAttempt` after a stop."""
        ...

    def quarantined(self, events: Sequence[QuarantinedEvent]) -> None: ...


def retrying_handler(handle: Handler, aside: Aside, watch: Watch) -> Handler:
    """The returned handler handles and commits, and raises what ends the iteration."""
    if aside.store is None and aside.policy.attempts == 1:
        return handle

    async def handle_batch(batch: Batch) -> None:
        await _Handling(batch, handle, aside, watch).run()

    return handle_batch


class _Handling:
    def __init__(self, batch: Batch, handle: Handler, aside: Aside, watch: Watch) -> None:
        self._batch, self._handle, self._aside, self._watch = batch, handle, aside, watch
        self._remaining: list[tuple[int, Event]] = list(enumerate(batch.events))
        self._quarantined: list[QuarantinedEvent] = []
        self._handled = False  # all that remain: only their save is left
        self._committed = False
        self._rolls_back = False  # whether the handler's commit rolled the last dry run back
        self._passing = 0  # number of the remaining events that are known to pass, from the first

    async def run(self) -> None:
        if not await self._is_delivered(partial(self._repeat, self._deliver)):
            await self._recover()
        self._watch.quarantined(self._quarantined)
        last = self._quarantined[-1].index if self._quarantined else -1
        if last < len(self._batch) - 1:
            self._aside.handled(self._batch.partition)

    # Delivery

    async def _repeat(self, attempt: Callable[[], Awaitable[None]]) -> None:
        async def pause(seconds: float) -> None:
            await (anyio.sleep(seconds) if self._handled else self._watch.pause(seconds))

        backoff = self._aside.policy.backoff(lambda error: not (self._committed or is_final(error)))
        on_retry = partial(self._watch.retrying, self._batch)
        await retry(attempt, backoff, sleep=pause, on_retry=on_retry)

    async def _deliver(self) -> None:
        """What failed is what is repeated: of a handler that has returned only the save (R5)."""
        saved = False

        async def commit(_: Batch, transaction: Any) -> None:
            nonlocal saved
            if not self._committed:
                await self._save(transaction)
                saved, self._committed = True, transaction is None

        if not self._handled:
            await self._call(len(self._remaining), commit)
            self._handled = True
        if not saved:
            await self._save(None)

    async def _is_delivered(self, deliver: Callable[[], Awaitable[None]]) -> bool:
        try:
            await deliver()
        except Exception as error:
            # Once the cursor is saved the events count as handled.
            handled = self._committed or self._handled or not self._remaining
            if handled or not self._aside.takes(error):
                raise
            return False
        return True

    async def _call(self, count: int, commit: Committer) -> None:
        chosen = [event for _, event in self._remaining[:count]]
        await self._handle(Batch(self._batch.partition, chosen, self._batch.cursor, commit))

    async def _save(self, transaction: Any) -> None:
        await self._aside.save(self._batch, self._quarantined, transaction)

    # The failing events

    async def _recover(self) -> None:
        while self._remaining:
            cause = await self._find_failing_event()
            if cause is not None:
                self._put_aside(cause)
            if self._rolls_back and self._remaining:
                if cause is None:  # the failure may pass by itself
                    await self._repeat(self._deliver)
                if cause is None or await self._is_delivered(self._deliver):
                    return
        await self._save(None)

    async def _find_failing_event(self) -> Exception | None:
        """It is the one at `_passing`. None if none fails any more."""
        if self._passing == len(self._remaining):
            # All passed and the batch failed again: what was known is not true any more.
            self._passing = 0
        while self._passing < len(self._remaining):
            high = await self._halve()
            try:
                await self._repeat(partial(self._dry_run, high))
            except Exception as error:  # noqa: BLE001 - whatever the handler raises is the result
                return error
            # What failed among these events has passed by itself. Others may come behind them.
        return None

    async def _halve(self) -> int:
        """Return how many to try. All before the last one passed, as far as they remain."""
        high = len(self._remaining)
        while high - self._passing > 1:
            # Without a rollback passing events are done with, so that they are tried one by one.
            middle = (self._passing + high) // 2 if self._rolls_back else self._passing + 1
            before = len(self._remaining)
            try:
                await self._dry_run(middle)
            except Exception:  # noqa: BLE001 - the last dry run decides what becomes of its error
                high = middle
            else:
                high -= before - len(self._remaining)
        return high

    async def _dry_run(self, count: int) -> None:
        """Try the first `count` remaining events; those that stay handled leave the remaining."""
        rolled_back = False

        async def commit(_: Batch, transaction: Any) -> None:
            nonlocal rolled_back
            rolled_back = True
            if hasattr(transaction, "flush"):
                await _flush(transaction)
            raise DryRunPassed

        try:
            await self._call(count, commit)
        except* DryRunPassed:
            pass
        self._rolls_back, self._passing = rolled_back, count if rolled_back else 0
        if not rolled_back:
            del self._remaining[:count]

    def _put_aside(self, error: Exception) -> None:
        index, event = self._remaining[self._passing]
        if index != (self._quarantined[-1].index + 1 if self._quarantined else 0):
            self._aside.handled(event.partition)  # the one before it
        record = self._aside.record(event, self._batch.cursor, index, error)
        if record is None:
            raise error
        self._quarantined.append(record)
        del self._remaining[self._passing]


async def _flush(session: Any) -> None:
    """Let an ORM session write what it holds back; a synchronous one in a thread."""
    if inspect.iscoroutinefunction(session.flush):
        await session.flush()
    else:
        await in_callers_thread(session.flush, otherwise=in_thread)
