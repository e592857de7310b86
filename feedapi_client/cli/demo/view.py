"""What ``feedapi demo`` shows."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from feedapi_client.cli.common.escape import one_line
from feedapi_client.cli.common.tables import console, lineage_tree, plain, state_style
from feedapi_client.cli.demo.proof import Verdict
from feedapi_client.cli.demo.scenario import Demonstration

_REFRESH_PER_SECOND = 12
_LINES = 8
_WINDOW = 1.0


def conclusion(show: Demonstration, verdict: Verdict) -> list[str]:
    """The end of the demo in words."""
    through = f"through 3 splits of 2 kinds, {show.crashes} crashes, stale tokens, failing and torn responses"
    if verdict.proved:
        return [
            f"PROVED: {verdict.events:,} events of {verdict.entities:,} entities arrived, each entity's in order and each one once, {through}"
        ]
    return [
        f"FAILED: of {verdict.events:,} events of {verdict.entities:,} entities, {through}:",
        *(f"  {fault}" for fault in verdict.faults()),
    ]


class PlainView:
    """A line for each happening."""

    def __init__(self, show: Demonstration) -> None:
        self._show = show
        show.on_happening = self._print

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._show.on_happening = None

    def conclude(self, verdict: Verdict) -> None:
        """Print the result."""
        print(f"{self._show.elapsed:6.2f} s  {self._show.applied:,} events applied")
        for line in conclusion(self._show, verdict):
            print(line)

    def _print(self, at: float, text: str) -> None:
        print(f"{at:6.2f} s  {one_line(text)}", flush=True)


class LiveView:
    """Partitions as a tree with their cursors, rate, lag and the latest happenings, redrawn several times a second."""

    def __init__(self, show: Demonstration) -> None:
        self._show = show
        self._console = console()
        self._samples: deque[tuple[float, int]] = deque()
        self._live = Live(
            get_renderable=self._draw, console=self._console, refresh_per_second=_REFRESH_PER_SECOND
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def conclude(self, verdict: Verdict) -> None:
        """Print the result."""
        first, *rest = conclusion(self._show, verdict)
        style = "bold green" if verdict.proved else "bold red"
        self._console.print(
            Panel(
                Text("\n".join([f"{'✔' if verdict.proved else '✘'} {first}", *rest]), style),
                border_style=style,
            )
        )

    def _draw(self) -> Group:
        show = self._show
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(show.events, show.applied, width=40), Text(self._figures(), "bold"))
        log = Table.grid(padding=(0, 2))
        log.add_column(justify="right", style="dim", min_width=9)
        log.add_column(no_wrap=True, overflow="ellipsis")
        for at, text in list(show.happenings)[-_LINES:]:
            log.add_row(f"{at:.2f} s", plain(text))
        return Group(
            lineage_tree(show.seen, Text(show.url, style="bold"), self._label),
            Text(),
            bar,
            Text(),
            log,
        )

    def _figures(self) -> str:
        show, now = self._show, time.monotonic()
        self._samples.append((now, show.applied))
        while now - self._samples[0][0] > _WINDOW:
            self._samples.popleft()
        began, before = self._samples[0]
        rate = (show.applied - before) / (now - began) if now > began else 0.0
        lag = max(0, show.published - show.applied)
        return f"{show.applied:,} of {show.events:,} events · {rate:,.0f}/s · lag {lag:,} · {show.crashes} crashes"

    def _label(self, id: int) -> Text:
        status = self._show.status
        known = status.partitions.get(id) if status is not None else None
        if known is None:
            return Text(f"{id}  not seen yet", "dim")
        label = Text(f"{id:<3}", "bold") + Text(f" {known.state:<16}", state_style(known.state))
        return label + plain(f" {known.cursor or ''}"[:40], "dim")
