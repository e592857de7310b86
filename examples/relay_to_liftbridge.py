"""Relay a feed to Liftbridge: at least once to one stream, exactly once to another one.

python examples/relay_to_liftbridge.py [FEED NATS API]

For example: https://service/myfeed nats://broker:4222 broker:9292. Without arguments it starts a
feed, a NATS server and a broker, whose program is built as docs/pages/liftbridge.md says.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from feedapi_client import Event, FeedConsumer, SQLiteCursorStore
from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgePublisher,
    Relay,
    RelayReader,
    Stream,
    StreamCursorStore,
)
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer

ORDERS = Stream("orders", partitions=3)
LEDGER = Stream("ledger")


def customer(event: Event) -> bytes:
    return event.json()["entity"].encode()


async def at_least_once(feed: str, nats: str, api: LiftbridgeApi) -> None:
    """Cursors in a file. Each event is a message; those of a customer are in one partition."""
    await api.create_stream(ORDERS)
    async with (
        LiftbridgePublisher(nats) as publisher,
        SQLiteCursorStore("relay.db") as store,
        FeedConsumer(feed, store=store, follow=False) as consumer,
    ):
        done = await Relay(consumer, publisher, ORDERS, key=customer).run()
    for partition in range(ORDERS.partitions):
        newest = (await api.partition_metadata(ORDERS.name, partition)).newest_offset
        print(f"{ORDERS.name}.{partition}: {newest + 1} messages")
    print(f"{done.events} events relayed at least once")


async def exactly_once(feed: str, nats: str, api: LiftbridgeApi) -> None:
    """Cursors in the stream, which needs optimistic concurrency control.

    The reader gets whole batches, each once.
    """
    await api.create_stream(LEDGER, concurrency_control=True)
    async with LiftbridgePublisher(nats) as publisher:
        store = StreamCursorStore(publisher, api, LEDGER, format="events")
        async with FeedConsumer(feed, store=store, follow=False) as consumer:
            done = await Relay(consumer, publisher, key=customer).run()
    print(f"{done.events} events relayed exactly once")
    newest = (await api.partition_metadata(LEDGER.name)).newest_offset
    async for batch in RelayReader(api, LEDGER.name, until=newest):
        print(
            f"a batch of {len(batch.events)} events of partition {batch.partition}; "
            f"to resume after it, start at offset {batch.next_offset}"
        )


@contextmanager
def own_servers() -> Iterator[tuple[str, str, str]]:
    """Start a feed, a NATS server and a broker."""
    publisher = Publisher(2)
    for n in range(1000):
        publisher.publish(f"customer-{n % 7}", {"entity": f"customer-{n % 7}", "n": n})
    with publisher.serve() as feed, NatsServer() as nats, LiftbridgeServer(nats.url) as broker:
        yield feed, nats.url, broker.address


async def main(feed: str, nats: str, api_address: str) -> None:
    async with LiftbridgeApi(api_address) as api:
        await at_least_once(feed, nats, api)
        await exactly_once(feed, nats, api)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        anyio.run(main, *sys.argv[1:])
    else:
        with own_servers() as servers:
            anyio.run(main, *servers)
