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

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from feedapi_client import FeedConsumer, Limits
from tests.benchmarks.consume_loops import Line
from tests.benchmarks.static_feed import static_feed

EVENTS_PER_PARTITION = 20


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


async def endless(url: str, seconds: float) -> list[float]:
    """Read a feed without end, and return the resident memory of each second."""
    samples: list[float] = []
    started = last = time.perf_counter()
    async with FeedConsumer(url) as consumer:
        async for batch in consumer.batches():
            await batch.commit()
            now = time.perf_counter()
            if now - last > 1:
                samples.append(rss_mib())
                last = now
            if now - started > seconds:
                break
    return samples


def child(options: argparse.Namespace) -> None:
    started = time.perf_counter()
    if options.child == "endless":
        print(json.dumps(asyncio.run(endless(options.url, options.seconds))))
        return
    poll = our_poll if options.child == "ours" else bare_poll
    count = asyncio.run(poll(options.url, options.partitions, options.concurrency))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([time.perf_counter() - started, peak, count]))


def in_a_process(kind: str, url: str, options: argparse.Namespace) -> list[float]:
    command = [sys.executable, "-m", __spec__.name, "--child", kind, "--url", url]
    command += [
        f"--{name}={getattr(options, name)}" for name in ("partitions", "concurrency", "seconds")
    ]
    result: list[float] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=32768)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--child")
    parser.add_argument("--url")
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    table = Table("measure", "ours", "bare httpx", "ratio", "bar")
    with static_feed(
        partitions=options.partitions, events=EVENTS_PER_PARTITION, page_size=EVENTS_PER_PARTITION
    ) as url:
        ours, bare = in_a_process("ours", url, options), in_a_process("bare", url, options)
    table.add_row(
        f"{options.partitions} partitions, each once",
        f"{ours[0]:.1f} s",
        f"{bare[0]:.1f} s",
        f"{ours[0] / bare[0]:.2f}",
        "<= 1.5",
    )
    table.add_row(
        "peak resident memory", f"{ours[1]:.0f} MiB", f"{bare[1]:.0f} MiB", "", "< 1024 MiB"
    )
    with static_feed(events=100_000, endless=True) as url:
        samples = in_a_process("endless", url, options)
    table.add_row(
        "endless feed, resident memory",
        " ".join(f"{s:.0f}" for s in samples[:: max(1, len(samples) // 8)]) + " MiB",
        "",
        "",
        "flat",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
