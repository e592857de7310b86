"""Publishing at least once: again, until every message is acked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.liftbridge_errors import (
    AckTimeoutError,
    NoStreamError,
    PublishError,
    PublishRefusedError,
)
from feedapi_client.liftbridge.messages_pb2 import Ack
from feedapi_client.liftbridge.stream_name import Stream
from feedapi_client.liftbridge.stream_publisher import StreamPublisher
from feedapi_client.retry import Backoff, OnRetry, retry

_RETRY_BASE_DELAY = 0.2
_RETRY_MAX_DELAY = 10.0
_RETRIED = (AckTimeoutError, NoStreamError, PublishRefusedError)


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
    give_up_after: float | None = None,
    attempts: int | None = None,
    on_retry: OnRetry | None = None,
    before_retry: Callable[[], Awaitable[object]] | None = None,
) -> list[Ack | None]:
    """Publish messages at least once: again from the first one without an ack, until all are acked.

    The last time that the messages are stored, they are in order. As long as no ack has come, and
    after a failure, one message is sent alone, and the others behind its ack. Arguments are those
    of `StreamPublisher.publish_many`, except:

    Arguments:
        headers: of all messages. They win over those of `headers_each`.
        give_up_after: seconds without progress after which an error is final; None: never.
        attempts: number of attempts without progress after which an error is final; None: any.
        on_retry: called before each pause, as by `feedapi_client.retry.retry`.
        before_retry: awaited before each attempt but the first. Its error is final.

    Returns: the acks of all messages.

    Raises:
        PublishError: the last of too many errors, or an error that no further attempt can change.
            Its `index` counts from the first of all messages, as its `acks` do.
    """
    if headers and headers_each:
        headers_each = [{**own, **headers} for own in headers_each]
    acks: list[Ack | None] = []
    backoff = Backoff(
        base_delay=_RETRY_BASE_DELAY,
        max_delay=_RETRY_MAX_DELAY,
        give_up_after=give_up_after,
        attempts=attempts,
        retry_if=lambda error: isinstance(error, _RETRIED),
    )

    async def publish_rest() -> None:
        if backoff.failing and before_retry is not None:
            await before_retry()
        acked = len(acks)
        # Where no ack comes or a partition is missing, each attempt could else store all of them.
        alone = backoff.failing or not publisher.stats.acked
        try:
            while len(acks) < len(values):
                rest = slice(len(acks), len(acks) + 1 if alone else None)
                alone = False
                acks.extend(
                    await publisher.publish_many(
                        stream,
                        values[rest],
                        keys=keys and keys[rest],
                        partition=partition,
                        headers=headers,
                        headers_each=headers_each and headers_each[rest],
                        ack_policy=ack_policy,
                    )
                )
        except PublishError as error:
            acks.extend(error.acks)
            error.index, error.acks = len(acks), list(acks)
            if len(acks) > acked:
                backoff.reset()
            raise

    await retry(publish_rest, backoff, sleep=asyncio.sleep, on_retry=on_retry)
    return acks
