"""What `FeedConsumer.run` does when the handler fails: raise, try again, or put the event that it can't handle into quarantine.

A handler gets whole batches, and cursors exist only behind them. So a poisonous event can't be stepped over by committing the events before it and those
after it on their own: the effects of a batch's good events, the quarantined ones and the cursor must become durable together. The contract:

- A handler is the same with quarantine as without. It applies ``batch.events`` in a transaction of its own and calls ``batch.commit(transaction=tx)``
  there as its last step; or it has no such transaction and leaves the commit to `run`.
- When a batch fails, the poison is looked for by *trials*: the handler is called with runs of the batch's first events. In a trial ``batch.commit`` raises
  `TrialOver`, so that the handler's transaction rolls back: a trial that comes that far has passed and has left nothing behind (an ORM session is flushed
  before, since what it holds back may be what fails). Trials halve the run that fails, until one event is left whose predecessors pass and which does
  not. A constraint that the database checks only at the end of a transaction makes a failure that no event can be blamed for, which is raised.
- Then the handler gets the batch once more without that event, and its ``batch.commit(transaction=tx)`` saves the cursor and the quarantined event in that
  very transaction. Exactly once holds whatever the trials found out.
- A handler that returns from a trial without a commit has no transaction that could be rolled back: its events count as handled. It goes on to get
  the rest of the batch one by one, each event once more after the attempt that failed: at least once.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import anyio

from feedapi_client.errors import CommitOrderError, FencedError, StoreError
from feedapi_client.http.transport import backoff
from feedapi_client.model import Batch, Committer, Event, FeedKey
from feedapi_client.options import RetryPolicy
from feedapi_client.quarantine.base import (
    QuarantinedEvent,
    QuarantineStore,
    quarantine_beside,
    quarantined,
)
from feedapi_client.stores.base import CursorStore

log = logging.getLogger("feedapi_client")

Handler = Callable[[Batch], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """Put events that the handler can't handle aside, and go on.

    `to` is where; by default in the database, file or memory of the consumer's cursor store. Where both are in one database, the events and the cursor are
    saved in one transaction; else the events first, so that a crash in between quarantines them twice rather than never.
    `limit`: so many events of a partition in a row are not poison, something else is wrong: the error of the next one is raised.
    `errors` are the exceptions that an event can be to blame for. Those of the cursor store never are.
    """

    to: QuarantineStore | None = None
    limit: int = 100
    errors: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"Quarantine.limit must be at least 1, not {self.limit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Hand a batch over again when the handler failed: `attempts` times in all (None: without end), after a random pause of up to
    ``min(max_delay, base_delay * 2**n)`` seconds. The other partitions go on meanwhile; the batch keeps its place in ``max_concurrency``.

    `errors` are the exceptions worth another attempt. `then` says what follows the last one: "raise", or a `Quarantine`, which takes an event only after
    as many attempts on the run of events that ends with it.
    """

    attempts: int | None = 5
    base_delay: float = 0.2
    max_delay: float = 20.0
    errors: tuple[type[Exception], ...] = (Exception,)
    then: Literal["raise"] | Quarantine = "raise"

    def __post_init__(self) -> None:
        if self.attempts is not None and self.attempts < 1:
            raise ValueError(f"Retry.attempts must be at least 1, not {self.attempts}")
        if self.then != "raise" and not isinstance(self.then, Quarantine):
            raise ValueError(f"Retry.then must be 'raise' or a Quarantine, not {self.then!r}")
        self.policy()

    def policy(self) -> RetryPolicy:
        """The pauses. Raises ValueError for impossible ones."""
        return RetryPolicy(base_delay=self.base_delay, max_delay=self.max_delay)


OnFailure = Literal["raise", "retry", "quarantine"] | Retry | Quarantine

_ONCE = Retry(attempts=1)


class TrialOver(BaseException):
    """Raised by ``batch.commit`` in a trial: the events passed, and the handler's transaction is to roll back.

    Not an Exception, so that a handler's own ``except Exception`` does not see it. Like a cancellation it must not be caught for good.
    """


async def failure_handler(
    handle: Handler, on_failure: OnFailure, feed: FeedKey, cursors: CursorStore
) -> Handler:
    """`handle` with what `on_failure` says around it: returns once a batch was handled, and raises what ends the iteration.

    Raises ValueError for an unknown `on_failure`, `StoreError` when there is no place for quarantined events.
    """
    retry, quarantine = _parts(on_failure)
    if retry.attempts == 1 and quarantine is None:
        return handle
    guard = _Guard(handle, feed, retry, quarantine)
    if quarantine is not None:
        guard.store = quarantine.to or quarantine_beside(cursors)
        guard.joined = guard.store.joins(cursors)
        await guard.store.prepare()
    return guard.handle_batch


def _parts(on_failure: OnFailure) -> tuple[Retry, Quarantine | None]:
    match on_failure:
        case "raise":
            return Retry(attempts=1), None
        case "retry":
            return Retry(), None
        case "quarantine":
            return Retry(attempts=1), Quarantine()
        case Quarantine():
            return Retry(attempts=1), on_failure
        case Retry(then=Quarantine() as quarantine):
            return on_failure, quarantine
        case Retry():
            return on_failure, None
    raise ValueError(
        f"on_failure must be 'raise', 'retry', 'quarantine', a Retry or a Quarantine, not {on_failure!r}"
    )


class _Guard:
    """A handler with its failures seen to. Partitions come concurrently, the batches of one in order."""

    def __init__(
        self, handle: Handler, feed: FeedKey, retry: Retry, quarantine: Quarantine | None
    ) -> None:
        self.handle = handle
        self.feed = feed
        self.retry = retry
        self.quarantine = quarantine
        self.store: QuarantineStore | None = None
        self.joined = False
        self.in_a_row: dict[int, int] = {}
        self._policy = retry.policy()

    async def handle_batch(self, batch: Batch) -> None:
        """Handle and commit the batch."""
        case = _Case(self, batch)
        error = await self.attempts(case.deliver)
        if error is not None:
            if self.quarantine is None:
                raise error
            await case.sift(error)
        case.close()

    async def attempts(self, call: Callable[[], Awaitable[Exception | None]]) -> Exception | None:
        """The error of the last attempt, or None after one that went well."""
        attempt = 1
        while (error := await call()) is not None and (
            self.retry.attempts is None or attempt < self.retry.attempts
        ):
            if not isinstance(error, self.retry.errors):
                return error
            delay = backoff(self._policy, attempt)
            log.warning(
                "feed %s: the handler failed with %s; attempt %d in %.1f s",
                self.feed.url,
                type(error).__qualname__,
                attempt + 1,
                delay,
            )
            await anyio.sleep(delay)
            attempt += 1
        return error


class _Case:
    """One batch, and what has become of its events."""

    def __init__(self, guard: _Guard, batch: Batch) -> None:
        self.guard = guard
        self.batch = batch
        self.rest: list[tuple[int, Event]] = list(enumerate(batch.events))
        self.poison: list[QuarantinedEvent] = []
        self.kept = 0  # so many of the poisonous events are in a quarantine that shares no transaction with the cursors
        self.rolls_back = False
        self.passing = 0  # so many of the rest's first events are known to pass

    async def deliver(self) -> Exception | None:
        """Hand over what is left of the batch, and commit it."""
        committed = durable = False

        async def commit(_: Batch, transaction: Any) -> None:
            nonlocal committed, durable
            if not durable:
                await self._save(transaction)
                committed, durable = True, transaction is None

        try:
            await self._hand_over(self.rest, commit)
            if not committed:
                await self._save(None)
        except Exception as error:
            # Once the cursor is saved the events count as handled: there is nothing to try again.
            if durable or _final(error):
                raise
            return error
        return None

    async def trial(self, count: int) -> Exception | None:
        """Whether the handler can handle the first `count` events of the rest: None, or why not. Those that stay handled leave the rest."""
        rolled_back = False

        async def commit(_: Batch, transaction: Any) -> None:
            nonlocal rolled_back
            rolled_back = True
            if hasattr(transaction, "flush"):
                await transaction.flush()  # what an ORM session still holds back may be what fails
            raise TrialOver

        try:
            try:
                await self._hand_over(self.rest[:count], commit)
            except* TrialOver:
                pass
        except Exception as error:  # noqa: BLE001 - as above
            return error
        self.rolls_back = rolled_back
        if rolled_back:
            self.passing = count
        else:
            del self.rest[:count]
            self.passing = 0
        return None

    async def _hand_over(self, events: list[tuple[int, Event]], commit: Committer) -> None:
        await self.guard.handle(
            Batch(self.batch.partition, [event for _, event in events], self.batch.cursor, commit)
        )

    async def sift(self, error: Exception) -> None:
        """Quarantine what the handler can't handle, have the rest handled, commit. `error` is why the batch failed; raised when no event is to blame."""
        if not self.rest or not self._accusable(error):
            raise error
        while self.rest:
            culprit = await self._search()
            if culprit is not None:
                self._quarantine(culprit)
            if self.rolls_back and self.rest:
                # Once more in earnest: with patience when nothing was to blame, for a failure that passes by itself.
                again = await (
                    self.guard.attempts(self.deliver) if culprit is None else self.deliver()
                )
                if again is None:
                    return
                if culprit is None or not self._accusable(again):
                    raise again
        await self._save(None)

    async def _search(self) -> Exception | None:
        """Find the first event that fails, the one at `passing`; None when there is none (any more)."""
        if self.passing == len(self.rest):
            self.passing = (
                0  # all passed and yet the batch failed again: what was known is not true any more
            )
        low, high = self.passing, len(self.rest)
        while high - low > 1:
            # One by one as long as what passes is done with: nothing would be gained by going back.
            middle = (low + high) // 2 if self.rolls_back else low + 1
            left = len(self.rest)
            if await self.trial(middle) is not None:
                high = middle
            else:
                high -= left - len(self.rest)
                low = self.passing
        return await self.guard.attempts(lambda: self.trial(high))

    def _accusable(self, error: Exception) -> bool:
        assert self.guard.quarantine is not None
        return isinstance(error, self.guard.quarantine.errors) and not isinstance(error, StoreError)

    def _quarantine(self, error: Exception) -> None:
        quarantine, partition = self.guard.quarantine, self.batch.partition
        assert quarantine is not None
        index, event = self.rest[self.passing]
        follows = index == (self.poison[-1].index + 1 if self.poison else 0)
        row = self.guard.in_a_row.get(partition, 0) + 1 if follows else 1
        if not self._accusable(error):
            raise error
        if row > quarantine.limit:
            error.add_note(
                f"feed {self.guard.feed.url}, partition {partition}: {quarantine.limit} events in a row were quarantined before this one"
            )
            raise error
        self.guard.in_a_row[partition] = row
        self.poison.append(quarantined(self.guard.feed, event, self.batch.cursor, index, error))
        del self.rest[self.passing]

    async def _save(self, transaction: Any) -> None:
        """Save the cursor, and the quarantined events with it."""
        commit, store = self.batch.commit, self.guard.store
        if not self.poison:
            await commit(transaction)
            return
        assert store is not None
        if not self.guard.joined:
            await store.add(self.poison[self.kept :])
            self.kept = len(self.poison)
            await commit(transaction)
        elif transaction is not None:
            await commit(transaction)
            await store.add(self.poison, transaction=transaction)
        else:
            async with store.begin() as own:
                await commit(own)
                await store.add(self.poison, transaction=own)

    def close(self) -> None:
        """The batch is committed."""
        for event in self.poison:
            log.warning(
                "feed %s, partition %d: quarantined event %s (number %d up to cursor %r): the handler failed with %s",
                self.guard.feed.url, event.partition, event.id, event.index, event.cursor, event.error_type,
            )  # fmt: skip
        if len(self.batch) and (not self.poison or self.poison[-1].index < len(self.batch) - 1):
            self.guard.in_a_row.pop(self.batch.partition, None)


def _final(error: BaseException) -> bool:
    """The consumer can't go on, whatever the application does."""
    if isinstance(error, BaseExceptionGroup):
        return any(_final(one) for one in error.exceptions)
    return isinstance(error, (FencedError, CommitOrderError))
