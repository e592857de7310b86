"""Print every event of a feed, in order. Run again with the same URL, it goes on where it ended.

python examples/first_program.py [URL]
"""

import sys
from contextlib import nullcontext

import anyio

from feedapi_client import FeedConsumer, SQLiteCursorStore
from feedapi_client.testing import Publisher


async def main(url: str) -> None:
    async with (
        SQLiteCursorStore("cursors.db") as store,
        FeedConsumer(url, store=store, follow=False) as consumer,
    ):
        async for event in consumer:
            print(event.partition, event.json())


if __name__ == "__main__":
    publisher = Publisher(2)  # a feed to try it with
    for n in range(10):
        publisher.publish(f"customer-{n % 3}", {"entity": f"customer-{n % 3}", "n": n})
    with nullcontext(sys.argv[1]) if len(sys.argv) > 1 else publisher.serve() as url:
        anyio.run(main, url)
