"""Write to the terminal: styled text, tables, and a progress line."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from feedapi_client.cli.escape import shown, shown_line

if TYPE_CHECKING:
    from rich.live import Live

    from feedapi_client.consumer import FeedConsumer

_WIDTH_WITHOUT_TERMINAL = 200


class _Console(Console):
    """A console that reports a closed pipe as a write to it does. Rich's own exits with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr.

    Where that is no terminal, lines are wide enough for tables not to be wrapped.
    """
    stream = sys.stderr if stderr else sys.stdout
    return _Console(
        stderr=stderr, highlight=False, width=None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL
    )


def plain(text: object, style: str = "") -> Text:
    """Return text from elsewhere, shown as it is: without markup and control characters, cut."""
    return Text(shown(text), style=style)


def plain_line(text: object, style: str = "") -> Text:
    """Return a whole line as `plain` does, cut far later."""
    return Text(shown_line(text), style=style)


# Above this, plain columns: printing them is a thousand times faster than drawing with rich.
_MAX_DRAWN_ROWS = 1000

Cell = str | tuple[str, str]
"""A text, or a text and its style."""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Print a table. One of more than 1000 rows is printed without lines and styles, for speed."""
    if len(rows) > _MAX_DRAWN_ROWS:
        _print_columns(
            columns, [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in rows]
        )
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*(plain(cell) if isinstance(cell, str) else plain(*cell) for cell in row))
    console().print(table)


def _print_columns(columns: Sequence[str], rows: list[list[str]]) -> None:
    lines = [list(columns), *([shown(text) for text in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


_REFRESH_PER_SECOND = 4
_STATES_INTERVAL = 1.0
_RATE_WINDOW = 5.0


class ProgressLine:
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
