"""Several processes that share a feed: ``python -m tests.benchmarks.bench_sharing``.

- `orphans`: a process is killed again and again. How long until another one has committed
  something of each of its partitions, in lengths of a lease.
- `spread`: partitions of each process, whenever all is divided.
- `curve`: events per second of 1, 2 and 4 processes whose handler takes processor time. It can't
  grow beyond the cores of the machine.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from feedapi_client import Batch, FeedConsumer, FeedKey, Limits, Share, SQLiteCursorStore
from feedapi_client.testing import Publisher

REBALANCE_PART = 10
_LOOK_SECONDS = 0.02
_PUBLISH_SECONDS = 0.1
_PATIENCE = 120.0


# ---------------------------------------------------------------------- one process


async def work(url: str, path: str, lease: float, burn: float) -> None:
    """Consume until killed, with `burn` seconds of processor time for each event."""
    name = f"pid-{os.getpid()}"
    share = Share(instance=name, lease_seconds=lease, rebalance_seconds=lease / REBALANCE_PART)
    limits = Limits(poll_interval=0.02, max_poll_interval=0.1, max_batch_bytes=2000)

    async def handle(batch: Batch) -> None:
        until = time.process_time() + burn * len(batch.events)
        while time.process_time() < until:
            pass

    async with (
        SQLiteCursorStore(path) as store,
        FeedConsumer(url, store=store, share=share, limits=limits) as consumer,
    ):
        await consumer.run(handle, max_concurrency=1)


class Processes:
    """The processes of one measure, and what their database shows."""

    def __init__(self, url: str, path: Path, lease: float, burn: float) -> None:
        self.command = [sys.executable, "-m", "tests.benchmarks.bench_sharing", "--work"]
        self.command += [url, str(path), str(lease), str(burn)]
        self._steady_seconds = min(5.0, 5 * lease / REBALANCE_PART)
        self.key = FeedKey(url, "default")
        self.store = SQLiteCursorStore(path)
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start one more."""
        self.running.append(subprocess.Popen(self.command))

    def close(self) -> None:
        """Kill all."""
        for process in self.running:
            process.kill()
            process.wait()

    async def owners(self) -> dict[int, str]:
        """Return which living process reads each partition."""
        instances, leases = await self.store.look(self.key)
        alive = {found.name for found in instances if found.alive}
        return {p: lease.owner for p, lease in leases.items() if lease.owner in alive and p >= 0}

    async def divided(self, partitions: int) -> Counter[str]:
        """Wait until the processes that run have divided all partitions, and nothing moves.

        Return how many each has.
        """
        seen, since = Counter[str](), 0.0
        with anyio.fail_after(_PATIENCE):
            while not since or time.monotonic() - since < self._steady_seconds:
                shares = Counter((await self.owners()).values())
                complete = shares.total() == partitions and len(shares) == len(self.running)
                if not complete or shares != seen:
                    seen, since = shares, time.monotonic() if complete else 0.0
                await anyio.sleep(_LOOK_SECONDS)
        return seen

    async def cursors(self) -> dict[int, str]:
        """Return what is committed."""
        return {p: found.cursor for p, found in (await self.store.load(self.key)).items()}

    async def revisions(self) -> dict[int, int]:
        """Return how often each partition was saved."""
        return {p: found.revision for p, found in (await self.store.load(self.key)).items()}


@contextmanager
def processes(
    count: int, partitions: int, lease: float, burn: float
) -> Iterator[tuple[Publisher, Processes]]:
    publisher = Publisher(partitions, page_size=100, checkpoint_every=10)
    with tempfile.TemporaryDirectory() as directory, publisher.serve() as url:
        found = Processes(url, Path(directory, "bench.db"), lease, burn)
        try:
            for _ in range(count):
                found.start()
            yield publisher, found
        finally:
            found.close()


# ---------------------------------------------------------------------- the measures


@dataclass
class Orphans:
    """Times in lengths of a lease, and the greatest difference between two shares."""

    times: list[float] = field(default_factory=list)
    widest: int = 0

    def __str__(self) -> str:
        times = sorted(self.times)
        p99 = times[math.ceil(0.99 * len(times)) - 1]
        return (
            f"{len(times)} orphaned partitions: read again after p50 "
            f"{statistics.median(times):.2f}, p99 {p99:.2f}, at most {times[-1]:.2f} leases; "
            f"shares differ by at most {self.widest}"
        )


async def orphans(count: int, partitions: int, lease: float, kills: int) -> Orphans:
    """Kill one of `count` processes so often, and start another one each time."""
    outcome = Orphans()
    with processes(count, partitions, lease, 0.0) as (publisher, running):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_publish, publisher, partitions)
            for _ in range(kills):
                shares = await running.divided(partitions)
                outcome.widest = max(outcome.widest, max(shares.values()) - min(shares.values()))
                outcome.times += [s / lease for s in await _orphaned(running)]
                running.start()
            tasks.cancel_scope.cancel()
        await running.store.aclose()
    return outcome


async def _publish(publisher: Publisher, partitions: int) -> None:
    """Publish into each partition all the time, so that whoever reads one commits soon."""
    number = 0
    while True:
        for _ in range(partitions * 4):
            publisher.publish(f"entity {number}", {"n": number})
            number += 1
        await anyio.sleep(_PUBLISH_SECONDS)


async def _orphaned(running: Processes) -> list[float]:
    """Kill the process that runs longest. Return the seconds until its partitions are read."""
    victim = running.running.pop(0)
    before = await running.owners()
    victim.kill()
    victim.wait()
    killed = time.monotonic()
    name = _name_of(before, victim.pid)
    left = {p for p, owner in before.items() if owner == name}
    revisions, times = await running.revisions(), []
    with anyio.fail_after(_PATIENCE):
        while left:
            found = await running.revisions()
            for partition in [p for p in left if found.get(p, 0) > revisions.get(p, 0)]:
                left.discard(partition)
                times.append(time.monotonic() - killed)
            await anyio.sleep(_LOOK_SECONDS)
    return times


def _name_of(owners: dict[int, str], pid: int) -> str:
    return next(owner for owner in owners.values() if owner.startswith(f"pid-{pid}-"))


async def rate(count: int, partitions: int, events: int, burn: float) -> float:
    """Return the events per second of so many processes, from the moment that all is divided."""
    with processes(count, partitions, 5.0, burn) as (publisher, running):
        await running.divided(partitions)
        started = time.perf_counter()
        for number in range(events):
            publisher.publish(f"entity {number}", {"n": number})
        ends = {p: publisher.end_cursor(p) for p in range(partitions)}
        with anyio.fail_after(_PATIENCE):
            while await running.cursors() != ends:  # noqa: ASYNC110
                await anyio.sleep(_LOOK_SECONDS)
        seconds = time.perf_counter() - started
        await running.store.aclose()
    return events / seconds


async def curve(partitions: int, events: int, burn: float) -> None:
    """Print the events per second of 1, 2 and 4 processes."""
    alone = 0.0
    for count in (1, 2, 4):
        found = await rate(count, partitions, events, burn)
        alone = alone or found
        print(f"{count} processes: {found:,.0f} events a second, {found / alone:.2f} of one")


async def measure(args: argparse.Namespace) -> None:
    """Print all measures."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, SQLite")
    print(await orphans(args.processes, args.partitions, args.lease, args.kills))
    await curve(args.partitions, args.events, args.burn)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_sharing")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--partitions", type=int, default=16)
    parser.add_argument("--lease", type=float, default=2.0, help="seconds")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--events", type=int, default=8000)
    parser.add_argument("--burn", type=float, default=0.002, help="seconds of each event")
    args = parser.parse_args()
    if args.work:
        url, path, lease, burn = args.work
        anyio.run(work, url, path, float(lease), float(burn))
    else:
        anyio.run(measure, args)


if __name__ == "__main__":
    main()
