"""The relay to Liftbridge, at least once, beside publishing with bare nats-py and acks."""

from __future__ import annotations

import asyncio

from feedapi_client.testing.liftbridge import NatsServer
from tests.benchmarks.bench_liftbridge import (
    PARTITIONS,
    STREAM,
    bare_acked,
    publisher_acked,
    relay_at_least_once,
)
from tests.benchmarks.fast_broker import fast_broker
from tests.benchmarks.results import Comparison, in_turns
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.static_feed import payload, static_feed

WINDOW = 8192


def measure(sizes: Sizes) -> list[Comparison]:
    """Compare acked messages per second, of the relay and of the publisher alone."""
    events = sizes.pick(200_000, 400)
    payloads = [payload(number) for number in range(events)]
    with (
        NatsServer() as server,
        fast_broker(server.url, STREAM, in_thread=sizes.quick),
        static_feed(
            events=events // PARTITIONS, partitions=PARTITIONS, in_thread=sizes.quick
        ) as feed,
    ):
        loops = {
            "relay to Liftbridge, at least once": (
                lambda: relay_at_least_once(server.url, feed, WINDOW),
                0.85,
            ),
            "LiftbridgePublisher": (lambda: publisher_acked(server.url, payloads, WINDOW), None),
        }
        results = []
        for name, (loop, bar) in loops.items():
            pairs = in_turns(
                lambda loop=loop: asyncio.run(loop()),  # type: ignore[misc]
                lambda: asyncio.run(bare_acked(server.url, payloads, WINDOW)),
                rounds=sizes.rounds,
                title=name,
            )
            results.append(
                Comparison(
                    name=f"{name} / nats-py with acks",
                    unit="k events/s",
                    ours=[mine.events / mine.wall / 1e3 for mine, _ in pairs],
                    theirs=[other.events / other.wall / 1e3 for _, other in pairs],
                    bar=bar,
                )
            )
    return results
