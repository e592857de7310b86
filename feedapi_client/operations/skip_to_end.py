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

Positions = Mapping[int, Position]
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
    report: Callable[[str], object] | None = None,
) -> Skipped:
    """Read the partitions, or all, to their ends; then save all positions at once, or none.

    It goes on from the stored positions, for a feed that can't say where its end is, and to skip
    what a consumer missed. Nothing is delivered. With `dry_run` it is read, and nothing is saved.

    Arguments:
        partitions: empty for all.
        report: called with what an operator should know before anything is read.

    Cancellation: nothing is saved, or everything.

    Raises:
        OperationError: nothing is stored of a consumer without a name of its own, while others of
            this feed are: one of them may be meant.
        FeedError: the feed can't be read.
        FencedError: a consumer saved a position meanwhile. Nothing is saved.
    """
    if not force:
        await check_unused(store, [feed.key])
    stored = await store.load(feed.key)
    if not stored and not force:
        await _check_meant(store, feed.key)
    if not stored and partitions and report is not None:
        report("partitions without a cursor, all but those given, start at their beginning")
    reader = _EndReader(feed, frozenset(partitions), progress)
    changed = _changes(stored, await reader.read(stored))
    # The stored revisions are those of before: a consumer that ran meanwhile refuses the save.
    if changed and not dry_run:
        if not force:
            await check_unused(store, [feed.key])
        await store.save(feed.key, changed)
    return Skipped(reader.events, changed)


async def _check_meant(store: CursorStore, key: FeedKey) -> None:
    keys = await store.feeds() if isinstance(store, AdministrableStore) else []
    others = [each.name for each in keys if (each.url, each.filters) == (key.url, key.filters)]
    if others and key.name == FeedKey(key.url).name:
        raise OperationError(
            f"{key}: nothing is stored of this consumer, but of {', '.join(sorted(others))}: give "
            "--name (name=), or --force (force=True) to begin one of this name"
        )


def _changes(stored: Positions, reached: Positions) -> dict[int, Position]:
    """Return what has to be saved so that `stored` becomes `reached`."""
    changes = {}
    for partition, end in reached.items():
        before = stored.get(partition)
        if before is None:
            changes[partition] = Position.after(None, end.cursor, end.status)
        elif (before.cursor, before.status) != (end.cursor, end.status):
            changes[partition] = before.advance(end.cursor, end.status)
    return changes


class _EndReader:
    """Reads a feed to its end with cursors in memory, and counts the events."""

    def __init__(
        self, feed: FeedAccess, partitions: frozenset[int], progress: Progress | None
    ) -> None:
        self._feed = feed
        self._partitions = partitions
        self._progress = progress
        self.events = 0

    async def read(self, stored: Positions) -> Positions:
        """Return the positions at the end of the feed, read from the stored ones on."""
        cursors, feed = MemoryCursorStore(), self._feed
        await cursors.replace(feed.key, stored)
        # Nothing is delivered, so that a child need not wait for its parent.
        only = self._partitions or None
        consumer = consumer_of(feed, cursors, ordered=False, follow=False, partitions=only)

        async def count(batch: Batch) -> None:
            self.events += len(batch)
            self._tell(consumer)

        async with consumer:
            self._tell(consumer)
            await consumer.run(count)
        return await cursors.load(feed.key)

    def _tell(self, consumer: FeedConsumer) -> None:
        if self._progress is not None:
            self._progress(consumer, self.events)
