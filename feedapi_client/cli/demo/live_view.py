"""Show the demo: drawn on a terminal several times a second, or as lines of text."""

from __future__ import annotations

import time
from collections import deque
from typing import Self

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from feedapi_client.cli.demo.demo_scenario import DemoScenario
from feedapi_client.cli.demo.proof import Verdict, conclusion
from feedapi_client.cli.lineage_tree import lineage_tree
from feedapi_client.cli.terminal import console, plain, shown
from feedapi_client.status import PartitionState

_REFRESH_PER_SECOND = 12
_LOG_LINES = 8
_RATE_WINDOW = 1.0
_STATE_STYLES = {
    PartitionState.WAITING: "yellow",
    PartitionState.READING: "green",
    PartitionState.CAUGHT_UP: "cyan",
    PartitionState.DRAINED: "dim",
    PartitionState.SUPERSEDED: "dim",
    PartitionState.RETRYING: "yellow",
    PartitionState.PARKED: "red",
    PartitionState.VANISHED: "red",
}


class LiveView:
    """Draws partitions as a tree with their cursors, the rate, the lag and the latest log entries.

    Draws in a thread, from snapshots only.
    """

    def __init__(self, scenario: DemoScenario) -> None:
        self._scenario = scenario
        self._console = console()
        self._samples: deque[tuple[float, int]] = deque()
        self._live = Live(
            get_renderable=self._draw, console=self._console, refresh_per_second=_REFRESH_PER_SECOND
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def conclude(self, verdict: Verdict) -> None:
        """Print the result."""
        mark = "✔" if verdict.proved else "✘"
        style = "bold green" if verdict.proved else "bold red"
        text = "\n".join(
            conclusion(verdict, self._scenario.consumer.crashes, self._scenario.instances)
        )
        self._console.print(Panel(Text(f"{mark} {text}", style), border_style=style))

    def _draw(self) -> Group:
        title = Text(self._scenario.url, style="bold")
        partitions = self._scenario.publisher.partitions
        tree = lineage_tree(partitions, title, self._partition_label)
        return Group(tree, Text(), self._progress(), Text(), self._log())

    def _progress(self) -> Table:
        applied, events = self._scenario.consumer.applied, self._scenario.publisher.events
        lag = max(0, self._scenario.publisher.published - applied)
        figures = (
            f"{applied:,} of {events:,} events · {self._rate(applied):,.0f}/s · lag {lag:,} · "
            f"{self._scenario.consumer.crashes} "
            f"{'crashes' if self._scenario.instances == 1 else 'kills'}"
        )
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(events, applied, width=40), Text(figures, "bold"))
        return row

    def _rate(self, applied: int) -> float:
        now = time.monotonic()
        self._samples.append((now, applied))
        while now - self._samples[0][0] > _RATE_WINDOW:
            self._samples.popleft()
        start, before = self._samples[0]
        return (applied - before) / (now - start) if now > start else 0.0

    def _log(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", style="dim", min_width=9)
        table.add_column(no_wrap=True, overflow="ellipsis")
        for at, text in list(self._scenario.log.entries)[-_LOG_LINES:]:
            table.add_row(f"{at:.2f} s", plain(text))
        return table

    def _partition_label(self, id: int) -> Text:
        status = self._scenario.consumer.status
        known = status.partitions.get(id) if status is not None else None
        if known is None:
            return Text(f"{id}  not seen yet", "dim")
        waits = f" for {', '.join(map(str, known.waits_for))}" if known.waits_for else ""
        style = _STATE_STYLES.get(known.state, "")
        label = Text(f"{id:<3}", "bold") + Text(f" {known.state + waits:<16}", style)
        owner = plain(f" {known.owner:<12}", "magenta") if known.owner else Text()
        return label + owner + plain(f" {known.cursor or ''}"[:40], "dim")


class PlainView:
    """Prints a line for each entry of the log."""

    def __init__(self, scenario: DemoScenario) -> None:
        self._scenario = scenario
        scenario.log.on_entry = self._print

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._scenario.log.on_entry = None

    def conclude(self, verdict: Verdict) -> None:
        """Print the result."""
        consumer = self._scenario.consumer
        self._print(self._scenario.log.elapsed, f"{consumer.applied:,} events applied")
        for line in conclusion(verdict, consumer.crashes, self._scenario.instances):
            print(line)

    def _print(self, at: float, text: str) -> None:
        print(f"{at:6.2f} s  {shown(text)}", flush=True)
