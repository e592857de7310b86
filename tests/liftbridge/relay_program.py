"""A relay to be killed.

``python -m tests.liftbridge.relay_program MODE FEED NATS API STORE [ACK_TIMEOUT [WAY [CERTIFICATE
KEY]]]``. The way is ``nats`` or ``grpc``. With a certificate the gRPC API is spoken to over TLS.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from pathlib import Path

import anyio

from feedapi_client import FeedConsumer, Limits, SQLiteCursorStore
from feedapi_client.liftbridge import (
    LiftbridgeApi,
    LiftbridgeGrpcPublisher,
    LiftbridgePublisher,
    Relay,
    StreamCursorStore,
    StreamGapError,
    StreamPublisher,
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
    way: str,
    certificate: list[str],
) -> None:
    credentials = None
    if certificate:
        from tests.http.certificates import Certificate
        from tests.liftbridge.broker import trusting

        credentials = trusting(Certificate(*map(Path, certificate)), shown=True)
    async with AsyncExitStack() as stack:
        # Few messages in flight: a batch takes several round trips, so a kill can hit any of them.
        publisher: StreamPublisher = await stack.enter_async_context(
            LiftbridgePublisher(nats, ack_timeout=ack_timeout, max_in_flight=3)
            if way == "nats"
            else LiftbridgeGrpcPublisher(
                api_addresses.split(","),
                ack_timeout=ack_timeout,
                max_in_flight=3,
                credentials=credentials,
            )
        )
        api = await stack.enter_async_context(
            LiftbridgeApi(api_addresses.split(","), credentials=credentials)
        )
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
    way = rest[1] if len(rest) > 1 else "nats"
    try:
        anyio.run(main, mode, feed, nats, api_addresses, path, ack_timeout, way, rest[2:])
    except StreamGapError as error:
        print(error, flush=True)
        sys.exit(LOST)
