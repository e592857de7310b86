"""What an operator does with quarantined events (a dead-letter queue): list, show, replay, drop."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from feedapi_client.arguments import NotAsyncError, awaitable_of, check_async_function
from feedapi_client.causes import failure_of
from feedapi_client.errors import StoreError
from feedapi_client.model import Batch, Decoder, FeedKey, being_handled, make_event
from feedapi_client.quarantine.aside import HeldKeys
from feedapi_client.quarantine.policy import Handler
from feedapi_client.quarantine.quarantine_store import PAGE_SIZE, QuarantineStore, list_events
from feedapi_client.quarantine.record import (
    EarlierEventQuarantined,
    QuarantinedEvent,
    first_of_key,
)

log = logging.getLogger(__name__)

_HANDLER = "async def handle(batch): ..."

Report = Callable[[QuarantinedEvent, Exception | None], object]
"""Called after each replayed event with its error, or None if it was handled."""


async def show(store: QuarantineStore, id: str) -> QuarantinedEvent:
    """Return one event. Raises `StoreError` also if it is not in the quarantine."""
    event = await store.get(id)
    if event is None:
        raise StoreError(f"there is no event {id!r} in the quarantine")
    return event


async def drop(
    store: QuarantineStore,
    ids: Iterable[str] | None = None,
    *,
    feed: FeedKey | None = None,
    partition: int | None = None,
) -> int:
    """Delete those of `ids`, or all of the `feed` and `partition`; return how many there were."""
    if ids is not None:
        return await store.remove(ids)
    dropped = 0
    while page := await store.page(feed, partition=partition, limit=PAGE_SIZE):
        dropped += await store.remove([event.id for event in page])
    return dropped


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay: events handled, and events that failed again and stayed."""

    handled: int = 0
    failed: int = 0


async def replay(
    store: QuarantineStore,
    handle: Handler,
    ids: Iterable[str] | None = None,
    *,
    feed: FeedKey | None = None,
    partition: int | None = None,
    decoder: Decoder = orjson.loads,
    report: Report | None = None,
) -> Replayed:
    """Deliver events to ``await handle(batch)`` once more.

    Each batch holds one event. They come in the order in which they were quarantined: those of
    `ids`, or all of the `feed` and `partition`.

    The handler may be that of `FeedConsumer.run`. Its ``await batch.commit(transaction=tx)``
    removes the event in that transaction: exactly once, also when two replays run at a time. So
    does ``await event.done(transaction=tx)`` of ``batch.events[0]``. Without a commit the event is
    removed when the handler returns. An event whose handler raises stays, and the replay goes on.
    So does one of a key (``Quarantine(whole_key=True)``) that has an earlier one in quarantine.

    Cancellation: the event in flight stays unless its transaction was committed.

    Raises:
        StoreError: also for an id that is not in the quarantine.
        TypeError: the handler is not asynchronous.
    """
    check_async_function("the handler", handle, _HANDLER)
    handled = failed = 0
    events = list_events(store, feed, partition=partition) if ids is None else _chosen(store, ids)
    held: dict[FeedKey, HeldKeys] = {}
    async for event in events:
        error = await _held_back(store, held, event)
        error = error or await _replay_event(store, handle, event, decoder)
        if error is None:
            handled += 1
        else:
            failed += 1
            kind, where = type(error).__qualname__, (event.feed.url, event.partition)
            text = "feed %s, partition %d: event %s stays in quarantine: %s"
            log.warning(text, *where, event.id, kind)
        if report is not None:
            report(event, error)
    return Replayed(handled, failed)


async def _held_back(
    store: QuarantineStore, held: dict[FeedKey, HeldKeys], event: QuarantinedEvent
) -> Exception | None:
    first = first_of_key(event)
    if first == event.id:
        return None
    keys = held.setdefault(event.feed, HeldKeys(store, event.feed, first_of_key))
    earlier = await keys.holding(first)
    if earlier is None:
        keys.doubt()  # it came after the quarantine was read, perhaps with others
        earlier = await keys.holding(first)
    if earlier is None:  # not even itself is there: it has left, or its feed has moved
        there = await store.get(event.id)
        if there is not None and there.feed != event.feed:
            return await _held_back(store, held, there)
    return EarlierEventQuarantined(first) if earlier and earlier[0] < event.id else None


async def _chosen(store: QuarantineStore, ids: Iterable[str]) -> AsyncIterator[QuarantinedEvent]:
    for id in dict.fromkeys(ids):
        yield await show(store, id)


async def _replay_event(
    store: QuarantineStore, handle: Handler, event: QuarantinedEvent, decoder: Decoder
) -> Exception | None:
    removed = False

    async def commit(_: Batch, transaction: Any) -> None:
        nonlocal removed
        if await store.remove([event.id], transaction=transaction) != 1 and not removed:
            raise StoreError(
                f"event {event.id} left the quarantine meanwhile: is another replay running?",
                feed=event.feed.url,
                partition=event.partition,
            )
        removed = True

    payload = make_event(event.partition, event.raw, event.headers, decoder=decoder)
    batch = Batch(event.partition, [payload], event.cursor, commit)
    try:
        with being_handled(payload, partial(commit, batch)):
            await awaitable_of(handle(batch), "the handler", _HANDLER)
        if not removed:
            await commit(batch, None)
    except NotAsyncError:
        raise
    except BaseException as error:  # noqa: BLE001 - the event stays, and the caller is told
        return failure_of(error, "the handler")
    return None
