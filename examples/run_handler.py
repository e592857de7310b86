"""A service with a handler for batches: partitions are handled concurrently, until Ctrl-C.

Without a URL it reads a feed of its own and ends with it.

python examples/run_handler.py [URL]
"""

import signal
import sys
from collections import defaultdict
from contextlib import nullcontext

import anyio
import msgspec

from feedapi_client import Batch, FeedConsumer, MemoryCursorStore
from feedapi_client.testing import Publisher

HISTORY = 1000


class Order(msgspec.Struct):
    """The part of a payload that this service looks at."""

    entity: str
    amount: float


revenue: defaultdict[str, float] = defaultdict(float)


async def handle(batch: Batch) -> None:
    """Handle one batch. It is committed when this returns.

    Called for several partitions at once, but for each partition with one batch at a time.
    """
    for event in batch.events:
        order = event.decode(Order)
        revenue[order.entity] += order.amount
    await anyio.sleep(0.01)  # a database, another service ...


async def stop_at_signal(consumer: FeedConsumer) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            consumer.stop()  # finish the batches in flight, then return


async def main(url: str, *, follow: bool) -> None:
    async with (
        FeedConsumer(url, store=MemoryCursorStore(), follow=follow) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(stop_at_signal, consumer)
        await consumer.run(handle, max_concurrency=8)
        tasks.cancel_scope.cancel()
    print(f"{sum(revenue.values()):.2f} of revenue from {len(revenue)} customers")


if __name__ == "__main__":
    publisher = Publisher(4)
    for n in range(HISTORY):
        publisher.publish(f"customer-{n % 50}", {"entity": f"customer-{n % 50}", "amount": n / 100})
    with nullcontext(sys.argv[1]) if len(sys.argv) > 1 else publisher.serve() as url:
        anyio.run(lambda: main(url, follow=len(sys.argv) > 1))
