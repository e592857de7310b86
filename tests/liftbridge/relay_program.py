"""A relay to be killed: ``python -m tests.liftbridge.relay_program MODE FEED NATS API STORE``."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack

import anyio

from feedapi_client import FeedConsumer, Limits, SQLiteCursorStore
from feedapi_client.liftbridge import LiftbridgeApi, LiftbridgePublisher, Relay, StreamCursorStore


async def main(mode: str, feed: str, nats: str, api_address: str, path: str) -> None:
    async with AsyncExitStack() as stack:
        # Few messages in flight: a batch takes several round trips, so a kill can hit any of them.
        publisher = await stack.enter_async_context(
            LiftbridgePublisher(nats, ack_timeout=5, max_in_flight=3)
        )
        store: StreamCursorStore | SQLiteCursorStore
        if mode == "at-least-once":
            store = SQLiteCursorStore(path)
        else:
            api = await stack.enter_async_context(LiftbridgeApi(api_address))
            store = StreamCursorStore(publisher, api, "s", format=mode, snapshot_every=200)
        limits = Limits(max_batch_bytes=4000, poll_interval=0.02, max_poll_interval=0.05)
        consumer = await stack.enter_async_context(FeedConsumer(feed, store=store, limits=limits))
        await Relay(consumer, publisher, "s").run()


if __name__ == "__main__":
    mode, feed, nats, api_address, path = sys.argv[1:]
    anyio.run(main, mode, feed, nats, api_address, path)
