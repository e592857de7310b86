"""Relay a feed to Liftbridge: at least once to one stream, exactly once to another one.

python examples/relay_to_liftbridge.py [FEED NATS API]

For example: https://service/myfeed nats://broker:4222 broker:9292. Without arguments it starts a
feed, a NATS server and a simulated broker.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
from feedapi_client.testing.liftbridge import LiftbridgeBroker, NatsServer

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


@asynccontextmanager
async def simulated_servers() -> AsyncIterator[tuple[str, str, str]]:
    """Start a feed, a NATS server and a simulated broker."""
    publisher = Publisher(2)
    for n in range(1000):
        publisher.publish(f"customer-{n % 7}", {"entity": f"customer-{n % 7}", "n": n})
    with publisher.serve() as feed, NatsServer() as nats:
        async with LiftbridgeBroker(nats.url, grpc=True) as broker:
            yield feed, nats.url, broker.address


@asynccontextmanager
async def servers_of_arguments() -> AsyncIterator[tuple[str, str, str]]:
    yield sys.argv[1], sys.argv[2], sys.argv[3]


async def main() -> None:
    async with (
        simulated_servers() if len(sys.argv) == 1 else servers_of_arguments() as (
            feed,
            nats,
            api_address,
        ),
        LiftbridgeApi(api_address) as api,
    ):
        await at_least_once(feed, nats, api)
        await exactly_once(feed, nats, api)


if __name__ == "__main__":
    anyio.run(main)
