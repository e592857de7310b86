"""A progress line on stderr: events, rate and states of the partitions."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

import anyio
from rich.text import Text

from feedapi_client.cli.common.console import console

if TYPE_CHECKING:
    from rich.live import Live

    from feedapi_client.consumer import FeedConsumer

_REFRESH_PER_SECOND = 4
_STATES_INTERVAL = 1.0
_RATE_WINDOW = 5.0


class Progress:
    """The progress line.

    It is shown where stderr is a terminal, and not with `quiet`. With `beside_output` also not
    where stdout is one too, so that it does not mix with the events. A thread draws it.
    """

    def __init__(self, *, quiet: bool, beside_output: bool = False) -> None:
        mixed = beside_output and sys.stdout.isatty()
        self._shown = sys.stderr.isatty() and not mixed and not quiet
        self._live: Live | None = None
        self._consumer: FeedConsumer | None = None
        self._events = 0
        self._samples: deque[tuple[float, int]] = deque()
        self._states = ""

    def start(self, consumer: FeedConsumer) -> None:
        """Show the line from now on."""
        if not self._shown:
            return
        from rich.live import Live

        self._consumer = consumer
        self._states = count_states(consumer)
        self._live = Live(
            console=console(stderr=True),
            get_renderable=self._line,
            refresh_per_second=_REFRESH_PER_SECOND,
            redirect_stdout=False,
        )
        self._live.start()

    async def watch_states(self) -> None:
        """Count the states of the partitions now and then, until cancelled.

        In the event loop: a thread must not read a consumer. And not for each drawing of the line:
        the time that a status takes is linear in the number of partitions.
        """
        while True:
            await anyio.sleep(_STATES_INTERVAL)
            if self._live is not None and self._consumer is not None:
                self._states = count_states(self._consumer)

    def add(self, events: int) -> None:
        """Count events that were written."""
        self._events += events

    def stop(self) -> None:
        """Show the line a last time and leave it on the screen. May be called more than once."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _line(self) -> Text:
        rate = self._rate(time.monotonic())
        return Text(f"{self._events:,} events · {rate:,.0f}/s · {self._states}", style="bold")

    def _rate(self, now: float) -> float:
        self._samples.append((now, self._events))
        while now - self._samples[0][0] > _RATE_WINDOW:
            self._samples.popleft()
        start, events = self._samples[0]
        return (self._events - events) / (now - start) if now > start else 0.0


def count_states(consumer: FeedConsumer) -> str:
    """Return how many partitions are in each state."""
    partitions = consumer.status().partitions.values()
    states = Counter(partition.state.value for partition in partitions)
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
