"""The live view of ``feedapi status``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import anyio
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from feedapi_client.cli.command import CommandError
from feedapi_client.cli.status import RunningMonitor
from feedapi_client.cli.terminal import MAX_LINE, console, plain, print_json

_STYLES = {
    "reading": "blue",
    "caught up": "green",
    "retrying": "yellow",
    "parked": "bold red",
    "vanished": "red",
}
_ORDER = ("parked", "retrying", "vanished", "waiting")
_LAST = ("drained", "superseded")
_LINES_AROUND = 8
_PROBLEMS = 5
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


async def show(source: RunningMonitor, interval: float, once: bool, json: bool) -> None:
    """Show the status again and again on a terminal, else once. Raises what the source raises."""
    status = await source.load()
    if json:
        print_json(status)
        return
    rates = Rates()
    rates.add(status)
    screen = console()
    if once or not sys.stdout.isatty():
        screen.print(view(status, rates, rows=None))
        return
    with Live(
        view(status, rates, rows=screen.height), console=screen, screen=True, auto_refresh=False
    ) as live:
        while True:
            await anyio.sleep(interval)
            failure = None
            try:
                status = await source.load()
                rates.add(status)
            except CommandError as error:  # the process may be about to start again
                failure = str(error)
            live.update(view(status, rates, rows=screen.height, failure=failure), refresh=True)


class Rates:
    """Events a second of each partition, between the last two looks."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str, int], tuple[datetime, int]] = {}
        self._rates: dict[tuple[str, str, int], float] = {}

    def add(self, status: dict[str, Any]) -> None:
        """Take the status of one look."""
        for consumer in status["consumers"]:
            now = datetime.fromisoformat(consumer["time"])
            for each in consumer["partitions"]:
                key = (consumer["feed"], consumer["name"], each["id"])
                count = each.get("events", 0)
                if key in self._before:
                    time, before = self._before[key]
                    seconds = (now - time).total_seconds()
                    if seconds > 0:
                        self._rates[key] = max(0, count - before) / seconds
                self._before[key] = now, count

    def of(self, consumer: dict[str, Any], partition: int) -> float | None:
        """Return the rate of one partition; None before the second look."""
        return self._rates.get((consumer["feed"], consumer["name"], partition))


def view(
    status: dict[str, Any], rates: Rates, *, rows: int | None, failure: str | None = None
) -> RenderableType:
    """Return what is shown, in at most `rows` lines."""
    parts: list[RenderableType] = []
    if failure is not None:
        parts.append(plain(failure, "bold red", MAX_LINE))
    if status.get("blocked"):
        parts.append(plain(status["blocked"]["text"], "bold red", MAX_LINE))
    share = None if rows is None else max(3, rows // max(1, len(status["consumers"])))
    for consumer in status["consumers"]:
        parts += _consumer(consumer, rates, share)
    return Group(*parts)


def _consumer(consumer: dict[str, Any], rates: Rates, rows: int | None) -> Iterable[RenderableType]:
    health = consumer["health"]
    problems, count = health["problems"], health["problem_count"]
    yield _title(consumer, health)
    yield _figures(consumer, rates)
    for problem in problems[:_PROBLEMS]:
        where = "" if problem["partition"] is None else f" partition {problem['partition']}"
        yield plain(f"{problem['name']}{where}: {problem['text']}", "red", MAX_LINE)
    if count > _PROBLEMS:
        yield plain(f"and {count - _PROBLEMS} more problems", "red")
    room = None if rows is None else max(1, rows - _LINES_AROUND - min(len(problems), _PROBLEMS))
    yield _table(consumer, rates, room)


def _title(consumer: dict[str, Any], health: dict[str, Any]) -> Text:
    title = plain(f"{consumer['name']} @ {consumer['feed']}", "bold", MAX_LINE)
    style = "green" if health["ready"] else "yellow" if health["live"] else "bold red"
    word = "ready" if health["ready"] else "not ready" if health["live"] else "not live"
    return title.append(f"  {word}", style)


def _figures(consumer: dict[str, Any], rates: Rates) -> Text:
    states = sorted(consumer["states"].items(), key=lambda item: -item[1])
    figures = [plain(f"{count:,} {state}", _STYLES.get(state, "dim")) for state, count in states]
    found = [rates.of(consumer, each["id"]) for each in consumer["partitions"]]
    known = [rate for rate in found if rate is not None]
    if known:
        figures.append(Text(f"{sum(known):,.1f} events/s", "bold"))
    return Text("   ").join(figures)


def _table(consumer: dict[str, Any], rates: Rates, rows: int | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    table.add_column("partition", justify="right")
    table.add_column("state")
    for name in ("rate", "behind", "in flight", "failures"):
        table.add_column(name, justify="right")
    table.add_column("waits for")
    table.add_column("", overflow="ellipsis", no_wrap=True)
    partitions = sorted(consumer["partitions"], key=_rank)
    for each in partitions[:rows]:
        rate = rates.of(consumer, each["id"])
        cells = [plain(each["id"]), plain(each["state"], _STYLES.get(each["state"], "dim"))]
        cells += [Text("" if rate is None else f"{rate:,.1f}"), *_progress(each)]
        cells.append(plain(_waits(each)))
        cells.append(plain(each.get("error") or "", "red"))
        table.add_row(*cells)
    if rows is not None and len(partitions) > rows:
        table.add_row(Text("..."), Text(f"{len(partitions) - rows:,} more", "dim"))
    return table


def _waits(each: dict[str, Any]) -> str:
    """Return what a partition waits for, and how long where that is evidence of its end (R6)."""
    if waits := ", ".join(map(str, each.get("waits_for", ())[:4])):
        return f"partition {waits}"
    seconds = each.get("evidence_seconds")
    return (each.get("wait") or "") + ("" if seconds is None else f", {age(seconds)}")


def _progress(each: dict[str, Any]) -> list[Text]:
    failures = each.get("handler_failures", 0) + each.get("fetch_failures", 0)
    behind = "caught up" if each.get("caught_up") else age(each.get("behind_seconds"))
    return [
        Text(behind),
        Text(age(each.get("in_flight_seconds"))),
        Text(str(failures or ""), "red" if failures else ""),
    ]


def _rank(each: dict[str, Any]) -> tuple[int, float, int]:
    state = each["state"]
    rank = _ORDER.index(state) if state in _ORDER else len(_ORDER) + (state in _LAST)
    return rank, -max(each.get("in_flight_seconds", 0), each.get("behind_seconds", 0)), each["id"]


def age(seconds: float | None) -> str:
    """Return a duration in its largest fitting unit."""
    if seconds is None:
        return ""
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.0f} h" if seconds < _DAY else f"{seconds / _DAY:.0f} d"
