"""What an operator does with quarantined events: list, look, replay, drop. How long they are kept is up to the operator: nothing expires."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from feedapi_client.errors import StoreError
from feedapi_client.model import Batch, Decoder, FeedKey, make_event
from feedapi_client.quarantine.base import QuarantinedEvent, QuarantineStore, SQLiteQuarantineStore

log = logging.getLogger("feedapi_client")

_PAGE = 100


Handler = Callable[[Batch], Awaitable[object]]
Report = Callable[[QuarantinedEvent, Exception | None], object]


@asynccontextmanager
async def open_quarantine(where: str) -> AsyncIterator[QuarantineStore]:
    """The quarantine in a SQLite file, or in the database of a SQLAlchemy URL (``postgresql+psycopg://...``), which needs the extra ``sql``.

    Raises `StoreError` when there is none.
    """
    if "://" not in where:
        file = SQLiteQuarantineStore(where)
        await file.prepare()
        yield file
        return
    from sqlalchemy.ext.asyncio import create_async_engine

    from feedapi_client.quarantine.sql import SQLAlchemyQuarantineStore as SQLAlchemyQuarantineStore

    engine = create_async_engine(where, hide_parameters=True)
    try:
        database = SQLAlchemyQuarantineStore(engine)
        await database.prepare()
        yield database
    finally:
        await engine.dispose()


async def list_events(
    store: QuarantineStore, feed: FeedKey | None = None, *, partition: int | None = None
) -> AsyncIterator[QuarantinedEvent]:
    """The events in the order of their quarantining, of one feed or of all, read in pages. May run while events come and go. Raises `StoreError`."""
    after = ""
    while page := await store.page(feed, partition=partition, after=after, limit=_PAGE):
        for event in page:
            yield event
        after = page[-1].id


async def show(store: QuarantineStore, id: str) -> QuarantinedEvent:
    """One event. Raises `StoreError` when it is not in the quarantine."""
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
    """Delete events for good: those of `ids`, or all of the `feed` and `partition`. Returns how many there were. Raises `StoreError`."""
    if ids is not None:
        return await store.remove(ids)
    dropped = 0
    while page := await store.page(feed, partition=partition, limit=_PAGE):
        dropped += await store.remove([event.id for event in page])
    return dropped


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay came to: so many events handled, and so many that failed again and stayed."""

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
    """Hand events to ``await handle(batch)`` once more, one in each batch, in the order of their quarantining: those of `ids`, or all of the `feed`
    and `partition`.

    Events that came after a quarantined one were handled long ago: whether a late event still makes sense is the handler's business. The handler may be
    that of `FeedConsumer.run`: ``await batch.commit(transaction=tx)`` takes the event out of the quarantine in that transaction, exactly once also when
    two replays run at a time; otherwise it is taken out when the handler returns. An event whose handler raises stays, and the replay goes on; `report`
    is called with each event and its error or None. Cancelled, the event in hand stays unless its transaction was committed.

    Raises `StoreError`, also for an id that is not in the quarantine.
    """
    handled = failed = 0
    events = list_events(store, feed, partition=partition) if ids is None else _chosen(store, ids)
    async for event in events:
        error = await _replay(store, handle, event, decoder)
        handled, failed = handled + (error is None), failed + (error is not None)
        if error is not None:
            log.warning(
                "feed %s, partition %d: event %s stays in quarantine: the handler failed with %s",
                event.feed.url,
                event.partition,
                event.id,
                type(error).__qualname__,
            )
        if report is not None:
            report(event, error)
    return Replayed(handled, failed)


async def _chosen(store: QuarantineStore, ids: Iterable[str]) -> AsyncIterator[QuarantinedEvent]:
    for id in dict.fromkeys(ids):
        yield await show(store, id)


async def _replay(
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
    try:
        await handle(Batch(event.partition, [payload], event.cursor, commit))
        if not removed:
            await commit(Batch(event.partition, [payload], event.cursor), None)
    except Exception as error:  # noqa: BLE001 - the handler's own: the event stays, and the caller is told
        return error
    return None
