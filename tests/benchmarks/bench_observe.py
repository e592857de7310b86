"""What `observe` costs, by processor time: ``python -m tests.benchmarks --only observe``.

All loops take turns in one process: processes of the same program differ by more than observing
costs. How much is noise is shown by a loop beside itself.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from contextlib import nullcontext

from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from rich.progress import track

from feedapi_client import FeedConsumer
from feedapi_client.telemetry import observe
from tests.benchmarks.results import Comparison
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.static_feed import static_feed

TURNS = 24
"""Turns of each loop in a round."""


async def _events_a_second(url: str, meter: Meter | None, *, decode: bool) -> float:
    """Return the events in a second of the processor's time."""
    count = 0
    async with FeedConsumer(url, follow=False) as consumer:
        with nullcontext() if meter is None else observe(consumer, meter):
            started = time.process_time()
            async for batch in consumer.batches():
                for event in batch.events:
                    event.json() if decode else event.raw
                count += len(batch.events)
                await batch.commit()
            return count / (time.process_time() - started)


async def _speeds(url: str, turns: int) -> dict[str, list[float]]:
    meter = MeterProvider([InMemoryMetricReader()]).get_meter("bench")
    loops: dict[str, tuple[Meter | None, bool]] = {
        "raw": (None, False),
        "raw again": (None, False),
        "raw observed": (meter, False),
        "json": (None, True),
        "json observed": (meter, True),
    }
    found: dict[str, list[float]] = {name: [] for name in loops}
    for turn in track(range(turns + 1), description="observe", transient=True):
        order = list(loops)
        random.Random(turn).shuffle(order)
        for name in order:
            gc.collect()
            observer, decode = loops[name]
            speed = await _events_a_second(url, observer, decode=decode)
            if turn:  # the first one warms up
                found[name].append(speed)
    return found


def measure(sizes: Sizes) -> list[Comparison]:
    """Compare loops with and without metrics."""
    turns = sizes.pick(TURNS * sizes.rounds, 1)
    with static_feed(events=sizes.pick(400_000, 4_000), in_thread=sizes.quick) as url:
        found = asyncio.run(_speeds(url, turns))

    def comparison(name: str, ours: str, theirs: str, bar: float | None = None) -> Comparison:
        return Comparison(
            name=name, unit="events/s", ours=found[ours], theirs=found[theirs], bar=bar
        )

    return [
        comparison(".raw, observed / not", "raw observed", "raw", 0.97),
        comparison(".json(), observed / not", "json observed", "json", 0.97),
        comparison(".raw / the same again, which is noise", "raw again", "raw"),
    ]
