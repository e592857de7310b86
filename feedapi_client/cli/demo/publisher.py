"""The publisher of the demo: publishes events, and splits, rotates and fails on a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import anyio

from feedapi_client.cli.demo.event_log import EventLog
from feedapi_client.cli.demo.proof import Step
from feedapi_client.model import DialectName, Partition
from feedapi_client.testing import Publisher, faults

_ENTITIES = 200
_PUBLISH_INTERVAL = 0.02
_PAGE_SIZE = 150
_CHECKPOINT_EVERY = 10

SplitMethod = Literal["starts-after", "cursor-from"]
Schedule = list[tuple[float, Callable[[], None]]]
"""Actions, each with the share of the events that is published before it."""


class DemoPublisher:
    """Publishes `events` events within `seconds`.

    `crash_consumer` is called `crashes` times, at even distances.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        dialect: DialectName,
        events: int,
        seconds: float,
        seed: int | None,
        crashes: int,
        crash_consumer: Callable[[], None],
    ) -> None:
        self.feed = Publisher(
            2,
            dialect=dialect,
            page_size=_PAGE_SIZE,
            checkpoint_every=_CHECKPOINT_EVERY,
            vary=True,
            seed=seed,
        )
        self.events = events
        self.seconds = seconds
        self.published = 0
        self.done = False
        self.partitions: dict[int, Partition] = dict(self.feed.partitions)
        """All partitions, also those that are no longer listed."""
        self._log = log
        crash_times = [(k + 0.6) / (crashes + 0.5) for k in range(crashes)]
        schedule = [*self._schedule(), *((time, crash_consumer) for time in crash_times)]
        self._schedule_left = sorted(schedule, key=lambda item: item[0])

    def _schedule(self) -> Schedule:
        return [
            (0.12, self._rotate),
            (0.25, lambda: self._split(0, "starts-after")),
            (0.38, self._fail),
            (0.5, lambda: self._split(1, "cursor-from")),
            (0.62, self._rotate),
            (0.72, lambda: self._split(4, "starts-after")),
            (0.8, self._break_off),
            (0.88, self._rotate),
        ]

    async def run(self, on_tick: Callable[[], None]) -> None:
        """Publish all events. `on_tick` is called some fifty times a second."""
        start = anyio.current_time()
        while self.published < self.events:
            await anyio.sleep(_PUBLISH_INTERVAL)
            share = min(1.0, (anyio.current_time() - start) / self.seconds)
            # Each action at its place among the events, also when this is late.
            while self._schedule_left and self._schedule_left[0][0] <= share:
                at, action = self._schedule_left.pop(0)
                self._publish(int(self.events * at))
                action()
            self._publish(int(self.events * share))
            on_tick()
        self.done = True
        self._log.add(f"{self.published:,} events are published: the consumer reads to the end")

    def steps(self) -> list[Step]:
        """Return the events in the order in which they were published."""
        return [(payload["entity"], payload["n"]) for payload in self.feed.payloads()]

    def _publish(self, up_to: int) -> None:
        for number in range(self.published, up_to):
            entity = f"entity-{number % _ENTITIES}"
            self.feed.publish(entity, {"entity": entity, "n": number // _ENTITIES + 1})
        self.published = max(self.published, up_to)

    def _split(self, partition: int, method: SplitMethod) -> None:
        children = " and ".join(map(str, self.feed.split(partition, method=method)))
        # A new dictionary: the live view reads the old one in its own thread.
        self.partitions = {**self.partitions, **self.feed.partitions}
        what = (
            "start after it"
            if method == "starts-after"
            else "take over its cursor and its whole history"
        )
        self._log.add(f"partition {partition} was split: {children} {what}")

    def _rotate(self) -> None:
        self.feed.rotate_token()
        self._log.add("the token was rotated: the consumer has to discover again")

    def _fail(self) -> None:
        self.feed.fail(503, times=4)
        self._log.add("the next four fetches are answered 503")

    def _break_off(self) -> None:
        self.feed.fail(faults.Truncate(after_lines=15), times=2)
        self._log.add("the next two responses break off in the middle of a line")
