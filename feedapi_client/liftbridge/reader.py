"""Reading a stream that a relay wrote exactly once: complete batches, each once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from feedapi_client.liftbridge.api import LiftbridgeApi
from feedapi_client.liftbridge.liftbridge_errors import StreamError, StreamGapError
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.liftbridge.stream_format import (
    CURSOR,
    FORMAT,
    PARTITION,
    Attempt,
    AttemptAssembler,
    MessageFormat,
    number_header,
    text_header,
)
from feedapi_client.liftbridge.subscription import Start, Until
from feedapi_client.model import Event, make_event
from feedapi_client.protocol.text import printable

# Messages that become readable together arrive together.
_SETTLES_AFTER = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class RelayedBatch:
    """A batch of the feed, as a relay wrote it.

    Attributes:
        partition: the partition of the feed.
        cursor: the feed's cursor after the batch.
        events: the events as the publisher of the feed sent them, without headers.
        keys: the keys of the events; empty where one message holds the whole batch.
        next_offset: where to start a reader that resumes after this batch. A start between two
            messages of a batch loses that batch.
    """

    partition: int
    cursor: str
    events: tuple[Event, ...]
    keys: tuple[bytes, ...]
    next_offset: int


class RelayReader:
    """Reads the batches of a stream's partition that a relay writes exactly once, in any format.

    Iterate over it, or over `batches`. A batch is returned when its last message was read, and the
    next message or a short pause (50 ms) shows that no broker takes it back. What belongs to no
    complete batch is left out: interrupted attempts, saved positions, messages of others.

    Arguments:
        start: an offset where a batch begins, such as `RelayedBatch.next_offset`, or a `Start`.
        until: where to end, inclusive, as in `LiftbridgeApi.subscribe`; None: follow the stream
            without end. After a restart of the broker its newest messages can't be read until a
            relay, or anybody else, publishes to the stream again.
        resume: wake the partition when the broker paused it.

    Raises:
        StreamGapError: messages are missing, because retention or compaction removed them; or the
            broker lost messages of batches that were returned, and the relay wrote their events
            again. Then undo each batch whose `next_offset` is above the error's `offset`, and start
            a reader at that offset.
        StreamReadonlyError: all was read of a partition that was made read-only.
        LiftbridgeError: the errors of `LiftbridgeApi.subscribe`.
    """

    def __init__(
        self,
        api: LiftbridgeApi,
        stream: str,
        *,
        partition: int = 0,
        start: Start = "earliest",
        until: Until | None = None,
        resume: bool = True,
    ) -> None:
        self._stream = stream
        self._first = start if isinstance(start, int) else None
        self._messages = partial(
            api.subscribe, stream, start, partition=partition, until=until, resume=resume
        )

    def __aiter__(self) -> AsyncIterator[RelayedBatch]:
        return self.batches()

    async def batches(self) -> AsyncGenerator[RelayedBatch, None]:
        """Return the batches from the start on."""
        attempts = AttemptAssembler()
        following, returned_to = self._first, 0
        async with aclosing(_with_pauses(self._messages(), attempts)) as messages:
            async for message in messages:
                attempt = attempts.settle() if message is None else attempts.feed(message)
                if attempt is not None and (batch := _batch_of(attempt, self._stream)) is not None:
                    returned_to = batch.next_offset
                    yield batch
                if message is None:
                    continue
                offset = message.offset
                if following is not None and offset > following:
                    raise StreamGapError(
                        f"the messages from offset {following} to {offset - 1} are missing: "
                        "retention or compaction removed them. A stream that a relay writes "
                        "exactly once must not be compacted",
                        stream=self._stream,
                        offset=following,
                    )
                following = offset + 1
                if offset < returned_to and not attempts.repeats(message):
                    raise StreamGapError(
                        f"the broker lost messages of batches that were read, from offset {offset} "
                        "on, whose events come again, perhaps in other batches: undo each batch "
                        "with a `next_offset` above that, and start a reader there",
                        stream=self._stream,
                        offset=offset,
                    )


async def _with_pauses(
    messages: AsyncGenerator[Message, None], attempts: AttemptAssembler
) -> AsyncGenerator[Message | None, None]:
    following: asyncio.Task[Message] | None = None
    try:
        while True:
            if attempts.holds_one or following is not None:
                following = following or asyncio.create_task(_next(messages))
                await asyncio.wait({following}, timeout=_SETTLES_AFTER)
                if not following.done():
                    yield None
                    await asyncio.wait({following})
                message, following = following.result(), None
            else:
                message = await _next(messages)
            yield message
    except StopAsyncIteration:
        yield None
    finally:
        if following is not None:
            following.cancel()
            await asyncio.wait({following})
        await messages.aclose()


async def _next(messages: AsyncGenerator[Message, None]) -> Message:
    return await anext(messages)


def _batch_of(attempt: Attempt, stream: str) -> RelayedBatch | None:
    """Return the batch of a complete attempt; None when it has none, or one of no partition."""
    first, last = attempt.messages[0], attempt.messages[-1]
    keys: tuple[bytes, ...] = ()
    if attempt.format == MessageFormat.BATCH:
        payloads = first.value.split(b"\n")
    elif attempt.format == MessageFormat.EVENTS:
        # Behind them there may be positions that did not fit into the last one.
        rows = [
            message
            for message in attempt.messages
            if text_header(message, FORMAT) == MessageFormat.EVENTS
        ]
        payloads = [message.value for message in rows]
        keys = tuple(message.key for message in rows)
    elif attempt.format == MessageFormat.POSITIONS:
        return None
    else:
        raise StreamError(
            f"a newer version of feedapi-client wrote the batch at offset {first.offset}, in the "
            f"format '{printable(attempt.format, 50)}': update feedapi-client here",
            stream=stream,
        )
    partition = number_header(first, PARTITION)
    if partition is None:  # no relay wrote it
        return None
    return RelayedBatch(
        partition=partition,
        cursor=text_header(first, CURSOR),
        events=tuple(make_event(partition, payload) for payload in payloads),
        keys=keys,
        next_offset=last.offset + 1,
    )
