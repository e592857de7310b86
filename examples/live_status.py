"""Show the state of each partition while a consumer runs, as a dashboard would.

Without a URL it reads a feed of its own, in which a partition is split meanwhile.

python examples/live_status.py [URL]
"""

import sys
from contextlib import nullcontext

import anyio

from feedapi_client import Batch, ConsumerStatus, FeedConsumer, Limits
from feedapi_client.testing import Publisher

publisher = Publisher(2)


async def handle(batch: Batch) -> None:
    """Do nothing with the events: this example is about the status."""


def show(status: ConsumerStatus) -> None:
    print(f"{status.events} events, {status.buffered_bytes} bytes buffered")
    for partition in status.partitions.values():
        progress = "caught up" if partition.caught_up else "behind"
        print(
            f"  {partition.partition}: {partition.state}, cursor {partition.cursor}, "
            f"{partition.events} events, {progress}"
        )
    for report in status.reports:
        print(f"  ! {report}")


async def main(url: str) -> None:
    # Short intervals show new events sooner, and send more requests to a quiet feed.
    async with (
        FeedConsumer(url, limits=Limits(poll_interval=0.05, max_poll_interval=1.0)) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(consumer.run, handle)
        for _ in range(3):
            await anyio.sleep(0.5)
            show(consumer.status())
            if publisher.url == url:
                change_the_feed()
        consumer.stop()


def change_the_feed() -> None:
    """Split a partition and publish events, for the status to show."""
    if 0 in publisher.open_partitions():
        publisher.split(0, method="starts-after")
    for n in range(100):
        publisher.publish(f"customer-{n}", {"entity": f"customer-{n}", "n": n})


if __name__ == "__main__":
    with nullcontext(sys.argv[1]) if len(sys.argv) > 1 else publisher.serve() as url:
        anyio.run(main, url)
