"""Read to the end without delivering, and save the cursors there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from feedapi_client.consumer import FeedConsumer
from feedapi_client.model import Batch, FeedKey, Position
from feedapi_client.operations.feed_access import FeedAccess, consumer_of
from feedapi_client.operations.stored_positions import OperationError, check_unused
from feedapi_client.stores.base import AdministrableStore, CursorStore
from feedapi_client.stores.sqlite import MemoryCursorStore

Progress = Callable[[FeedConsumer, int], object]
"""Called at the start and after each batch, with the consumer that reads and the events so far."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """What was skipped: the number of events, and the positions that were saved."""

    events: int
    positions: Mapping[int, Position]


async def skip(
    store: CursorStore,
    feed: FeedAccess,
    partitions: Collection[int] = (),
    *,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Skipped:
    """Read the partitions, or all, to their ends; then save all positions at once, or none.

    It goes on from the stored positions, for a feed that can't say where its end is, and to skip
    what a consumer missed. Nothing is delivered. With `dry_run` it is read, and nothing is saved.

    Arguments:
        partitions: empty for all.

    Cancellation: nothing is saved, or everything.

    Raises:
        OperationError: nothing is stored of a consumer without a name of its own, while others of
            this feed are: one of them may be meant.
        FeedError: the feed can't be read.
        FencedError: a consumer saved a position meanwhile. Nothing is saved.
    """
    if not force:
        await check_unused(store, [feed.key])
    stored, reached, events = await store.load(feed.key), MemoryCursorStore(), 0
    if not stored and not force:
        await _check_meant(store, feed.key)
    await reached.replace(feed.key, stored)
    # Nothing is delivered, so that a child need not wait for its parent.
    settings = {"ordered": False, "follow": False, "partitions": frozenset(partitions) or None}
    consumer = consumer_of(feed, reached, **settings)

    async def count(batch: Batch | None = None) -> None:
        nonlocal events
        events += 0 if batch is None else len(batch)
        if progress is not None:
            progress(consumer, events)

    async with consumer:
        await count()
        await consumer.run(count)
    changed = {}
    for id, end in (await reached.load(feed.key)).items():
        before = stored.get(id)
        if before is None:
            changed[id] = Position.after(None, end.cursor, end.status)
        elif (before.cursor, before.status) != (end.cursor, end.status):
            changed[id] = before.advance(end.cursor, end.status)
    # The stored revisions are those of before: a consumer that ran meanwhile refuses the save.
    if changed and not dry_run:
        if not force:
            await check_unused(store, [feed.key])
        await store.save(feed.key, changed)
    return Skipped(events, changed)


async def _check_meant(store: CursorStore, key: FeedKey) -> None:
    keys = await store.feeds() if isinstance(store, AdministrableStore) else []
    others = [each.name for each in keys if (each.url, each.filters) == (key.url, key.filters)]
    if others and key.name == FeedKey(key.url).name:
        raise OperationError(
            f"{key}: nothing is stored of this consumer, but of {', '.join(sorted(others))}: give "
            "--name (name=), or --force (force=True) to begin one of this name"
        )
