"""A relay to be killed.

``python -m tests.liftbridge.relay_program MODE FEED NATS API STORE [ACK_TIMEOUT]``.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack

import anyio

from feedapi_client import FeedConsumer, Limits, SQLiteCursorStore
from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgePublisher,
    Relay,
    StreamCursorStore,
    StreamGapError,
)

LOST = 3
"""The exit code when the broker lost messages of the relay."""


async def main(
    mode: str,
    feed: str,
    nats: str,
    api_addresses: str,
    path: str,
    ack_timeout: float,
) -> None:
    async with AsyncExitStack() as stack:
        # Few messages in flight: a batch takes several round trips, so a kill can hit any of them.
        publisher = await stack.enter_async_context(
            LiftbridgePublisher(nats, ack_timeout=ack_timeout, max_in_flight=3)
        )
        api = await stack.enter_async_context(LiftbridgeApi(api_addresses.split(",")))
        store: StreamCursorStore | SQLiteCursorStore
        if mode == "at-least-once":
            store = SQLiteCursorStore(path)
        else:
            store = StreamCursorStore(publisher, api, "s", format=mode, snapshot_every=200)
        limits = Limits(
            max_batch_bytes=4000, commit_timeout=120, poll_interval=0.02, max_poll_interval=0.05
        )
        consumer = await stack.enter_async_context(FeedConsumer(feed, store=store, limits=limits))
        await Relay(consumer, publisher, "s", api=api).run()


if __name__ == "__main__":
    mode, feed, nats, api_addresses, path, *rest = sys.argv[1:]
    ack_timeout = float(rest[0]) if rest else 5.0
    try:
        anyio.run(main, mode, feed, nats, api_addresses, path, ack_timeout)
    except StreamGapError as error:
        print(error, flush=True)
        sys.exit(LOST)
