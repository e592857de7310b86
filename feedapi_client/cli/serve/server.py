"""Serve the example feed until a signal, and keep publishing."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import anyio
from anyio.abc import TaskStatus

from feedapi_client.cli.common.errors import CommandError
from feedapi_client.cli.serve.example_feed import ExampleFeed

_PUBLISH_INTERVAL = 0.05


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
                f"{feed.published:,} events were published, which is all that --max-events allows"
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
