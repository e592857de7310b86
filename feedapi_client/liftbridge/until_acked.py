"""Publishing at least once: again, until every message is acked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.errors import AckTimeoutError, PublishError, PublishRefusedError
from feedapi_client.liftbridge.publishing import StreamPublisher
from feedapi_client.liftbridge.stream import Stream
from feedapi_client.retry import Backoff, OnRetry, retry

_RETRY_BASE_DELAY = 0.2
_RETRY_MAX_DELAY = 10.0


async def publish_until_acked(
    publisher: StreamPublisher,
    stream: Stream,
    values: Sequence[bytes],
    keys: Sequence[bytes | None] | None = None,
    headers_each: Sequence[Mapping[str, bytes]] | None = None,
    *,
    headers: Mapping[str, bytes] | None = None,
    partition: int | None = None,
    ack_policy: AckPolicy | None = None,
    attempts: int = 10,
    on_retry: OnRetry | None = None,
    before_retry: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Publish messages at least once: again from the first one without an ack, until all are acked.

    The last time that the messages are stored, they are in order. Arguments are those of
    `LiftbridgePublisher.publish_many`, except:

    Arguments:
        attempts: number of attempts without progress after which an error is final.
        on_retry: called before each pause, as by `feedapi_client.retry.retry`.
        before_retry: awaited before each attempt but the first. Its error is final.

    Raises:
        PublishError: the last of too many errors, or an error that no further attempt can change.
    """
    acked = 0
    backoff = Backoff(
        base_delay=_RETRY_BASE_DELAY,
        max_delay=_RETRY_MAX_DELAY,
        attempts=attempts,
        retry_if=lambda error: isinstance(error, AckTimeoutError | PublishRefusedError),
    )

    async def publish_rest() -> None:
        nonlocal acked
        if backoff.failing and before_retry is not None:
            await before_retry()
        try:
            await publisher.publish_many(
                stream,
                values[acked:],
                keys=keys and keys[acked:],
                partition=partition,
                headers=headers,
                headers_each=headers_each and headers_each[acked:],
                ack_policy=ack_policy,
            )
        except PublishError as error:
            if error.index:
                acked += error.index
                backoff.reset()
            raise

    await retry(publish_rest, backoff, sleep=asyncio.sleep, on_retry=on_retry)
