"""The progress line of ``feedapi cat`` on stderr."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from rich.text import Text

from feedapi_client.cli.common.tables import console

if TYPE_CHECKING:
    from rich.live import Live

    from feedapi_client.consumer import FeedConsumer

_REFRESH_PER_SECOND = 4
_STATES_EVERY = 1.0
_WINDOW = 5.0


class Progress:
    """Events, rate and partition states, where a person looks at stderr and the events go elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._shown = sys.stderr.isatty() and not sys.stdout.isatty() and not quiet
        self._live: Live | None = None
        self._consumer: FeedConsumer | None = None
        self._events = 0
        self._samples: deque[tuple[float, int]] = deque()
        self._states = ""
        self._states_at = 0.0

    def start(self, consumer: FeedConsumer) -> None:
        """Show it from now on."""
        if not self._shown:
            return
        from rich.live import Live

        self._consumer = consumer
        self._live = Live(
            console=console(stderr=True),
            get_renderable=self._line,
            refresh_per_second=_REFRESH_PER_SECOND,
            redirect_stdout=False,
        )
        self._live.start()

    def add(self, events: int) -> None:
        """So many more were written."""
        self._events += events

    def stop(self) -> None:
        """Leave the last line standing. May be called twice."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _line(self) -> Text:
        now = time.monotonic()
        self._samples.append((now, self._events))
        while now - self._samples[0][0] > _WINDOW:
            self._samples.popleft()
        began, before = self._samples[0]
        rate = (self._events - before) / (now - began) if now > began else 0.0
        if self._consumer is not None and now - self._states_at >= _STATES_EVERY:
            # Costs time linear in the number of partitions.
            self._states_at = now
            states = Counter(
                p.state.split(" for ")[0] for p in self._consumer.status().partitions.values()
            )
            self._states = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return Text(f"{self._events:,} events · {rate:,.0f}/s · {self._states}", style="bold")
