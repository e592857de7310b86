"""``feedapi cursors skip``: read to the end without delivering, and save the cursors there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from feedapi_client.cli.escape import shown_line
from feedapi_client.cli.feed_options import OnlyPartitions, Quiet
from feedapi_client.cli.reporting import report, say
from feedapi_client.cli.store_options import BesideInstances, ConsumerOfFeed

if TYPE_CHECKING:
    from feedapi_client.consumer import FeedConsumer


@dataclass(frozen=True, kw_only=True)
class CursorsSkip:
    """Options of ``feedapi cursors skip``."""

    target: ConsumerOfFeed
    partitions: OnlyPartitions = None
    force: BesideInstances = False
    quiet: Quiet = False


async def cursors_skip(options: CursorsSkip) -> None:
    """Read to the end of each partition without delivering, then save the cursors there.

    For a feed that can't say where its end is (_last), and to skip what a consumer missed. Goes on
    from the stored cursors. They are saved at the end, all at once: Ctrl-C before that changes
    nothing. A store that does not exist is created.
    """
    import anyio

    from feedapi_client.cli.terminal import ProgressLine
    from feedapi_client.operations import skip

    line = ProgressLine(quiet=options.quiet)
    shown = -1

    def progress(consumer: FeedConsumer, events: int) -> None:
        nonlocal shown
        if shown < 0:
            line.start(consumer)
        line.add(events - max(0, shown))
        shown = events

    async with options.target.open(create=True) as (store, feed):
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(line.watch_states)
                skipped = await skip(
                    store,
                    feed,
                    options.partitions or (),
                    force=options.force,
                    progress=progress,
                    report=say,
                )
                line.stop()
                report(
                    f"{shown_line(feed.key)}: {skipped.events} events skipped, "
                    f"{len(skipped.positions)} positions saved"
                )
                tasks.cancel_scope.cancel()
        finally:
            line.stop()
