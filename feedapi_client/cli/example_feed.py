"""The feed that ``feedapi serve`` serves: events about made-up orders, and splits."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import anyio
from anyio.abc import TaskStatus

from feedapi_client.cli.command import CommandError

if TYPE_CHECKING:
    from feedapi_client.model import Partition
    from feedapi_client.testing import Publisher


_PUBLISH_INTERVAL = 0.05
_MAX_OPEN_PARTITIONS = 64
_ENTITIES = 100
_MAX_EVENTS = 1_000_000
"""All events are kept in memory."""
_TYPES = ("OrderPlaced", "OrderPaid", "OrderShipped")

SplitMethod = Literal["starts-after", "cursor-from"]


class ExampleFeed:
    """Publishes events and splits partitions."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.published = 0
        self.splits = 0

    @property
    def full(self) -> bool:
        """Whether no more events may be published."""
        return self.published >= _MAX_EVENTS

    def publish(self, count: int) -> None:
        """Publish `count` more events, or as many as are still allowed."""
        headers = {"content-type": "application/json"} if self.publisher.dialect == "v1" else None
        end = min(self.published + count, _MAX_EVENTS)
        for number in range(self.published, end):
            entity = f"order-{number % _ENTITIES}"
            n = number // _ENTITIES + 1
            event = {"entity": entity, "n": n, "type": _TYPES[(n - 1) % len(_TYPES)]}
            self.publisher.publish(entity, event, headers=headers)
        self.published = max(self.published, end)

    def split(self) -> str | None:
        """Split a partition, by the two methods alternately, and return what was done.

        Returns None when there are so many open partitions that no more are split.
        """
        open_partitions = [p for p in self.publisher.partitions.values() if not p.closed]
        if len(open_partitions) >= _MAX_OPEN_PARTITIONS:
            return None
        partition, method = self._choose_split(open_partitions)
        self.splits += 1
        children = self.publisher.split(partition.id, method=method)
        names = ", ".join(map(str, children))
        return f"partition {partition.id} was split into {names} ({method})"

    def _choose_split(self, partitions: list[Partition]) -> tuple[Partition, SplitMethod]:
        """Choose the first partition that the method whose turn it is can split."""
        if self.splits % 2 == 0:
            return partitions[0], "starts-after"
        # A partition that starts after another one can't be split by cursor transfer: discovery
        # has no way to tell both its parent and the successors that take its cursor.
        for partition in partitions:
            if partition.starts_after is None:
                return partition, "cursor-from"
        return partitions[0], "starts-after"


async def serve_feed(
    feed: ExampleFeed, port: int, rate: float, split_every: float, rotate_every: float
) -> None:
    """Serve the feed until SIGINT or SIGTERM, and print its URL.

    `rate` is in events per second. `split_every` and `rotate_every` are in seconds, 0 for never.
    Raises `CommandError` when the port can't be used.
    """
    try:
        serving = feed.publisher.serve(port=port)
        url = serving.start()
    except OSError as error:
        raise CommandError(
            f"port {port} of 127.0.0.1 can't be used: {error.strerror or error}"
        ) from None
    try:
        async with anyio.create_task_group() as tasks:
            # First the signals: whoever reads the URL may send one at once.
            await tasks.start(_cancel_on_signal, tasks.cancel_scope)
            print(url, flush=True)
            _print_hints(feed, url, rate)
            tasks.start_soon(_publish, feed, rate)
            if split_every:
                tasks.start_soon(_repeat, split_every, feed.split)
            if rotate_every:
                tasks.start_soon(_repeat, rotate_every, lambda: _rotate(feed))
    finally:
        serving.stop()


async def _cancel_on_signal(
    scope: anyio.CancelScope, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            scope.cancel()


async def _publish(feed: ExampleFeed, rate: float) -> None:
    start, before = anyio.current_time(), feed.published
    while rate:
        await anyio.sleep(_PUBLISH_INTERVAL)
        # By the time since the start, so that a late wake-up does not lower the rate.
        due = before + int((anyio.current_time() - start) * rate)
        feed.publish(due - feed.published)
        if feed.full:
            _print_hint(
                f"{feed.published:,} events were published, and no more are: all are in memory"
            )
            return


async def _repeat(seconds: float, action: Callable[[], str | None]) -> None:
    """Do the action every so many seconds, and print what it did."""
    while True:
        await anyio.sleep(seconds)
        if (done := action()) is not None:
            _print_hint(done)


def _rotate(feed: ExampleFeed) -> str:
    feed.publisher.rotate_token()
    return "the token changed"


def _print_hints(feed: ExampleFeed, url: str, rate: float) -> None:
    publisher = feed.publisher
    options = ""
    if publisher.dialect == "v1":
        options += f" --v1-partitions {len(publisher.partitions)}"
    if publisher.bearer:
        options += " --auth-env FEED_AUTH"
    _print_hint(
        f"a {publisher.dialect} feed with {feed.published:,} events, and {rate:g} more a second. "
        "In another terminal:"
    )
    _print_hint(f"  feedapi discover {url}{options}")
    _print_hint(f"  feedapi cat {url} --from last --follow{options}")
    _print_hint(f"  feedapi cat {url} --store cursors.db{options} | head -5")
    _print_hint("  feedapi cursors ls --store cursors.db")
    _print_hint("Ctrl-C ends it.")


def _print_hint(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
