"""``feedapi cursors skip``: read to the end without delivering, and save the cursors there."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import anyio

from feedapi_client.cli.common.escape import shown_line
from feedapi_client.cli.common.http_client import http_client
from feedapi_client.cli.common.progress import Progress
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.cursors.target import Target
from feedapi_client.consumer import FeedConsumer
from feedapi_client.model import Batch, Position
from feedapi_client.options import Limits
from feedapi_client.stores.memory import MemoryCursorStore
from feedapi_client.stores.moving import cursors_elsewhere, keys_elsewhere

Positions = Mapping[int, Position]


@dataclass(frozen=True, slots=True)
class Skipped:
    """What was skipped: events, and partitions whose position changed."""

    events: int
    partitions: int


def skip_to_end(target: Target, partitions: Collection[int], *, quiet: bool) -> None:
    """Read the partitions, or all, to their ends; then save all positions at once, or none."""
    skipped = run_async(_skip, target, partitions, quiet)
    print(
        f"{shown_line(target.key)}: {skipped.events} events skipped, "
        f"{skipped.partitions} positions saved"
    )


async def _skip(target: Target, partitions: Collection[int], quiet: bool) -> Skipped:
    async with target.open_store(create=True) as store:
        stored = await store.load(target.key)
        if not stored:
            for key in await keys_elsewhere(store, target.key):
                _note(cursors_elsewhere(key, target.key.url))
            if partitions:
                _note("partitions without a cursor, all but those given, start at their beginning")
        reader = _Reader(target, partitions, Progress(quiet=quiet))
        changed = _changes(stored, await reader.read(stored))
        # The stored revisions are those of before: a consumer that ran meanwhile refuses the save.
        if changed:
            await store.save(target.key, changed)
    return Skipped(reader.events, len(changed))


def _changes(stored: Positions, reached: Positions) -> dict[int, Position]:
    """Return what has to be saved so that `stored` becomes `reached`."""
    changes = {}
    for partition, end in reached.items():
        before = stored.get(partition)
        if before is None:
            changes[partition] = Position(end.cursor, end.status)
        elif (before.cursor, before.status) != (end.cursor, end.status):
            changes[partition] = before.advance(end.cursor, end.status)
    return changes


class _Reader:
    """Reads a feed to its end with cursors in memory, and counts the events."""

    def __init__(self, target: Target, partitions: Collection[int], progress: Progress) -> None:
        self._target = target
        self._partitions = partitions
        self._progress = progress
        self.events = 0

    async def read(self, stored: Positions) -> Positions:
        """Return the positions at the end of the feed, read from the stored ones on.

        Raises `FeedError`.
        """
        cursors = MemoryCursorStore()
        await cursors.replace(self._target.key, stored)
        target = self._target
        async with http_client(target.headers, Limits(), target.ca_file) as http:
            consumer = FeedConsumer(
                self._target.url,
                store=cursors,
                name=self._target.name,
                # Nothing is delivered, so that a child need not wait for its parent.
                ordered=False,
                follow=False,
                partitions=self._partitions or None,
                v1_partitions=self._target.v1_partitions,
                lineage=self._target.lineage,
                fetch=self._target.fetch,
                retry=self._target.retry,
                http=http,
            )
            async with consumer:
                await self._consume(consumer)
        return await cursors.load(self._target.key)

    async def _consume(self, consumer: FeedConsumer) -> None:
        self._progress.start(consumer)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._progress.watch_states)
                await consumer.run(self._count)
                tasks.cancel_scope.cancel()
        finally:
            self._progress.stop()

    async def _count(self, batch: Batch) -> None:
        self.events += len(batch)
        self._progress.add(len(batch))


def _note(text: str) -> None:
    print(f"feedapi: {shown_line(text)}", file=sys.stderr)
