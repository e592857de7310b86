"""Graceful restarts of instances in one process, which share a store in memory."""

from __future__ import annotations

from random import Random

import anyio

from feedapi_client import Batch, Limits
from tests.crash.traffic import Traffic
from tests.sharing.disturbances import Outcome
from tests.sharing.fleet import Fleet, fleet, until

_LIMITS = Limits(max_batch_bytes=500, discovery_interval=20, poll_interval=1, max_poll_interval=10)


async def restart_in_memory(
    restarts: int, *, instances: int = 4, seed: int | None = None
) -> Outcome:
    """Restart instances at random while the feed grows and is split, then handle the rest."""
    random, outcome = Random(seed), Outcome()
    traffic = Traffic(random, split_every=max(2, restarts // 16))
    async with fleet(traffic.publisher) as running:
        running.before = lambda batch: _take_long(batch, random)
        for _ in range(instances):
            running.start(limits=_LIMITS)
        for number in range(restarts):
            await _restart(running, random)
            outcome.disturbances["restart"] += 1
            if number % 3 == 0:
                traffic.disturb()
            traffic.publish(random.randint(10, 60))
            await anyio.sleep(random.choice([0.0, 0.5, 5.0]))
        await until(lambda: len(running.payloads) >= traffic.published.total())
        await anyio.sleep(60)  # for what is handled twice
        rows = [(payload["entity"], payload["n"]) for payload in running.payloads]
        outcome.compare(traffic.published, rows)
        outcome.seconds = anyio.current_time()
    outcome.splits = dict(traffic.splits)
    return outcome


async def _restart(running: Fleet, random: Random) -> None:
    await running.stop(random.choice(running.members))
    running.start(limits=_LIMITS)


async def _take_long(_: Batch, random: Random) -> None:
    """Batches are in flight at most moments, before their effects."""
    await anyio.sleep(random.uniform(0, 2))
