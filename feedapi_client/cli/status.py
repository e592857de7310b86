"""``feedapi status``: what a consumer does, by its monitor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

from feedapi_client.cli import options, terminal
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

Look = dict[str, Any]
_ORDER = ("parked", "retrying", "vanished", "waiting")
_COLUMNS = ("partition", "state", "rate", "behind", "in flight", "failures", "waits for", "error")
_PROBLEMS, _LINES_AROUND = 5, 10


@command("status localhost:9464", "status localhost:9464 --once")
def status(
    *,
    target: str = argument("MONITOR", "A monitor: localhost:9464, or its URL."),
    connection: options.Connection,
    interval: float = option("SECONDS", "Time between two looks.", default=2.0, min=0.1),
    once: bool = flag("Print it once; so it is where stdout is no terminal."),
    json: bool = options.as_json(),
) -> None:
    """Show what a consumer does now, live, like top.

    From the monitor that runs beside it (--monitor of 'run', 'cat' and 'relay'): states, rates,
    failures, what needs attention first. How far a consumer without one has come, 'feedapi cursors
    ls URL --lag' tells.
    """
    with suppress(KeyboardInterrupt):  # the way to leave a live view
        look = run_async(_look, target, connection)
        if json:
            terminal.print_json(look)
        elif not once and sys.stdout.isatty():
            run_async(_live, target, connection, interval, look)
        else:
            for part in _parts(look):
                if isinstance(part, str):
                    terminal.print_line(part)
                else:
                    terminal.print_table(_COLUMNS, part)


async def _look(target: str, connection: options.Connection) -> Look:
    import httpx

    try:
        url = httpx.URL(target if "://" in target else f"http://{target}")
        url = httpx.URL(f"{str(url).rstrip('/')}/status")
    except httpx.InvalidURL:
        raise CommandError("give the HOST:PORT of a monitor", USAGE) from None
    where = f"{url.host}:{url.port or ''}".rstrip(":")
    try:
        async with connection.client() as given, httpx.AsyncClient() as client:
            answer = await (given or client).get(url, timeout=20.0)
        if answer.status_code == httpx.codes.OK and "process" in (found := answer.json()):
            return dict(found)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise CommandError(f"no monitor answers at {where}: {reason}") from None
    except (ValueError, TypeError):
        pass
    text = f"what answers at {where} is no monitor. Of a feed, {REMOVED['status --store']}"
    raise CommandError(text)


async def _live(target: str, connection: options.Connection, interval: float, look: Look) -> None:
    import anyio
    from rich.console import Console, Group
    from rich.live import Live

    screen, failure = Console(highlight=False), ""
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            parts = [*filter(None, [failure]), *_parts(look, rows=screen.height)]
            live.update(Group(*map(_drawn, parts)), refresh=True)
            await anyio.sleep(interval)
            try:
                before, look, failure = look, await _look(target, connection), ""
                _add_rates(before, look)
            except CommandError as error:  # the process may be about to start again
                failure = str(error)


def _drawn(part: str | list[list[str]]) -> Any:
    from rich.text import Text

    if isinstance(part, str):
        return Text(terminal.shown(part, terminal.MAX_LINE))
    return terminal.table(_COLUMNS, part)


def _add_rates(before: Look, look: Look) -> None:

    def partitions(look: Look) -> Iterator[tuple[object, datetime, dict[str, Any]]]:
        for consumer in look["consumers"]:
            time = datetime.fromisoformat(consumer["time"])
            for each in consumer["partitions"]:
                yield (consumer["feed"], consumer["name"], each["id"]), time, each

    known = {key: (time, each.get("events", 0)) for key, time, each in partitions(before)}
    for key, time, each in partitions(look):
        then, count = known.get(key, (time, 0))
        if (seconds := (time - then).total_seconds()) > 0:
            each["rate"] = max(0, each.get("events", 0) - count) / seconds


def _parts(look: Look, *, rows: int = 0) -> Iterator[str | list[list[str]]]:
    """Yield lines and the rows of tables; with `rows` about as much as so many lines hold."""
    if blocked := look.get("blocked"):
        yield blocked["text"]
    for consumer in look["consumers"]:
        health, partitions = consumer["health"], sorted(consumer["partitions"], key=_rank)
        word = "ready" if health["ready"] else "not ready" if health["live"] else "not live"
        yield f"{consumer['name']} @ {consumer['feed']} · {word}"
        states = sorted(consumer["states"].items(), key=lambda item: -item[1])
        figures = [f"{count:,} {state}" for state, count in states]
        if rates := [each["rate"] for each in partitions if "rate" in each]:
            figures.append(f"{sum(rates):,.1f} events/s")
        yield " · ".join(figures)
        problems, more = health["problems"][:_PROBLEMS], health["problem_count"] - _PROBLEMS
        for problem in problems:
            where = "" if problem["partition"] is None else f" partition {problem['partition']}"
            yield f"{problem['name']}{where}: {problem['text']}"
        if more > 0:
            yield f"and {more} more problems"
        share = max(3, rows // len(look["consumers"])) - _LINES_AROUND - len(problems)
        room = max(1, share) if rows else len(partitions)
        yield [_row(each) for each in partitions[:room]]
        if partitions[room:]:
            yield f"{len(partitions[room:]):,} more"


def _row(each: dict[str, Any]) -> list[str]:
    """Return the cells of a partition. What an end waits for has its time, as evidence (R6)."""
    waits = ", ".join(map(str, each.get("waits_for", ())[:4]))
    wait = ", ".join(filter(None, (each.get("wait"), terminal.age(each.get("evidence_seconds")))))
    failures = each.get("handler_failures", 0) + each.get("fetch_failures", 0)
    return [
        str(each["id"]),
        each["state"],
        f"{each['rate']:,.1f}" if "rate" in each else "",
        "caught up" if each.get("caught_up") else terminal.age(each.get("behind_seconds")),
        terminal.age(each.get("in_flight_seconds")),
        str(failures or ""),
        f"partition {waits}" if waits else wait,
        each.get("error") or "",
    ]


def _rank(each: dict[str, Any]) -> tuple[int, float, int]:
    state, late = each["state"], (each.get("in_flight_seconds", 0), each.get("behind_seconds", 0))
    rank = len(_ORDER) + (state in ("drained", "superseded"))
    return _ORDER.index(state) if state in _ORDER else rank, -max(late), each["id"]
