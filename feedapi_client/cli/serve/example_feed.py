"""What ``feedapi serve`` serves: events about made-up orders, and now and then a new topology."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any, Literal

import anyio
from anyio.abc import TaskStatus

from feedapi_client.cli.common.errors import CommandError

if TYPE_CHECKING:
    from feedapi_client.testing import Publisher

_TICK = 0.05
_MOST_OPEN = 64
_TYPES = ("OrderPlaced", "OrderPaid", "OrderShipped")


class Playground:
    """A publisher that goes on publishing."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        rate: float,
        entities: int,
        split_every: float,
        rotate_every: float,
        max_events: int,
    ) -> None:
        self.publisher = publisher
        self.rate = rate
        self.entities = entities
        self.split_every = split_every
        self.rotate_every = rotate_every
        self.max_events = max_events
        self.published = 0
        self.splits = 0

    def publish(self, count: int) -> None:
        """Publish so many more events."""
        for number in range(self.published, self.published + count):
            entity = f"order-{number % self.entities}"
            n = number // self.entities + 1
            headers = (
                {"content-type": "application/json"} if self.publisher.dialect == "v1" else None
            )
            self.publisher.publish(
                entity,
                {"entity": entity, "n": n, "type": _TYPES[(n - 1) % len(_TYPES)]},
                headers=headers,
            )
        self.published += count

    async def serve(self, port: int) -> None:
        """Serve until SIGINT or SIGTERM. Raises `CommandError` when the port is taken."""
        try:
            serving = self.publisher.serve(port=port)
            url = serving.start()
        except OSError as error:
            raise CommandError(
                f"port {port} of 127.0.0.1 can't be had: {error.strerror or error}"
            ) from None
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(self._until_signal, tasks.cancel_scope)
                print(url, flush=True)
                self._say_what_to_try(url)
                tasks.start_soon(self._feed)
                if self.split_every:
                    tasks.start_soon(self._every, self.split_every, self.split)
                if self.rotate_every:
                    tasks.start_soon(self._every, self.rotate_every, self._rotate)
        finally:
            serving.stop()

    def split(self) -> None:
        """Split the open partition with the lowest id, by the method whose turn it is."""
        candidates = [p for p in self.publisher.partitions.values() if not p.closed]
        if len(candidates) >= _MOST_OPEN:
            return
        method: Literal["starts-after", "cursor-from"] = (
            "starts-after" if self.splits % 2 == 0 else "cursor-from"
        )
        # Discovery can't say both what a partition starts after and where its heirs take their cursor from.
        fit = [
            p for p in candidates if method == "starts-after" or p.starts_after is None
        ] or candidates
        if method == "cursor-from" and fit[0].starts_after is not None:
            method = "starts-after"
        self.splits += 1
        children = self.publisher.split(fit[0].id, method=method)
        _say(f"partition {fit[0].id} was split into {', '.join(map(str, children))} ({method})")

    def _rotate(self) -> None:
        self.publisher.rotate_token()
        _say("the token changed")

    async def _feed(self) -> None:
        began, before = anyio.current_time(), self.published
        while self.rate:
            await anyio.sleep(_TICK)
            due = before + int((anyio.current_time() - began) * self.rate) - self.published
            self.publish(max(0, min(due, self.max_events - self.published)))
            if self.published >= self.max_events:
                _say(
                    f"{self.published:,} events were published, which is all that --max-events allows"
                )
                return

    async def _every(self, seconds: float, do: Any) -> None:
        while True:
            await anyio.sleep(seconds)
            do()

    async def _until_signal(
        self, scope: anyio.CancelScope, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                scope.cancel()

    def _say_what_to_try(self, url: str) -> None:
        v1 = (
            f" --v1-partitions {len(self.publisher.partitions)}"
            if self.publisher.dialect == "v1"
            else ""
        )
        auth = " --auth-env FEED_AUTH" if self.publisher.bearer else ""
        options = v1 + auth
        _say(
            f"a {self.publisher.dialect} feed with {self.published:,} events, and {self.rate:g} more a second. In another terminal:"
        )
        _say(f"  feedapi discover {url}{options}")
        _say(f"  feedapi cat {url} --from last --follow{options}")
        _say(f"  feedapi cat {url} --store cursors.db{options} | head -5")
        _say("  feedapi cursors ls --store cursors.db")
        _say("Ctrl-C ends it.")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
