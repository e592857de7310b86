"""``feedapi serve``: an example feed, to try consumers with."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from feedapi_client import testing
from feedapi_client.cli.command import CommandError, command, flag, option, stopping

_MAX_OPEN_PARTITIONS, _ENTITIES = 64, 100
_MAX_EVENTS = 1_000_000
"""All events are kept in memory."""
_TYPES = ("OrderPlaced", "OrderPaid", "OrderShipped")
_TICK = 0.05


@dataclass(frozen=True, kw_only=True)
class _Serve:
    dialect: Literal["v1", "v2-draft", "v2-token"] = option(
        help="The dialect that the publisher uses.", default="v2-token"
    )
    partitions: int = option("N", "Partitions at the start.", default=2, min=1, max=1024)
    page_size: int = option("N", "Events per response.", default=1000, min=1)
    checkpoint_every: int = option("N", "Events between two cursors.", default=100, min=1)
    vary: bool = flag("Make every response different, as the specification allows.")
    stream: bool = flag("Offer responses that stay open (v2-draft, v2-token).")
    port: int = option("PORT", "On 127.0.0.1; 0 takes a free one.", default=0, min=0, max=65535)
    history: int = option("N", "Events that are published before the start.", default=1000, min=0)
    rate: float = option("N", "New events per second.", default=10.0, min=0)
    split_every: float = option(
        "SECONDS", "Split a partition, by the two methods in turn; 0: never.", default=0.0, min=0
    )

    def __post_init__(self) -> None:
        if self.dialect == "v1" and self.split_every:
            raise ValueError("--split-every: a v1 feed has no splits")


@command("serve --rate 20 --split-every 20", "serve --dialect v2-draft --port 8080")
async def serve(o: _Serve) -> None:
    """Serve an example feed on the loopback interface, to try consumers with, until Ctrl-C.

    The first line on stdout is its URL.
    """
    import anyio

    publisher = testing.Publisher(
        o.partitions,
        dialect=o.dialect,
        page_size=o.page_size,
        checkpoint_every=o.checkpoint_every,
        vary=o.vary,
        stream=o.stream,
        filters=("entity", "type") if o.dialect == "v2-draft" else (),
        quirks=testing.Quirks(last_cursor=None if o.dialect == "v1" else "closed"),
    )
    feed = ExampleFeed(publisher)
    feed.publish(o.history)
    serving = publisher.serve(port=o.port)
    try:
        url = serving.start()
    except OSError as error:
        reason = error.strerror or error
        raise CommandError(f"port {o.port} of 127.0.0.1 can't be used: {reason}") from None
    options = f" --v1-partitions {o.partitions}" if o.dialect == "v1" else ""
    try:
        # First the signals: whoever reads the URL may send one at once.
        async with stopping():
            print(url, flush=True)
            _hint(f"try: feedapi cat {url} --follow{options}")
            start, split_at = anyio.current_time(), o.split_every
            while True:
                await anyio.sleep(_TICK)
                # By the time since the start, so that a late wake-up does not lower the rate.
                seconds = anyio.current_time() - start
                feed.publish(o.history + int(seconds * o.rate) - feed.published)
                if o.split_every and seconds >= split_at:
                    split_at += o.split_every
                    feed.split()
    finally:
        serving.stop()


class ExampleFeed:
    def __init__(self, publisher: testing.Publisher) -> None:
        self.publisher, self.published, self.splits = publisher, 0, 0

    def publish(self, count: int) -> None:
        headers = {"content-type": "application/json"} if self.publisher.dialect == "v1" else None
        while count > 0 and self.published < _MAX_EVENTS:
            entity, n = f"order-{self.published % _ENTITIES}", self.published // _ENTITIES + 1
            event = {"entity": entity, "n": n, "type": _TYPES[(n - 1) % len(_TYPES)]}
            self.publisher.publish(entity, event, headers=headers)
            self.published, count = self.published + 1, count - 1

    def split(self) -> None:
        found = [each for each in self.publisher.partitions.values() if not each.closed]
        if len(found) >= _MAX_OPEN_PARTITIONS:
            return
        # A partition that starts after another one can't be split by cursor transfer: discovery
        # has no way to tell both its parent and the successors that take its cursor.
        roots = [each for each in found if each.starts_after is None]
        method: Literal["starts-after", "cursor-from"] = "starts-after"
        if self.splits % 2 and roots:
            method, found = "cursor-from", roots
        self.splits += 1
        children = ", ".join(map(str, self.publisher.split(found[0].id, method=method)))
        _hint(f"partition {found[0].id} was split into {children} ({method})")


def _hint(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
