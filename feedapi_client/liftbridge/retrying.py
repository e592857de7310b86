"""Publishing until every message is acked: at least once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from feedapi_client.liftbridge.errors import AckTimeoutError, PublishError, PublishRefusedError
from feedapi_client.liftbridge.publisher import LiftbridgePublisher
from feedapi_client.liftbridge.streams import Stream

_PAUSE = 0.2
_MAX_PAUSE = 10.0


async def publish_until_acked(
    publisher: LiftbridgePublisher,
    stream: Stream,
    values: Sequence[bytes],
    keys: Sequence[bytes | None] | None = None,
    headers: Sequence[Mapping[str, bytes]] | None = None,
    *,
    shared: Mapping[str, bytes] | None = None,
    partition: int | None = None,
    attempts: int = 10,
    on_retry: Callable[[PublishError], None] | None = None,
) -> None:
    """Publish the messages, and again those from the first one without an ack on, so that the last time they come in order.

    `headers` are those of each message, `shared` those of all. Raises the `PublishError` that came `attempts` times without progress, and at once one that
    another attempt does not mend.
    """
    done = failures = 0
    while done < len(values):
        try:
            await publisher.publish_many(
                stream,
                values[done:],
                keys=keys and keys[done:],
                partition=partition,
                headers=shared,
                headers_each=headers and headers[done:],
            )
        except (AckTimeoutError, PublishRefusedError) as error:
            failures = 1 if error.index else failures + 1
            done += error.index
            if failures >= attempts:
                raise
            if on_retry is not None:
                on_retry(error)
            await asyncio.sleep(min(_PAUSE * 2**failures, _MAX_PAUSE))
        else:
            return
