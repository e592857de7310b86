"""Publishing a feed to Liftbridge, at least once or exactly once."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from feedapi_client.consumer import FeedConsumer
from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.at_least_once import AcknowledgedPublishing
from feedapi_client.liftbridge.envelope import AckPolicy
from feedapi_client.liftbridge.liftbridge_errors import (
    LiftbridgeError,
    MessageTooLargeError,
    RelayFencedError,
    StreamError,
)
from feedapi_client.liftbridge.message_publisher import LiftbridgePublisher
from feedapi_client.liftbridge.stream_format import (
    CURSOR,
    PARTITION,
    MessageFormat,
    OutgoingBatch,
    message_bytes,
)
from feedapi_client.liftbridge.stream_model import Stream, check_publishable
from feedapi_client.liftbridge.stream_store import StreamCursorStore
from feedapi_client.model import Batch, Event
from feedapi_client.notifications import EventQuarantined
from feedapi_client.protocol.text import printable
from feedapi_client.quarantine.quarantine_store import QuarantineStore, quarantine_beside
from feedapi_client.quarantine.record import quarantined
from feedapi_client.runtime.loop import beside

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0
"""How often a relay looks at the end of its stream."""

Key = Callable[[Event], bytes | None]
Headers = Callable[[Event], Mapping[str, bytes]]
OnOversized = Literal["raise", "skip", "quarantine"] | QuarantineStore
"""What a relay does with an event that is too large for a message."""


@dataclass(slots=True)
class RelayProgress:
    """What a relay has done since it was created.

    Attributes:
        batches: batches whose events are all acked.
        events: the events of these batches that were published.
        retries: how often events had to be published again.
        put_aside: events that were too large, and were skipped or quarantined.
        recovered: messages that were published again, because the broker lost some after its ack.
    """

    batches: int = 0
    events: int = 0
    retries: int = 0
    put_aside: int = 0
    recovered: int = 0


class Relay:
    """Publishes every event of a feed as a message, in order within a feed partition.

    The value of a message is the event's payload exactly as sent. Its headers hold the feed's
    partition (``feedapi-partition``) and the cursor that resumes after its batch
    (``feedapi-cursor``). In a stream with several partitions the key chooses the partition; without
    keys the feed's partition chooses it.

    When the consumer's store is a `StreamCursorStore`, the relay is exactly once. A relay that
    starts goes on at the end of the stream, and the broker refuses what a second one writes. Format
    ``"batch"`` has no keys and no additional headers, and a batch of the consumer has to fit into a
    message (`Limits.max_batch_bytes`).

    With any other store it is at least once. A cursor is committed when all events up to it are
    acked. A batch whose acks do not all come is published again from the first message that has
    none. Where the broker lost messages after it had acked them, those of the last 30 seconds are
    published again.

    A broker that is away is waited for as long as a feed that is away: for
    `RetryPolicy.give_up_after` of the consumer.

    Arguments:
        consumer: the open consumer of the feed.
        publisher: an open publisher.
        stream: the stream to publish to; with a `StreamCursorStore` it is that of the store.
        key: makes the key of an event's message.
        headers: makes additional headers of an event's message.
        ack_policy: when the broker acks, at least once. With ``LEADER`` events are lost when a
            leader dies that acked them before its replicas had them. Exactly once it is ``ALL``.
        on_oversized: what becomes of an event that is too large for a message: "raise" ends the
            relay with the event's place, "skip" and "quarantine" go on without it and log a
            warning. "quarantine" is the quarantine beside the consumer's cursors; exactly once it
            has to be a `QuarantineStore`.
        api: an open connection to the broker's gRPC API. With it a relay that is at least once
            looks at the stream before the first message, before each retry, and every few seconds:
            it wakes paused partitions, notices messages that the broker lost, and a stream that is
            missing, read-only, or has another number of partitions is an error at once. A
            `StreamCursorStore` has its own.

    Raises:
        ValueError: the arguments do not fit together.
    """

    def __init__(
        self,
        consumer: FeedConsumer,
        publisher: LiftbridgePublisher,
        stream: Stream | str | None = None,
        *,
        key: Key | None = None,
        headers: Headers | None = None,
        ack_policy: AckPolicy = AckPolicy.ALL,
        on_oversized: OnOversized = "raise",
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
        if isinstance(on_oversized, str) and on_oversized not in ("raise", "skip", "quarantine"):
            raise ValueError(
                "on_oversized is 'raise', 'skip', 'quarantine' or a QuarantineStore, "
                f"not {on_oversized!r}"
            )
        self._skips = on_oversized == "skip"
        self._quarantine: QuarantineStore | None = None
        if on_oversized == "quarantine":
            self._quarantine = quarantine_beside(consumer.store)
        elif not isinstance(on_oversized, str):
            self._quarantine = on_oversized
        # The bytes of the smallest message that the broker found too large.
        self._refused = math.inf
        # What the look at the stream's end found out that ends the relay.
        self._ended: LiftbridgeError | None = None
        self.progress = RelayProgress()
        self._publishing = AcknowledgedPublishing(
            publisher,
            self._stream,
            ack_policy=ack_policy,
            give_up_after=consumer.retry.give_up_after,
            api=api,
            on_retry=self._on_retry,
            on_recovered=self._on_recovered,
        )
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
        if self._quarantine is not None:
            await self._quarantine.prepare()
        if self._store is None:
            await self._publishing.check_stream()
            look: Callable[[], Awaitable[object]] = self._publishing.look_for_losses
            handle = self._relay_at_least_once
        else:
            look, handle = self._store.keep, self._relay_exactly_once
        await beside(partial(self._repeatedly, look), self._consumer.run(handle))
        if self._ended is not None:
            raise self._ended
        return self.progress

    async def _repeatedly(self, look: Callable[[], Awaitable[object]]) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await look()
            except (RelayFencedError, StreamError) as error:
                # An idle relay would not meet it for a long time.
                self._ended = error
                return self._consumer.stop()
            except LiftbridgeError as error:
                # The next batch, or the next turn, meets the same.
                logger.warning("the end of the stream could not be looked after: %s", error)

    async def _relay_at_least_once(self, batch: Batch) -> None:
        shared = {PARTITION: str(batch.partition).encode(), CURSOR: batch.cursor.encode()}
        outgoing = await self._without_oversized(batch, self._outgoing(batch))
        published = 0
        while outgoing.values:
            try:
                await self._publishing.publish(outgoing, shared, by_key=self._key is not None)
                published += len(outgoing.values)
                break
            except MessageTooLargeError as error:
                self._refused = min(self._refused, outgoing.message_bytes(error.index))
                published += error.index
                rest = outgoing.starting_at(error.index)
                outgoing = await self._without_oversized(batch, rest, error)
        await batch.commit()
        self._count(published)

    async def _relay_exactly_once(self, batch: Batch) -> None:
        outgoing = await self._without_oversized(batch, self._outgoing(batch))
        while True:
            try:
                await batch.commit(transaction=outgoing)
                break
            except MessageTooLargeError as error:
                # The broker takes less than was known.
                refused = await self._smallest_refused(outgoing, error)
                if refused == math.inf:
                    raise self._batch_too_large(batch, error) from None
                self._refused = min(self._refused, refused)
                outgoing = await self._without_oversized(batch, outgoing, error)
        self._count(len(outgoing.values))

    async def _smallest_refused(
        self, outgoing: OutgoingBatch, error: MessageTooLargeError
    ) -> float:
        """Return the bytes of an event of a refused batch that is too large; inf when each fits."""
        assert self._store is not None
        count, refused = len(outgoing.values), math.inf
        if count == 1 or self._store.format is MessageFormat.EVENTS:
            return outgoing.message_bytes(error.index) if error.index < count else refused
        # All are in one message: ask for each size, the largest first.
        sizes = sorted({outgoing.message_bytes(index) for index in range(count)})
        while sizes and not await self._store.takes(sizes[-1]):
            refused = sizes.pop()
        return refused

    def _outgoing(self, batch: Batch) -> OutgoingBatch:
        key, headers = self._key, self._headers
        return OutgoingBatch(
            batch.partition,
            batch.cursor,
            [event.raw for event in batch.events],
            () if key is None else [key(event) for event in batch.events],
            () if headers is None else [headers(event) for event in batch.events],
        )

    async def _without_oversized(
        self, batch: Batch, outgoing: OutgoingBatch, error: MessageTooLargeError | None = None
    ) -> OutgoingBatch:
        """Put the events aside that are too large, or raise `MessageTooLargeError`.

        `error` is that of the broker; without it nothing of the batch was sent.
        """
        limit = self._publisher.message_limit
        room = min(limit - len(CURSOR) - len(batch.cursor), self._refused - 1)
        if not outgoing.headers and _longest(outgoing) <= room:
            return outgoing
        indices = range(len(outgoing.values))
        too_large = [index for index in indices if outgoing.message_bytes(index) > room]
        if too_large:
            cause = error or MessageTooLargeError(
                f"over the limit of {room:,} bytes for a message; nothing was sent",
                stream=self._stream.name,
                correlation_id="none",
            )
            await self._put_aside(batch, outgoing, too_large, cause)
            outgoing = outgoing.without(too_large)
        return outgoing

    async def _put_aside(
        self,
        batch: Batch,
        outgoing: OutgoingBatch,
        indices: list[int],
        error: MessageTooLargeError,
    ) -> None:
        places = [outgoing.place(index) for index in indices]
        if self._quarantine is None and not self._skips:
            raise self._stop(batch, places[0], error)
        if self._quarantine is not None:
            key, cursor = self._consumer.key, batch.cursor
            await self._quarantine.add(
                [quarantined(key, batch.events[place], cursor, place, error) for place in places]
            )
        feed = self._consumer.feed
        for place in places:
            logger.warning(
                "feed %s, partition %d: %s is %s: it is too large for a message",
                feed,
                batch.partition,
                _place(batch, place),
                "skipped" if self._quarantine is None else "quarantined",
                extra={"feed": feed, "partition": batch.partition},
            )
            if self._quarantine is not None:
                told = EventQuarantined(batch.partition, type(error).__qualname__)
                self._consumer._listeners.tell(told, error)
        self.progress.put_aside += len(places)

    def _stop(self, batch: Batch, place: int, error: MessageTooLargeError) -> MessageTooLargeError:
        stopped = MessageTooLargeError(
            f"feed {self._consumer.feed}, partition {batch.partition}: {_place(batch, place)} is "
            "too large for a message. Raise the limits of the broker "
            "(clustering.replication.max.bytes), of NATS (max_payload) and of the publisher "
            "(max_message_bytes=, --max-message-bytes), or let the relay skip or quarantine such "
            "events: on_oversized= (--oversized)",
            stream=error.stream,
            correlation_id=error.correlation_id,
        )
        stopped.index = place
        return stopped

    def _batch_too_large(self, batch: Batch, error: MessageTooLargeError) -> MessageTooLargeError:
        return MessageTooLargeError(
            f"the batch of partition {batch.partition} up to cursor "
            f"'{printable(batch.cursor, 200)}' has {len(batch)} events, and all together do not "
            "fit into one message. Lower Limits.max_batch_bytes of the consumer, or "
            "--max-batch-bytes; where the publisher's checkpoints are too far apart for that, use "
            "format='events'",
            stream=error.stream,
            correlation_id=error.correlation_id,
        )

    def _on_retry(self, error: Exception, attempt: int, pause: float) -> None:
        self.progress.retries += 1
        logger.warning(
            "publishing again in %.1f s: %s",
            pause,
            error,
            extra={"stream": self._stream.name, "attempt": attempt, "pause": pause},
        )

    def _on_recovered(self, messages: int) -> None:
        self.progress.recovered += messages

    def _count(self, events: int) -> None:
        self.progress.batches += 1
        self.progress.events += events


def _place(batch: Batch, place: int) -> str:
    size = len(batch.events[place].raw)
    cursor = printable(batch.cursor, 200)
    return f"event number {place} of those up to cursor '{cursor}' ({size:,} bytes)"


def _longest(outgoing: OutgoingBatch) -> int:
    value = max(outgoing.values, key=len, default=b"")
    key = max((key or b"" for key in outgoing.keys), key=len, default=b"")
    return message_bytes(value, key)


def _check_batch_size(consumer: FeedConsumer, publisher: LiftbridgePublisher) -> None:
    """Raise ValueError when a batch of the consumer may not fit into a message."""
    batch, message = consumer.limits.max_batch_bytes, publisher.message_limit
    # Without a known limit the broker decides.
    if publisher.max_message_bytes is not None and batch > message * 3 // 4:
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
        check_publishable(given.subject)
        return given
    if given is not None and given != store.stream:
        raise ValueError(
            f"the consumer keeps its cursors in the stream {store.stream.name}, so its events go "
            f"there too, not to {given.name}"
        )
    return store.stream
