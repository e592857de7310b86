"""``feedapi status``: what a consumer does, by its monitor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from feedapi_client.cli.command import (
    REMOVED,
    USAGE,
    CommandError,
    argument,
    command,
    flag,
    option,
    run_async,
)
from feedapi_client.cli.options import Connection
from feedapi_client.cli.terminal import (
    MAX_LINE,
    Cell,
    age,
    console,
    plain,
    print_json,
    print_line,
    print_table,
    table,
)

_TIMEOUT = 20.0
_STYLES = {
    "reading": "blue",
    "caught up": "green",
    "retrying": "yellow",
    "parked": "bold red",
    "vanished": "red",
}
_ORDER = ("parked", "retrying", "vanished", "waiting")
_LAST = ("drained", "superseded")
_COLUMNS = ("partition", "state", "rate", "behind", "in flight", "failures", "waits for", "error")
_PROBLEMS, _LINES_AROUND = 5, 10


@dataclass(frozen=True, kw_only=True)
class _Status:
    target: str = argument("MONITOR", "A monitor: localhost:9464, or its URL.")
    interval: float = option("SECONDS", "Time between two looks.", default=2.0, min=0.1)
    once: bool = flag("Print it once; so it is where stdout is no terminal.")
    json: bool = flag("Print JSON.")
    connection: Connection

    def __post_init__(self) -> None:
        self.connection.check_alone(self.target if "://" in self.target else "")


@command("status localhost:9464", "status localhost:9464 --once")
def status(o: _Status) -> None:
    """Show what a consumer does now, live, like top.

    From the monitor that runs beside it (--monitor of 'run', 'cat' and 'relay'): states, rates,
    failures, what needs attention first. How far a consumer without one has come, 'feedapi cursors
    ls URL --lag' tells.
    """
    with suppress(KeyboardInterrupt):  # the way to leave a live view
        run_async(_show, o)


async def _show(o: _Status) -> None:
    look = await _look(o)
    if o.json:
        print_json(look)
    elif o.once or not sys.stdout.isatty():
        for part in parts(look):
            if isinstance(part, list):
                print_table(_COLUMNS, part)
            else:
                print_line(*part)
    else:
        await _live(o, look)


async def _look(o: _Status) -> dict[str, Any]:
    """Ask the monitor."""
    import httpx

    try:
        url = httpx.URL(o.target if "://" in o.target else f"http://{o.target}")
        url = httpx.URL(f"{str(url).rstrip('/')}/status")
    except httpx.InvalidURL:
        raise CommandError("give the HOST:PORT of a monitor", USAGE) from None
    where = f"{url.host}:{url.port or ''}".rstrip(":")
    try:
        async with o.connection.client() as given, httpx.AsyncClient() as client:
            answer = await (given or client).get(url, timeout=_TIMEOUT)
        if answer.status_code == httpx.codes.OK and "process" in (found := answer.json()):
            return dict(found)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise CommandError(f"no monitor answers at {where}: {reason}") from None
    except (ValueError, TypeError):
        pass
    text = f"what answers at {where} is no monitor. Of a feed, {REMOVED['status --store']}"
    raise CommandError(text)


async def _live(o: _Status, look: dict[str, Any]) -> None:
    """Look again and again."""
    import anyio
    from rich.console import Group
    from rich.live import Live

    screen = console()

    def drawn(failure: str | None = None) -> Group:
        shown = parts(look, rows=screen.height, failure=failure)
        return Group(
            *(
                table(_COLUMNS, part) if isinstance(part, list) else plain(*part, MAX_LINE)
                for part in shown
            )
        )

    with Live(drawn(), console=screen, screen=True, auto_refresh=False) as live:
        while True:
            await anyio.sleep(o.interval)
            failure = None
            try:
                before, look = look, await _look(o)
                add_rates(before, look)
            except CommandError as error:  # the process may be about to start again
                failure = str(error)
            live.update(drawn(failure), refresh=True)


def add_rates(before: dict[str, Any], look: dict[str, Any]) -> None:
    """Give each partition its events a second since the look before."""

    def partitions(look: dict[str, Any]) -> Iterator[tuple[object, datetime, dict[str, Any]]]:
        for consumer in look["consumers"]:
            time = datetime.fromisoformat(consumer["time"])
            for each in consumer["partitions"]:
                yield (consumer["feed"], consumer["name"], each["id"]), time, each

    known = {key: (time, each.get("events", 0)) for key, time, each in partitions(before)}
    for key, time, each in partitions(look):
        then, count = known.get(key, (time, 0))
        if (seconds := (time - then).total_seconds()) > 0:
            each["rate"] = max(0, each.get("events", 0) - count) / seconds


def parts(
    look: dict[str, Any], *, rows: int | None = None, failure: str | None = None
) -> Iterator[tuple[str, str] | list[list[Cell]]]:
    """Return what is shown, in at most `rows` lines: lines with their style, and rows of tables."""
    if blocked := look.get("blocked"):
        yield blocked["text"], "bold red"
    if failure is not None:
        yield failure, "bold red"
    share = None if rows is None else max(3, rows // max(1, len(look["consumers"])))
    for consumer in look["consumers"]:
        health, partitions = consumer["health"], sorted(consumer["partitions"], key=_rank)
        word = "ready" if health["ready"] else "not ready" if health["live"] else "not live"
        style = {"ready": "bold green", "not ready": "bold yellow"}.get(word, "bold red")
        yield f"{consumer['name']} @ {consumer['feed']} · {word}", style
        states = sorted(consumer["states"].items(), key=lambda item: -item[1])
        figures = [f"{count:,} {state}" for state, count in states]
        if rates := [each["rate"] for each in partitions if "rate" in each]:
            figures.append(f"{sum(rates):,.1f} events/s")
        yield " · ".join(figures), ""
        problems, count = health["problems"][:_PROBLEMS], health["problem_count"]
        for problem in problems:
            where = "" if problem["partition"] is None else f" partition {problem['partition']}"
            yield f"{problem['name']}{where}: {problem['text']}", "red"
        if count > _PROBLEMS:
            yield f"and {count - _PROBLEMS} more problems", "red"
        room = None if share is None else max(1, share - _LINES_AROUND - len(problems))
        yield [_row(each) for each in partitions[:room]]
        if len(partitions[:room]) < len(partitions):
            yield f"{len(partitions[room:]):,} more", "dim"


def _row(each: dict[str, Any]) -> list[Cell]:
    """Return the cells of a partition. What an end waits for has its time, as evidence (R6)."""
    waits = ", ".join(map(str, each.get("waits_for", ())[:4]))
    evidence = each.get("evidence_seconds")
    wait = (each.get("wait") or "") + ("" if evidence is None else f", {age(evidence)}")
    failures = each.get("handler_failures", 0) + each.get("fetch_failures", 0)
    return [
        str(each["id"]),
        (each["state"], _STYLES.get(each["state"], "dim")),
        f"{each['rate']:,.1f}" if "rate" in each else "",
        "caught up" if each.get("caught_up") else age(each.get("behind_seconds")),
        age(each.get("in_flight_seconds")),
        (str(failures or ""), "red"),
        f"partition {waits}" if waits else wait,
        (each.get("error") or "", "red"),
    ]


def _rank(each: dict[str, Any]) -> tuple[int, float, int]:
    """What needs attention comes first."""
    state = each["state"]
    rank = _ORDER.index(state) if state in _ORDER else len(_ORDER) + (state in _LAST)
    return rank, -max(each.get("in_flight_seconds", 0), each.get("behind_seconds", 0)), each["id"]
