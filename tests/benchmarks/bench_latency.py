"""From publishing an event to its handler: ``python -m tests.benchmarks.bench_latency``.

A stream and polls, idle (an event each 20 ms) and under load (1,000 events a second), beside bare
httpx loops on the same feed, each in a process of its own. The bare poll pauses as long as ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import orjson
from matplotlib.figure import Figure
from rich.console import Console

from feedapi_client import Batch, FeedConsumer, FetchOptions, Limits
from tests.benchmarks.live_feed import live_feed
from tests.benchmarks.processes import ROOT
from tests.benchmarks.results import Comparison, in_turns, table
from tests.benchmarks.sizes import Sizes

PAUSE = 0.02
"""Seconds between two polls."""
RATES = {"idle": 0.02, "under load": 0.001}
"""Seconds between two events."""
WARM_UP = 0.1
"""The part of the events that are not counted: connections are made meanwhile."""


class Latency(NamedTuple):
    """Milliseconds of the median, and of the slowest in a hundred."""

    p50: float
    p99: float


async def ours(url: str, count: int, *, stream: bool) -> list[float]:
    """Latencies as the handler of `run` sees them, in seconds."""
    found: list[float] = []
    limits = Limits(poll_interval=PAUSE, max_poll_interval=PAUSE)
    fetch = FetchOptions(stream=stream)
    async with FeedConsumer(url, limits=limits, fetch=fetch) as consumer:

        async def handle(batch: Batch) -> None:
            found.extend(time.monotonic() - event.json()["at"] for event in batch.events)
            if len(found) >= count:
                consumer.stop()

        await consumer.run(handle)
    return found


async def _bare_lines(client: httpx.AsyncClient, url: str, *, stream: bool) -> AsyncIterator[bytes]:
    params = {"token": "t", "partition": "0", "cursor": "_first"}
    if stream:
        async with client.stream("GET", f"{url}/events", params=params | {"stream": "y"}) as body:
            rest = b""
            async for chunk in body.aiter_raw():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line
    while True:
        response = await client.get(f"{url}/events", params=params)
        lines = response.content.splitlines()
        for line in lines:
            yield line
        params["cursor"] = orjson.loads(lines[-1])["cursor"]
        if len(lines) == 1:
            await asyncio.sleep(PAUSE)


async def bare(url: str, count: int, *, stream: bool) -> list[float]:
    """Latencies as a loop over httpx sees them, in seconds."""
    found: list[float] = []
    async with httpx.AsyncClient() as client:
        lines = _bare_lines(client, url, stream=stream)
        async for line in lines:
            record = orjson.loads(line)
            if "data" in record:
                found.append(time.monotonic() - record["data"]["at"])
                if len(found) >= count:
                    break
        await lines.aclose()  # type: ignore[attr-defined]
    return found


def summary(found: Sequence[float]) -> Latency:
    """Return the percentiles without the warm-up."""
    counted = sorted(found[int(len(found) * WARM_UP) :])
    return Latency(
        statistics.median(counted) * 1e3,
        counted[min(len(counted) - 1, len(counted) * 99 // 100)] * 1e3,
    )


def here(loop: str, url: str, count: int, *, stream: bool) -> Latency:
    """Measure one loop in this process."""
    return summary(asyncio.run((ours if loop == "ours" else bare)(url, count, stream=stream)))


def in_a_process(loop: str, url: str, count: int, *, stream: bool) -> Latency:
    """Measure one loop in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_latency", "--child", loop, url]
    command += [str(count), "stream" if stream else "poll"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return Latency(*json.loads(done.stdout))


def measure(sizes: Sizes) -> list[Comparison]:
    """Compare p50 and p99 of stream and poll, idle and under load, and draw them."""
    results: dict[str, list[Comparison]] = {}
    one = here if sizes.quick else in_a_process
    for load, interval in RATES.items():
        count = 20 if sizes.quick else max(400, round(4 / interval))
        with live_feed(interval, in_thread=sizes.quick) as url:
            for stream in (True, False):
                mode = f"{'stream' if stream else 'poll'}, {load}"
                pairs = in_turns(
                    partial(one, "ours", url, count, stream=stream),
                    partial(one, "bare", url, count, stream=stream),
                    rounds=sizes.rounds,
                    title=f"latency, {mode}",
                )
                results[mode] = _comparisons(mode, pairs, barred=stream)
    draw(results, sizes.folder / "latency.svg")
    return [each for found in results.values() for each in found]


def _comparisons(
    mode: str, pairs: list[tuple[Latency, Latency]], *, barred: bool
) -> list[Comparison]:
    return [
        Comparison(
            name=f"latency, {mode}, {name} / bare httpx",
            unit="ms",
            ours=[getattr(mine, name) for mine, _ in pairs],
            theirs=[getattr(other, name) for _, other in pairs],
            bar=bar if barred else None,
            less_is_better=True,
        )
        for name, bar in (("p50", 2.0), ("p99", 3.0))
    ]


def draw(results: Mapping[str, Sequence[Comparison]], path: Path) -> None:
    """Draw p50 and p99 of each mode, ours beside the bare loop's."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    for place, percentile in enumerate(("p50", "p99")):
        axes = figure.add_subplot(1, 2, place + 1)
        for shift, side in ((-0.2, "ours"), (0.2, "theirs")):
            values = [statistics.median(getattr(found[place], side)) for found in results.values()]
            label = "ours" if side == "ours" else "bare httpx"
            axes.bar([n + shift for n in range(len(values))], values, width=0.4, label=label)
        axes.set_xticks(range(len(results)), list(results), rotation=20)
        axes.set_yscale("log")
        axes.set_ylabel(f"milliseconds from publishing to the handler, {percentile}")
        axes.legend()
    figure.savefig(path)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        loop, url, count, mode = sys.argv[2:]
        print(json.dumps(here(loop, url, int(count), stream=mode == "stream")))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    folder = Path(tempfile.mkdtemp(prefix="feedapi-latency-"))
    Console().print(table(measure(Sizes(rounds, quick=False, folder=folder))))
    print(folder / "latency.svg")


if __name__ == "__main__":
    main()
