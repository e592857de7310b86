"""A feed onto Liftbridge, at least once or exactly once.

At least once: any stream, any cursor store. A feed's cursor is committed when all events up to it are acked. After a crash the events of uncommitted
batches are published again, in order, perhaps in other batches.

Exactly once: a stream with optimistic concurrency control, and a consumer whose store is that stream (`StreamCursorStore`). Nothing else is kept anywhere:
a relay that starts reads the end of the stream and goes on from there, and the broker refuses what a second relay writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from feedapi_client.consumer import FeedConsumer
from feedapi_client.liftbridge.attempts import CURSOR, PARTITION, Format
from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.errors import PublishError
from feedapi_client.liftbridge.publisher import LiftbridgePublisher
from feedapi_client.liftbridge.retrying import publish_until_acked
from feedapi_client.liftbridge.stream_store import OutgoingBatch, StreamCursorStore
from feedapi_client.liftbridge.streams import Stream
from feedapi_client.model import Batch, Event

logger = logging.getLogger(__name__)

Key = Callable[[Event], bytes | None]
Headers = Callable[[Event], Mapping[str, bytes]]


@dataclass(slots=True)
class RelayProgress:
    """What a relay has done since it was made: batches and events that are acked, and how often events had to be published again."""

    batches: int = 0
    events: int = 0
    retries: int = 0


class Relay:
    """Publishes every event of a feed as a message, in order within a feed partition.

    A message's value is the event's payload exactly as sent, its headers hold the feed's partition (``feedapi-partition``) and the cursor that resumes
    behind its batch (``feedapi-cursor``). `key` makes its key, `headers` adds headers. In a stream with several partitions the key chooses the partition,
    and without keys the feed's partition does.

    When the consumer's store is a `StreamCursorStore`, the relay is exactly once, and `stream` is the store's; its format ``"batch"`` has no keys and no
    added headers, and the consumer's batches have to fit into a message (`Limits.max_batch_bytes`): else ValueError. With any other store it is at least
    once: a batch whose acks do not all come is published again from the first message that has none, up to `attempts` times without progress.
    """

    def __init__(
        self,
        consumer: FeedConsumer,
        publisher: LiftbridgePublisher,
        stream: Stream | str | None = None,
        *,
        key: Key | None = None,
        headers: Headers | None = None,
        attempts: int = 10,
    ) -> None:
        if publisher.ack_policy is AckPolicy.NONE:
            raise ValueError("a relay commits what is acked: AckPolicy.NONE has no acks")
        store = consumer.store
        self._store = store if isinstance(store, StreamCursorStore) else None
        self._consumer = consumer
        self._publisher = publisher
        self._stream = _stream(stream, self._store)
        self._key = key
        self._headers = headers
        self._attempts = attempts
        self.progress = RelayProgress()
        if self._store is not None and self._store.format is Format.BATCH:
            if key is not None or headers is not None:
                raise ValueError(
                    "with format='batch' a message holds many events, which have no key or headers of their own: use format='events'"
                )
            _check_batch_size(consumer, publisher)

    @property
    def exactly_once(self) -> bool:
        """The consumer's store is the stream."""
        return self._store is not None

    async def run(self) -> RelayProgress:
        """Relay until the feed ends (a consumer with ``follow=False``), is stopped, or something fails for good; return what was done.

        Raises what the consumer raises, a `PublishError` when a message can't be published, `FencedError` when another relay is at work. Nothing is
        committed that is not acked, also when cancelled.
        """
        await self._consumer.run(self._relay if self._store is None else self._relay_once)
        return self.progress

    async def _relay(self, batch: Batch) -> None:
        await self._publish(batch)
        await batch.commit()
        self._count(batch)

    async def _relay_once(self, batch: Batch) -> None:
        values, keys, headers = self._parts(batch)
        await batch.commit(
            transaction=OutgoingBatch(
                batch.partition, batch.cursor, values, keys or (), headers or ()
            )
        )
        self._count(batch)

    async def _publish(self, batch: Batch) -> None:
        values, keys, headers = self._parts(batch)
        shared = {PARTITION: str(batch.partition).encode(), CURSOR: batch.cursor.encode()}
        partition = batch.partition % self._stream.partitions if self._key is None else None
        await publish_until_acked(
            self._publisher,
            self._stream,
            values,
            keys,
            headers,
            shared=shared,
            partition=partition,
            attempts=self._attempts,
            on_retry=self._on_retry,
        )

    def _on_retry(self, error: PublishError) -> None:
        self.progress.retries += 1
        logger.warning("events are published again: %s", error)

    def _parts(
        self, batch: Batch
    ) -> tuple[list[bytes], Sequence[bytes | None] | None, Sequence[Mapping[str, bytes]] | None]:
        key, headers = self._key, self._headers
        return (
            [event.raw for event in batch.events],
            None if key is None else [key(event) for event in batch.events],
            None if headers is None else [headers(event) for event in batch.events],
        )

    def _count(self, batch: Batch) -> None:
        self.progress.batches += 1
        self.progress.events += len(batch)


def _check_batch_size(consumer: FeedConsumer, publisher: LiftbridgePublisher) -> None:
    """Better now than after a million events: batches as large as the consumer makes them have to fit into a message, with what comes on top."""
    batch, message = consumer.limits.max_batch_bytes, publisher.max_message_bytes
    if message is not None and batch > message * 3 // 4:
        raise ValueError(
            f"with format='batch' a batch has to fit into a message of {message} bytes, and the consumer makes batches of {batch}: "
            f"give it limits=Limits(max_batch_bytes={message // 2}) or use format='events'"
        )


def _stream(stream: Stream | str | None, store: StreamCursorStore | None) -> Stream:
    given = Stream(stream) if isinstance(stream, str) else stream
    if store is None:
        if given is None:
            raise ValueError("a relay needs to know its stream")
        return given
    if given is not None and given != store.stream:
        raise ValueError(
            f"the consumer keeps its cursors in the stream {store.stream.name}, so its events go there too, not to {given.name}"
        )
    return store.stream
