"""Handling by key: queueing, uneven keys, a key that hangs.

``python -m tests.benchmarks.bench_keys``. One partition, 1,000 keys, a handler that waits 10 ms,
100 at once.

- queueing: from the delivery of an event to its handler, p50 and p99, for several bounds of events
  in flight. The feed is always ahead: a larger bound is a longer queue.
- Zipf: keys whose shares fall with the rank to the power of an exponent. The events of one key come
  one after the other, so the largest share bounds what can be reached. Drawn in ``by-key.svg``.
- hang: the handler does nothing, but that one key never ends. Memory when the events in flight
  have reached their bound, and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

import anyio
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from feedapi_client import Event, FeedConsumer
from tests.benchmarks.bench_by_key import AT_ONCE, KEYS, WAIT
from tests.benchmarks.bench_scale import rss_mib
from tests.benchmarks.static_feed import static_feed

BOUNDS = (100, 1_000, 10_000)
EXPONENTS = (0.0, 0.5, 0.8, 1.0, 1.2)
Found = list[tuple[object, ...]]


class Keys:
    """Gives each event a key, drawn by the same seed in each run, and notes when it did."""

    def __init__(self, exponent: float, events: int) -> None:
        self.shares = [1 / rank**exponent for rank in range(1, KEYS + 1)]
        self._drawn: Iterator[int] = iter(
            random.Random(1).choices(range(KEYS), self.shares, k=events)
        )
        self.at: dict[int, float] = {}

    def __call__(self, event: Event) -> Hashable:
        self.at[id(event)] = time.perf_counter()
        return next(self._drawn)

    @property
    def bound(self) -> float:
        """The events a second that are possible: all handlers busy, or the largest key's."""
        largest = max(self.shares) / sum(self.shares)
        return min(AT_ONCE, 1 / largest) / WAIT


async def consume(url: str, keys: Keys, max_in_flight: int) -> tuple[float, list[float]]:
    """Return the events a second, and how long each one waited for its handler."""
    waited: list[float] = []

    async def handle(event: Event) -> None:
        waited.append(time.perf_counter() - keys.at.pop(id(event)))
        await asyncio.sleep(WAIT)

    async with FeedConsumer(url, follow=False) as consumer:
        began = time.perf_counter()
        await consumer.run_by_key(
            handle, key=keys, max_concurrency=AT_ONCE, max_in_flight=max_in_flight
        )
        return len(waited) / (time.perf_counter() - began), sorted(waited)


def queueing(url: str, events: int) -> Found:
    """Measure each bound of events in flight."""
    rows: Found = []
    for bound in BOUNDS:
        keys = Keys(0.0, events)
        speed, waited = asyncio.run(consume(url, keys, bound))
        p50, p99 = (waited[len(waited) * each // 100] * 1e3 for each in (50, 99))
        rows.append(
            (f"{bound:,}", f"{speed:,.0f}", f"{keys.bound:,.0f}", f"{p50:.0f}", f"{p99:.0f}")
        )
    return rows


def zipf(url: str, events: int, path: Path) -> Found:
    """Measure each exponent, and draw it beside what is possible."""
    speeds, bounds = [], []
    for exponent in EXPONENTS:
        keys = Keys(exponent, events)
        speeds.append(asyncio.run(consume(url, keys, 10_000))[0])
        bounds.append(keys.bound)
    draw(speeds, bounds, path)
    return [
        (exponent, f"{speed:,.0f}", f"{bound:,.0f}", f"{speed / bound:.2f}")
        for exponent, speed, bound in zip(EXPONENTS, speeds, bounds, strict=True)
    ]


def draw(speeds: Sequence[float], bounds: Sequence[float], path: Path) -> None:
    """Draw events a second over the exponent."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(EXPONENTS, bounds, color="black", linestyle="--", label="possible")
    axes.plot(EXPONENTS, speeds, marker="o", label="run_by_key")
    axes.set_xlabel("exponent of Zipf's distribution of 1,000 keys")
    axes.set_ylabel("events a second, 10 ms each, 100 at once")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


async def hang(url: str, seconds: float) -> Found:
    """Let one key hang, and measure memory."""
    delivered, handled = 0, 0
    rows: Found = []

    async def handle(_: Event) -> None:
        nonlocal handled
        handled += 1
        if handled == 1:
            await anyio.sleep_forever()

    def note(when: str) -> None:
        rows.append((when, f"{delivered:,}", f"{delivered - handled:,}", f"{rss_mib():.1f}"))

    def key(_: Event) -> Hashable:
        nonlocal delivered
        delivered += 1
        return delivered % KEYS

    async with FeedConsumer(url) as consumer:
        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: consumer.run_by_key(handle, key=key))
                before = -1
                while before != handled:
                    before = handled
                    await anyio.sleep(0.5)
                note("reading has stopped")
                await anyio.sleep_forever()
        note(f"after {seconds:g} s")
    return rows


def show(console: Console, title: str, columns: Sequence[str], rows: Found) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the key hangs")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    given, console = parser.parse_args(), Console()
    given.output.mkdir(parents=True, exist_ok=True)
    with static_feed(events=given.events) as url:
        columns = ("in flight, at most", "events/s", "ideal", "queueing p50, ms", "p99, ms")
        show(console, "Queueing", columns, queueing(url, given.events))
    fewer = given.events // 5  # one key takes a quarter of them, at 100 a second
    with static_feed(events=fewer) as url:
        rows = zipf(url, fewer, given.output / "by-key.svg")
        show(console, "Zipf", ("exponent", "events/s", "possible", "ratio"), rows)
    with static_feed(endless=True) as url:
        columns = ("when", "delivered", "of them not handled", "RSS, MiB")
        show(console, "A key that hangs", columns, asyncio.run(hang(url, given.seconds)))


if __name__ == "__main__":
    main()
