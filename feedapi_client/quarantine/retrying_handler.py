"""The handler of `FeedConsumer.run`, wrapped in what ``on_failure`` asks for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import anyio

from feedapi_client.model import Batch, FeedKey
from feedapi_client.quarantine.batch_delivery import BatchDelivery
from feedapi_client.quarantine.bisection import Attempt, FailedBatch
from feedapi_client.quarantine.policy import (
    Handler,
    OnFailure,
    Quarantine,
    Retry,
    parse_on_failure,
)
from feedapi_client.quarantine.quarantine_location import quarantine_beside
from feedapi_client.quarantine.quarantine_store import QuarantineStore
from feedapi_client.quarantine.record import QuarantinedEvent
from feedapi_client.retry import retry
from feedapi_client.stores.base import CursorStore

log = logging.getLogger(__name__)


class Watch(Protocol):
    """Told of what becomes of batches whose handler fails."""

    def retrying(self, batch: Batch, error: Exception, attempt: int, pause: float) -> None:
        """The handler gets the batch again after a pause, for the attempt of this number."""
        ...

    async def pause(self, seconds: float) -> None:
        """Wait before the next attempt. Raises `NoFurtherAttempt` after a stop."""
        ...

    def quarantined(self, events: Sequence[QuarantinedEvent]) -> None:
        """These events are in quarantine."""
        ...


class NoFurtherAttempt(BaseException):
    """The consumer was stopped: the batch comes again. No `Exception`, which would be a failure."""


async def retrying_handler(
    handle: Handler,
    on_failure: OnFailure,
    feed: FeedKey,
    cursors: CursorStore,
    watch: Watch | None = None,
) -> Handler:
    """Return `handle` wrapped in what `on_failure` asks for.

    The returned handler returns once the batch is handled, and raises what ends the iteration.

    Raises:
        ValueError: `on_failure` is unknown.
        StoreError: there is no place for quarantined events.
    """
    policy, quarantine = parse_on_failure(on_failure)
    if quarantine is not None and quarantine.whole_key:
        raise ValueError("Quarantine.whole_key needs a key for each event: use run_by_key")
    if quarantine is None:
        return (
            handle if policy.attempts == 1 else RetryingHandler(handle, feed, policy, watch=watch)
        )
    store = quarantine.to or quarantine_beside(cursors)
    await store.prepare()
    return RetryingHandler(
        handle,
        feed,
        policy,
        quarantine=quarantine,
        store=store,
        same_transaction=store.joins(cursors),
        watch=watch,
    )


class RetryingHandler:
    """Calls a handler again when it fails, and then quarantines the events that it can't handle.

    Partitions are handled concurrently, the batches of one partition in order.
    """

    def __init__(
        self,
        handle: Handler,
        feed: FeedKey,
        policy: Retry,
        *,
        quarantine: Quarantine | None = None,
        store: QuarantineStore | None = None,
        same_transaction: bool = False,
        watch: Watch | None = None,
    ) -> None:
        self._handle = handle
        self._watch = watch
        self._feed = feed
        self._policy = policy
        self._quarantine = quarantine
        self._store = store
        self._same_transaction = same_transaction
        self._in_a_row: dict[int, int] = {}

    async def __call__(self, batch: Batch) -> None:
        """Handle and commit the batch."""
        delivery = BatchDelivery(batch, self._handle, self._store, self._same_transaction)

        async def repeat(attempt: Attempt) -> None:
            backoff = self._policy.backoff(lambda error: not delivery.is_beyond_recovery(error))
            on_retry = None if self._watch is None else partial(self._watch.retrying, batch)
            await retry(attempt, backoff, sleep=pause, on_retry=on_retry)

        async def pause(seconds: float) -> None:
            if self._watch is None or delivery.handled:  # only its save is left
                await anyio.sleep(seconds)
            else:
                await self._watch.pause(seconds)

        failure: Exception | None = None
        try:
            await repeat(delivery.deliver)
        except Exception as error:
            if self._quarantine is None or delivery.handled or delivery.is_beyond_recovery(error):
                raise
            failure = error
        if failure is not None and self._quarantine is not None:
            failed = FailedBatch(delivery, self._feed, self._quarantine, repeat, self._in_a_row)
            await failed.recover(failure)
        self._after_commit(batch, delivery.quarantined)

    def _after_commit(self, batch: Batch, quarantined: list[QuarantinedEvent]) -> None:
        for event in quarantined:
            log.warning(
                "feed %s, partition %d: quarantined event %s (number %d up to cursor %r): "
                "the handler failed with %s",
                self._feed.url,
                event.partition,
                event.id,
                event.index,
                event.cursor,
                event.error_type,
                extra={"feed": self._feed.url, "partition": event.partition},
            )
        if quarantined and self._watch is not None:
            self._watch.quarantined(quarantined)
        last_is_quarantined = bool(quarantined) and quarantined[-1].index == len(batch) - 1
        if len(batch) and not last_is_quarantined:
            self._in_a_row.pop(batch.partition, None)
