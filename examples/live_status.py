"""What a health endpoint or a dashboard shows: the state of each partition while a consumer runs, here through a split.

python examples/live_status.py [URL]
"""

import sys
from contextlib import nullcontext

import anyio

from feedapi_client import Batch, ConsumerStatus, FeedConsumer, Limits
from feedapi_client.testing import Publisher

publisher = Publisher(2)


async def handle(batch: Batch) -> None:
    """Nothing to be done here."""


def show(status: ConsumerStatus) -> None:
    print(f"{status.events} events, {status.buffered_bytes} bytes buffered")
    for partition in status.partitions.values():
        print(
            f"  {partition.partition}: {partition.state}, cursor {partition.cursor}, {partition.events} events, {'caught up' if partition.caught_up else 'behind'}"
        )
    for report in status.reports:
        print(f"  ! {report}")


async def main(url: str) -> None:
    # The smaller the intervals, the sooner news are seen, and the more requests a quiet feed gets.
    async with (
        FeedConsumer(url, limits=Limits(poll_interval=0.05, max_poll_interval=1.0)) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(consumer.run, handle)
        for _ in range(3):
            await anyio.sleep(0.5)
            show(consumer.status())
            if publisher.url == url:
                happen()
        consumer.stop()


def happen() -> None:
    """Something for the status to show."""
    if 0 in publisher.open_partitions():
        publisher.split(0, method="starts-after")
    for n in range(100):
        publisher.publish(f"customer-{n}", {"entity": f"customer-{n}", "n": n})


if __name__ == "__main__":
    with nullcontext(sys.argv[1]) if len(sys.argv) > 1 else publisher.serve() as url:
        anyio.run(main, url)
