"""``feedapi serve``: an example feed, to try consumers with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from feedapi_client import testing
from feedapi_client.arguments import environment_value
from feedapi_client.cli.command import CommandError, command, flag, option, stopping
from feedapi_client.protocol.text import counted

_MAX_OPEN_PARTITIONS, _ENTITIES = 64, 100
_MAX_EVENTS = 1_000_000
"""All events are kept in memory."""
_TYPES = ("OrderPlaced", "OrderPaid", "OrderShipped")


@dataclass(frozen=True, kw_only=True)
class _Publisher:
    """The options of a `Publisher`."""

    dialect: Literal["v1", "v2-draft", "v2-token"] = option(
        help="The dialect that the publisher uses.", default="v2-token"
    )
    page_size: int = option("N", "Events per response.", default=1000, min=1)
    checkpoint_every: int = option("N", "Events between two cursors.", default=100, min=1)
    vary: bool = flag("Make every response different, as the specification allows.")
    stream: bool = flag("Offer responses that stay open (v2-draft, v2-token).")


@dataclass(frozen=True, kw_only=True)
class _Serve:
    feed: _Publisher
    partitions: int = option(help="Partitions at the start.", default=2, min=1, max=1024)
    port: int = option(help="On 127.0.0.1; 0 takes a free one.", default=0, min=0, max=65535)
    history: int = option("N", "Events that are published before the start.", default=1000, min=0)
    rate: float = option("N", "New events per second.", default=10.0, min=0)
    split_every: float = option(
        "SECONDS", "Split a partition, by the two methods in turn; 0: never.", default=0.0, min=0
    )
    rotate_every: float = option("SECONDS", "Make the token stale; 0: never.", default=0.0, min=0)
    bearer_env: str | None = option(
        "NAME",
        "Require the bearer token in this environment variable.",
        parse=lambda name: environment_value(name, "").removeprefix("Bearer ").strip(),
    )

    def __post_init__(self) -> None:
        if self.feed.dialect == "v1" and self.split_every:
            raise ValueError("--split-every: a v1 feed has no splits")


@command("serve --rate 20 --split-every 20", "serve --dialect v2-draft --port 8080")
async def serve(o: _Serve) -> None:
    """Serve an example feed on the loopback interface, to try consumers with, until Ctrl-C.

    The first line on stdout is its URL.
    """
    import anyio

    filters = ("entity", "type") if o.feed.dialect == "v2-draft" else ()
    ends = testing.Quirks(last_cursor=None if o.feed.dialect == "v1" else "closed")
    publisher = testing.Publisher(
        o.partitions, bearer=o.bearer_env, filters=filters, quirks=ends, **vars(o.feed)
    )
    feed = ExampleFeed(publisher)
    feed.publish(o.history)
    serving = publisher.serve(port=o.port)
    try:
        url = serving.start()
    except OSError as error:
        reason = error.strerror or error
        raise CommandError(f"port {o.port} of 127.0.0.1 can't be used: {reason}") from None
    try:
        # First the signals: whoever reads the URL may send one at once.
        async with stopping(), anyio.create_task_group() as tasks:
            print(url, flush=True)
            _hint(_first_steps(o, feed, url))
            tasks.start_soon(_publish, feed, o.rate)
            tasks.start_soon(_repeat, o.split_every, feed.split)
            tasks.start_soon(_repeat, o.rotate_every, feed.rotate)
            await anyio.sleep_forever()
    finally:
        serving.stop()


def _first_steps(o: _Serve, feed: ExampleFeed, url: str) -> str:
    options = f" --v1-partitions {o.partitions}" if o.feed.dialect == "v1" else ""
    options += " --auth-env FEED_AUTH" if o.bearer_env else ""
    events = counted(feed.published, "event")
    return f"""a {o.feed.dialect} feed with {events}, and {o.rate:g} more a second.
In another terminal:
  feedapi discover {url}{options}
  feedapi cat {url} --from last --follow{options}
  feedapi cat {url} --store cursors.db{options} | head -5
  feedapi cursors ls --store cursors.db
Ctrl-C ends it."""


class ExampleFeed:
    """Publishes events about made-up orders, and splits partitions."""

    def __init__(self, publisher: testing.Publisher) -> None:
        self.publisher, self.published, self.splits = publisher, 0, 0

    def publish(self, count: int) -> None:
        """Publish `count` more events, or as many as are still allowed."""
        headers = {"content-type": "application/json"} if self.publisher.dialect == "v1" else None
        while count > 0 and self.published < _MAX_EVENTS:
            entity, n = f"order-{self.published % _ENTITIES}", self.published // _ENTITIES + 1
            event = {"entity": entity, "n": n, "type": _TYPES[(n - 1) % len(_TYPES)]}
            self.publisher.publish(entity, event, headers=headers)
            self.published, count = self.published + 1, count - 1

    def split(self) -> str | None:
        """Split a partition, by the two methods in turn, and return what was done.

        Returns None when there are so many open partitions that no more are split.
        """
        found = [each for each in self.publisher.partitions.values() if not each.closed]
        if len(found) >= _MAX_OPEN_PARTITIONS:
            return None
        # A partition that starts after another one can't be split by cursor transfer: discovery
        # has no way to tell both its parent and the successors that take its cursor.
        roots = [each for each in found if each.starts_after is None]
        method: Literal["starts-after", "cursor-from"] = "starts-after"
        if self.splits % 2 and roots:
            method, found = "cursor-from", roots
        self.splits += 1
        children = ", ".join(map(str, self.publisher.split(found[0].id, method=method)))
        return f"partition {found[0].id} was split into {children} ({method})"

    def rotate(self) -> str:
        self.publisher.rotate_token()
        return "the token changed"


async def _publish(feed: ExampleFeed, rate: float) -> None:
    import anyio

    start, before = anyio.current_time(), feed.published
    while rate and feed.published < _MAX_EVENTS:
        await anyio.sleep(0.05)
        # By the time since the start, so that a late wake-up does not lower the rate.
        feed.publish(before + int((anyio.current_time() - start) * rate) - feed.published)
    if rate:
        _hint(f"{feed.published:,} events were published, and no more are: all are in memory")


async def _repeat(seconds: float, action: Callable[[], str | None]) -> None:
    """Do the action every so many seconds, 0 for never, and print what it did."""
    import anyio

    while seconds:
        await anyio.sleep(seconds)
        if (done := action()) is not None:
            _hint(done)


def _hint(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
