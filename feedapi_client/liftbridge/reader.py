"""Reading back what a relay wrote exactly once: complete batches, each once, in order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from feedapi_client.liftbridge.api import LiftbridgeApi, Start
from feedapi_client.liftbridge.attempts import (
    CURSOR,
    PARTITION,
    Attempt,
    AttemptAssembler,
    Format,
    header,
)
from feedapi_client.liftbridge.messages_pb2 import Message

QUERY = "feedapi-query"
"""The id of the Spark query that wrote a message, with the headers `BATCH` and `ROW`."""
BATCH = "feedapi-batch"
ROW = "feedapi-row"


@dataclass(frozen=True, slots=True)
class RelayedBatch:
    """A batch of the feed, as a relay wrote it.

    `partition` and `cursor` are the feed's, `events` the payloads exactly as the publisher of the feed sent them, `keys` the events' keys (empty where a
    message holds the whole batch). To resume a reader behind this batch, start it at `next_offset`, never in between.
    """

    partition: int
    cursor: str
    events: tuple[bytes, ...]
    keys: tuple[bytes, ...]
    next_offset: int


class RelayReader:
    """The batches in one partition of a stream that a relay writes exactly once, in either format. Iterate over it, or over `batches`.

    What belongs to no complete batch is left out: attempts that a crash cut off, messages that save positions only, messages of others. A batch appears
    when its last message is there. `start` is an offset where a batch begins, such as `RelayedBatch.next_offset`; `until` ends the reading behind that
    offset, otherwise it goes on with what comes. Errors are those of `LiftbridgeApi.subscribe`.
    """

    def __init__(
        self,
        api: LiftbridgeApi,
        stream: str,
        *,
        partition: int = 0,
        start: Start = "earliest",
        until: int | None = None,
    ) -> None:
        self._api = api
        self._stream = stream
        self._partition = partition
        self._start = start
        self._until = until

    def __aiter__(self) -> AsyncIterator[RelayedBatch]:
        return self.batches()

    async def batches(self) -> AsyncGenerator[RelayedBatch, None]:
        """The batches, from the start."""
        assembler = AttemptAssembler()
        async with aclosing(
            self._api.subscribe(
                self._stream, self._start, partition=self._partition, until=self._until
            )
        ) as messages:
            async for message in messages:
                attempt = assembler.feed(message)
                if attempt is not None and (batch := batch_of(attempt)) is not None:
                    yield batch


def batch_of(attempt: Attempt) -> RelayedBatch | None:
    """The batch that a complete attempt holds; None when it only saves positions."""
    first, last = attempt.messages[0], attempt.messages[-1]
    keys: tuple[bytes, ...] = ()
    if attempt.format == Format.BATCH:
        events = tuple(first.value.split(b"\n"))
    elif attempt.format == Format.EVENTS:
        events = tuple(message.value for message in attempt.messages)
        keys = tuple(message.key for message in attempt.messages)
    else:
        return None
    return RelayedBatch(
        int(header(first, PARTITION)), header(first, CURSOR), events, keys, last.offset + 1
    )


class RowId(NamedTuple):
    """Which row of a Spark query a message holds. A row that was written again has the same one."""

    query: str
    batch: int
    row: int


def row_id(message: Message) -> RowId | None:
    """The row that the Spark sink wrote as this message; None for any other message."""
    query, batch, row = header(message, QUERY), header(message, BATCH), header(message, ROW)
    return (
        RowId(query, int(batch), int(row))
        if query and batch.isdecimal() and row.isdecimal()
        else None
    )
