"""Publishing a feed to Liftbridge, at least once or exactly once.

At least once: any stream, any cursor store. A feed's cursor is committed when all events up to it
are acked. After a crash the events of uncommitted batches are published again, in order, perhaps
in other batches.

Exactly once: a stream with optimistic concurrency control, and a consumer whose cursor store is
that stream (`StreamCursorStore`). No state is kept elsewhere. A relay that starts reads the end of
the stream and continues from there, and the broker refuses what a second relay writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio

from feedapi_client.consumer import FeedConsumer
from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.errors import LiftbridgeError
from feedapi_client.liftbridge.headers import CURSOR, PARTITION
from feedapi_client.liftbridge.publishing import StreamPublisher
from feedapi_client.liftbridge.stream import Stream
from feedapi_client.liftbridge.stream_end import writable
from feedapi_client.liftbridge.stream_format import MessageFormat
from feedapi_client.liftbridge.stream_rows import OutgoingBatch
from feedapi_client.liftbridge.stream_store import StreamCursorStore
from feedapi_client.liftbridge.until_acked import publish_until_acked
from feedapi_client.model import Batch, Event

logger = logging.getLogger(__name__)

# How often an idle relay looks whether a crash of the broker hides its newest messages.
_REVEAL_SECONDS = 5.0

Key = Callable[[Event], bytes | None]
Headers = Callable[[Event], Mapping[str, bytes]]


@dataclass(slots=True)
class RelayProgress:
    """What a relay has done since it was created.

    Attributes:
        batches: batches whose events are all acked.
        events: the events of these batches.
        retries: how often events had to be published again.
    """

    batches: int = 0
    events: int = 0
    retries: int = 0


class Relay:
    """Publishes every event of a feed as a message, in order within a feed partition.

    The value of a message is the event's payload exactly as sent. Its headers hold the feed's
    partition (``feedapi-partition``) and the cursor that resumes after its batch
    (``feedapi-cursor``). In a stream with several partitions the key chooses the partition; without
    keys the feed's partition chooses it.

    When the consumer's store is a `StreamCursorStore`, the relay is exactly once. Its format
    ``"batch"`` has no keys and no additional headers, and a batch of the consumer has to fit into a
    message (`Limits.max_batch_bytes`).

    With any other store it is at least once. A batch whose acks do not all come is published again
    from the first message that has none.

    Arguments:
        consumer: the open consumer of the feed.
        publisher: an open publisher.
        stream: the stream to publish to; with a `StreamCursorStore` it is that of the store.
        key: makes the key of an event's message.
        headers: makes additional headers of an event's message.
        attempts: number of attempts without progress after which an error is final.
        ack_policy: when the broker acks, at least once. With ``LEADER`` events are lost when a
            leader dies that acked them before its replicas had them. Exactly once it is ``ALL``.
        api: an open connection to the broker's gRPC API. With it a relay that is at least once
            looks at the stream before the first message and before each retry: it wakes paused
            partitions, and a stream that is missing or read-only is an error at once. A
            `StreamCursorStore` has its own.

    Raises:
        ValueError: the arguments do not fit together.
    """

    def __init__(
        self,
        consumer: FeedConsumer,
        publisher: StreamPublisher,
        stream: Stream | str | None = None,
        *,
        key: Key | None = None,
        headers: Headers | None = None,
        attempts: int = 10,
        ack_policy: AckPolicy = AckPolicy.ALL,
        api: LiftbridgeApi | None = None,
    ) -> None:
        if AckPolicy.NONE in (publisher.ack_policy, ack_policy):
            raise ValueError("a relay commits what is acked: AckPolicy.NONE has no acks")
        store = consumer.store
        self._store = store if isinstance(store, StreamCursorStore) else None
        self._consumer = consumer
        self._publisher = publisher
        self._stream = _stream(stream, self._store)
        self._key = key
        self._headers = headers
        self._attempts = attempts
        self._ack_policy = ack_policy
        self._api = api
        self.progress = RelayProgress()
        if self._store is not None and self._store.format is MessageFormat.BATCH:
            if key is not None or headers is not None:
                raise ValueError(
                    "with format='batch' a message holds many events, which have no key or "
                    "headers of their own: use format='events'"
                )
            _check_batch_size(consumer, publisher)

    @property
    def exactly_once(self) -> bool:
        """Whether the consumer's cursor store is the stream."""
        return self._store is not None

    async def run(self) -> RelayProgress:
        """Relay until the feed ends (a consumer with ``follow=False``) or the consumer is stopped.

        Raises:
            FeedError: what the consumer raises.
            PublishError: a message can't be published.
            StreamError: the stream is missing, read-only, or not what the relay needs.
            FencedError: another relay writes to the stream.

        Cancellation: nothing is committed that is not acked.
        """
        if self._store is None:
            await self._check_stream()
            await self._consumer.run(self._relay_at_least_once)
            return self.progress
        revealing = asyncio.create_task(_reveal_often(self._store))
        try:
            await self._consumer.run(self._relay_exactly_once)
        finally:
            revealing.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({revealing})
        return self.progress

    async def _relay_at_least_once(self, batch: Batch) -> None:
        values, keys, headers = self._messages(batch)
        await publish_until_acked(
            self._publisher,
            self._stream,
            values,
            keys,
            headers,
            headers={PARTITION: str(batch.partition).encode(), CURSOR: batch.cursor.encode()},
            partition=batch.partition % self._stream.partitions if self._key is None else None,
            ack_policy=self._ack_policy,
            attempts=self._attempts,
            on_retry=self._on_retry,
            before_retry=self._check_stream,
        )
        await batch.commit()
        self._count(batch)

    async def _relay_exactly_once(self, batch: Batch) -> None:
        values, keys, headers = self._messages(batch)
        outgoing = OutgoingBatch(batch.partition, batch.cursor, values, keys or (), headers or ())
        await batch.commit(transaction=outgoing)
        self._count(batch)

    def _messages(
        self, batch: Batch
    ) -> tuple[list[bytes], Sequence[bytes | None] | None, Sequence[Mapping[str, bytes]] | None]:
        """Return the values, keys and headers of a batch's messages."""
        key, headers = self._key, self._headers
        return (
            [event.raw for event in batch.events],
            None if key is None else [key(event) for event in batch.events],
            None if headers is None else [headers(event) for event in batch.events],
        )

    async def _check_stream(self) -> None:
        if self._api is not None:
            for partition in range(self._stream.partitions):
                await writable(self._api, self._stream.name, partition)

    def _on_retry(self, error: Exception, attempt: int, pause: float) -> None:
        self.progress.retries += 1
        logger.warning(
            "publishing again in %.1f s: %s",
            pause,
            error,
            extra={"stream": self._stream.name, "attempt": attempt, "pause": pause},
        )

    def _count(self, batch: Batch) -> None:
        self.progress.batches += 1
        self.progress.events += len(batch)


async def _reveal_often(store: StreamCursorStore) -> None:
    """Let readers see the newest messages after a crash of the broker, also of an idle feed."""
    while True:
        await asyncio.sleep(_REVEAL_SECONDS)
        try:
            await store.reveal()
        except LiftbridgeError as error:
            # The next save, or the next turn, meets the same.
            logger.debug("the end of the stream is not looked at: %s", error)


def _check_batch_size(consumer: FeedConsumer, publisher: StreamPublisher) -> None:
    """Raise ValueError when a batch of the consumer may not fit into a message.

    Otherwise the relay would fail later, at the first batch that is too large.
    """
    batch, message = consumer.limits.max_batch_bytes, publisher.max_message_bytes
    if message is not None and batch > message * 3 // 4:
        raise ValueError(
            f"with format='batch' a batch has to fit into a message of {message} bytes, and the "
            f"consumer makes batches of {batch}: give it "
            f"limits=Limits(max_batch_bytes={message // 2}) or use format='events'"
        )


def _stream(stream: Stream | str | None, store: StreamCursorStore | None) -> Stream:
    given = Stream(stream) if isinstance(stream, str) else stream
    if store is None:
        if given is None:
            raise ValueError("a relay needs the stream to publish to")
        return given
    if given is not None and given != store.stream:
        raise ValueError(
            f"the consumer keeps its cursors in the stream {store.stream.name}, so its events go "
            f"there too, not to {given.name}"
        )
    return store.stream
