"""All 32,768 partitions in one process, and an endless feed.

``python -m tests.benchmarks.bench_scale``. Each measure runs in a new process, whose memory is
reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from feedapi_client import FeedConsumer, Limits
from tests.benchmarks.charts import draw_curve
from tests.benchmarks.consume_loops import Line
from tests.benchmarks.results import Comparison, in_turns, table
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.static_feed import static_feed

EVENTS_PER_PARTITION = 20
PARTITIONS = (1, 64, 1024, 4096, 32768)
ENDLESS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("pages of 20,000", {}, 0.0),
    ("a slow handler", {}, 0.05),
    ("compressed pages", {"encoding": "gzip"}, 0.0),
)
"""What an endless feed serves, and the seconds that a handler takes for a batch."""


def rss_mib() -> float:
    """Resident memory of the process now."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


async def bare_poll(url: str, partitions: int, concurrency: int) -> int:
    """Ask every partition once with httpx, `concurrency` at a time, and decode the responses."""
    decoder = msgspec.json.Decoder(Line)
    queue = iter(range(partitions))
    count = 0
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)

    async def poll(client: httpx.AsyncClient) -> None:
        nonlocal count
        for partition in queue:
            response = await client.get(
                f"{url}/events",
                params={"token": "t", "partition": str(partition), "cursor": "_first"},
            )
            count += len(decoder.decode_lines(response.content)) - 1

    async with httpx.AsyncClient(limits=limits) as client:
        await asyncio.gather(*(poll(client) for _ in range(concurrency)))
    return count


async def our_poll(url: str, partitions: int, concurrency: int) -> int:
    """Deliver and commit the events of every partition, then leave the iteration."""
    limits = Limits(max_concurrent_fetches=concurrency, poll_interval=600, max_poll_interval=600)
    count = 0
    async with FeedConsumer(url, limits=limits) as consumer:
        async for batch in consumer.batches():
            count += len(batch.events)
            await batch.commit()
            if count >= partitions * EVENTS_PER_PARTITION:
                return count
    return count


async def endless(url: str, seconds: float, pause: float) -> list[float]:
    """Read a feed without end, with a pause after each batch, and return the resident memory of
    each second.
    """
    samples: list[float] = []
    started = last = time.perf_counter()
    async with FeedConsumer(url) as consumer:
        async for batch in consumer.batches():
            await batch.commit()
            if pause:
                await asyncio.sleep(pause)
            now = time.perf_counter()
            if now - last > 1:
                samples.append(rss_mib())
                last = now
            if now - started > seconds:
                break
    return samples


def poll_once(kind: str, url: str, *, partitions: int, concurrency: int) -> list[float]:
    """Return the seconds, MiB at the peak of this process, and the count of events."""
    started = time.perf_counter()
    poll = our_poll if kind == "ours" else bare_poll
    count = asyncio.run(poll(url, partitions, concurrency))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [time.perf_counter() - started, peak, count]


def child(options: argparse.Namespace) -> None:
    if options.child == "endless":
        print(json.dumps(asyncio.run(endless(options.url, options.seconds, options.pause))))
        return
    sizes = {"partitions": options.partitions, "concurrency": options.concurrency}
    print(json.dumps(poll_once(options.child, options.url, **sizes)))


def in_a_process(kind: str, url: str, **options: float) -> list[float]:
    """Run one measure in a process of its own. It prints what `poll_once` returns."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_scale", "--child", kind, "--url", url]
    command += [f"--{name}={value}" for name, value in options.items()]
    result: list[float] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return result


def measure(sizes: Sizes) -> list[Comparison]:
    """Measure one partition to all of them, and draw the curve."""
    curve: dict[int, Comparison] = {}
    results = []
    for partitions in PARTITIONS[:2] if sizes.quick else PARTITIONS:
        found = compare(sizes, partitions=partitions)
        curve[partitions] = found[0]
        results += found
        draw_curve(curve, sizes.folder / "polls.svg")  # the next size takes eight times as long
    return results


def compare(sizes: Sizes, *, partitions: int, concurrency: int = 64) -> list[Comparison]:
    """Poll each partition once, in seconds and in MiB at the peak, beside a bare loop."""
    options = {"partitions": partitions, "concurrency": concurrency}
    one: Callable[..., list[float]] = poll_once if sizes.quick else in_a_process
    with static_feed(
        partitions=partitions,
        events=EVENTS_PER_PARTITION,
        page_size=EVENTS_PER_PARTITION,
        in_thread=sizes.quick,
    ) as url:
        pairs = in_turns(
            partial(one, "ours", url, **options),
            partial(one, "bare", url, **options),
            rounds=sizes.rounds,
            title=f"{partitions} partitions",
        )
    name = f"{partitions:,} partitions, each polled once / bare httpx"
    return [
        Comparison(
            name=name,
            unit="s",
            ours=[ours[0] for ours, _ in pairs],
            theirs=[bare[0] for _, bare in pairs],
            bar=1.5,
            less_is_better=True,
        ),
        Comparison(
            name=f"{name}, memory",
            unit="MiB",
            ours=[ours[1] for ours, _ in pairs],
            theirs=[bare[1] for _, bare in pairs],
            less_is_better=True,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=32768)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--pause", type=float, default=0)
    parser.add_argument("--child")
    parser.add_argument("--url")
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    console = Console()
    sizes = Sizes(options.rounds, quick=False, folder=Path())
    found = compare(sizes, partitions=options.partitions, concurrency=options.concurrency)
    console.print(table(found))
    for name, feed, pause in ENDLESS:
        with static_feed(events=100_000, endless=True, **feed) as url:
            samples = in_a_process("endless", url, seconds=options.seconds, pause=pause)
        shown = " ".join(f"{s:.0f}" for s in samples[:: max(1, len(samples) // 8)])
        console.print(f"endless feed, {name}: resident memory, which is to stay flat: {shown} MiB")


if __name__ == "__main__":
    main()
