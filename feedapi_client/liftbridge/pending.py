"""Book-keeping of what waits for an ack."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from feedapi_client.liftbridge.envelope import AckError
from feedapi_client.liftbridge.errors import (
    AckTimeoutError,
    EncryptionError,
    IncorrectOffsetError,
    MessageTooLargeError,
    PublishError,
    PublishRefusedError,
)
from feedapi_client.liftbridge.messages_pb2 import Ack


@dataclass(slots=True)
class PublisherStats:
    """Counters since the publisher was opened. An ack is counted once: `unmatched` are second acks, acks of other streams and acks that came too late."""

    published: int = 0
    acked: int = 0
    failed: int = 0
    unmatched: int = 0
    garbage: int = 0
    reconnects: int = 0


class Group:
    """The messages of one call: their acks, the error of the earliest one that failed, and one future for all of them."""

    __slots__ = ("_done", "_failed", "acks", "error", "stream", "waiting")

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.acks: list[Ack | None] = []
        self.error: PublishError | None = None
        self.waiting = 0
        self._failed = -1
        self._done: asyncio.Future[None] | None = None

    def refuse(self, error: PublishError) -> None:
        """The next message is not even sent."""
        self.fail(len(self.acks), error)

    def fail(self, index: int, error: PublishError) -> None:
        """A message was not stored, or will never be acked."""
        if self.error is None or index < self._failed:
            self.error, self._failed = error, index

    def settled(self) -> None:
        """Nothing is waited for any more."""
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def result(self) -> list[Ack | None]:
        """Wait for all that was sent. Raises the error of the earliest failed message."""
        if self.waiting:
            self._done = asyncio.get_running_loop().create_future()
            await self._done
        if self.error is not None:
            self.error.index = self._failed
            raise self.error
        return self.acks


class Pending:
    """What waits for an ack, by correlation id. One timer, set to the earliest deadline, serves all of them."""

    def __init__(self, limit: int, stats: PublisherStats) -> None:
        self._limit = limit
        self._stats = stats
        self._entries: dict[str, tuple[Group, int, float]] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def room(self) -> int:
        """How many more messages may be sent now."""
        return self._limit - len(self._entries)

    async def wait_for_room(self) -> None:
        """Wait until something may be sent."""
        while self.room <= 0:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if not waiter.done():
                    self._waiters.remove(waiter)

    def add(self, correlation_id: str, group: Group, deadline: float) -> None:
        """A message is about to be sent."""
        acks = group.acks
        self._entries[correlation_id] = (group, len(acks), deadline)
        acks.append(None)
        group.waiting += 1
        if deadline < self._timer_at:
            self._set_timer(deadline)

    def settle(self, ack: Ack) -> None:
        """An ack came, for whatever message."""
        correlation_id = ack.correlationId
        entry = self._entries.pop(correlation_id, None)
        if entry is None:
            self._stats.unmatched += 1
            return
        group, index, _ = entry
        if group.stream != ack.stream:
            self._entries[correlation_id] = entry
            self._stats.unmatched += 1
            return
        if ack.ackError:
            self._stats.failed += 1
            group.fail(index, _refusal(ack))
        else:
            self._stats.acked += 1
            group.acks[index] = ack
        group.waiting -= 1
        if not group.waiting:
            group.settled()
        if self._waiters:
            self._wake()

    def forget(self, group: Group) -> None:
        """Nobody waits for the group any more: its acks, should they come, are unmatched."""
        if group.waiting:
            for correlation_id in [
                key for key, entry in self._entries.items() if entry[0] is group
            ]:
                del self._entries[correlation_id]
            self._wake()

    def fail_all(self, message: str) -> None:
        """No ack will come any more."""
        self._fail(list(self._entries), message)
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, math.inf

    def _fail(self, correlation_ids: Iterable[str], message: str) -> None:
        for correlation_id in correlation_ids:
            group, index, _ = self._entries.pop(correlation_id)
            self._stats.failed += 1
            group.fail(
                index, AckTimeoutError(message, stream=group.stream, correlation_id=correlation_id)
            )
            group.waiting -= 1
            if not group.waiting:
                group.settled()
        self._wake()

    def _wake(self) -> None:
        # A quarter of the room has to be free, so that a full pipeline does not switch tasks at every ack.
        if len(self._entries) > self._limit * 3 // 4:
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        self._timer, self._timer_at = None, math.inf
        late = [key for key, entry in self._entries.items() if entry[2] <= now]
        self._fail(late, "no ack before the deadline: the message may be stored or not")
        if self._entries:
            self._set_timer(min(entry[2] for entry in self._entries.values()))

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = (
            asyncio.get_running_loop().call_at(deadline, self._sweep),
            deadline,
        )


_REFUSALS: dict[int, tuple[Callable[..., PublishError], str]] = {
    AckError.INCORRECT_OFFSET: (
        IncorrectOffsetError,
        "the stream's next offset is not the expected one: another writer was there, or a message before this was lost",
    ),
    AckError.TOO_LARGE: (
        MessageTooLargeError,
        "the broker finds the message too large to replicate",
    ),
    AckError.ENCRYPTION: (EncryptionError, "the broker failed to encrypt the message"),
}


def _refusal(ack: Ack) -> PublishError:
    kind, message = _REFUSALS.get(
        ack.ackError,
        (PublishRefusedError, f"the broker refused the message (error {ack.ackError})"),
    )
    return kind(message, stream=ack.stream, correlation_id=ack.correlationId)
