"""Matching acks to the messages that wait for them."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from feedapi_client.liftbridge.envelope import AckError
from feedapi_client.liftbridge.liftbridge_errors import (
    AckTimeoutError,
    EncryptionError,
    IncorrectOffsetError,
    MessageTooLargeError,
    NoStreamError,
    PublishError,
    PublishRefusedError,
)
from feedapi_client.liftbridge.messages_pb2 import Ack
from feedapi_client.liftbridge.stream_name import Stream

_UNHEARD = (
    "Is the stream missing (LiftbridgeApi.create_stream, or feedapi relay --create), attached to "
    "another subject, or has it fewer partitions? Or does its broker not run?"
)


@dataclass(slots=True)
class PublisherStats:
    """Counters since the publisher was opened.

    Attributes:
        published: messages sent.
        acked: messages that were acked; each is counted once.
        failed: messages that were refused, or had no ack before their deadline.
        unmatched: second acks, acks of other streams, and acks after the deadline.
        garbage: messages to the ack inbox that are no acks.
        reconnects: how often the connection to NATS was made again.
    """

    published: int = 0
    acked: int = 0
    failed: int = 0
    unmatched: int = 0
    garbage: int = 0
    reconnects: int = 0


class AckGroup:
    """The messages of one publish call: their acks, and the error of the earliest failed one.

    One future serves all messages, because a future for each costs more than sending it.
    """

    __slots__ = ("_done", "_failed", "_target", "acks", "error", "stream", "waiting")

    def __init__(self, target: Stream) -> None:
        self.stream = target.name
        self._target = target
        self.acks: list[Ack | None] = []
        self.error: PublishError | None = None
        self.waiting = 0
        self._failed = -1
        self._done: asyncio.Future[None] | None = None

    def publishes_to(self, subject: str) -> bool:
        """Whether messages of the call may go to the subject, which is in small letters."""
        own, partitions = self._target, range(self._target.partitions)
        return subject in (own.subject_of(number).lower() for number in partitions)

    def add_without_ack(self) -> None:
        """Count a message that asks for no ack."""
        self.acks.append(None)

    def refuse_next(self, error: PublishError) -> None:
        """Record that the next message is not sent."""
        self._fail(len(self.acks), error)

    def message_acked(self, index: int, ack: Ack) -> None:
        """Record the ack of a message."""
        self.acks[index] = ack
        self._message_done()

    def message_failed(self, index: int, error: PublishError) -> None:
        """Record that a message was refused, or that its ack will not come."""
        self._fail(index, error)
        self._message_done()

    async def wait(self) -> list[Ack | None]:
        """Wait for all messages that were sent. Raises the error of the earliest failed one."""
        if self.waiting:
            self._done = asyncio.get_running_loop().create_future()
            await self._done
        if self.error is not None:
            self.error.index = self._failed
            self.error.acks = self.acks[: self._failed]
            raise self.error
        return self.acks

    def _fail(self, index: int, error: PublishError) -> None:
        if self.error is None or index < self._failed:
            self.error, self._failed = error, index

    def _message_done(self) -> None:
        self.waiting -= 1
        if not self.waiting and self._done is not None and not self._done.done():
            self._done.set_result(None)


class AckTracker:
    """The messages in flight, by correlation id. One timer at the earliest deadline serves all.

    Arguments:
        limit: maximum number of messages in flight.
        stats: the counters to update.

    Attributes:
        silence: what a missing ack may be due to as long as none has come at all.
    """

    def __init__(self, limit: int, stats: PublisherStats) -> None:
        self._limit = limit
        self._stats = stats
        self.silence = ""
        self._entries: dict[str, tuple[AckGroup, int, float, str]] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, correlation_id: object) -> bool:
        return correlation_id in self._entries

    @property
    def room(self) -> int:
        """The number of messages that may be sent now."""
        return self._limit - len(self._entries)

    async def wait_for_room(self) -> None:
        """Wait until a message may be sent."""
        while self.room <= 0:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if not waiter.done():
                    self._waiters.remove(waiter)

    def add(self, correlation_id: str, group: AckGroup, deadline: float, subject: str = "") -> None:
        """Expect the ack of a message that is about to be sent, until `deadline` (loop time)."""
        acks = group.acks
        self._entries[correlation_id] = (group, len(acks), deadline, subject)
        acks.append(None)
        group.waiting += 1
        if deadline < self._timer_at:
            self._set_timer(deadline)

    def receive(self, ack: Ack) -> None:
        """Match an ack to its message. An ack that matches none is counted and ignored."""
        correlation_id = ack.correlationId
        entry = self._entries.pop(correlation_id, None)
        if entry is None:
            self._stats.unmatched += 1
            return
        group, index, _, _ = entry
        if group.stream != ack.stream:
            self._entries[correlation_id] = entry
            self._stats.unmatched += 1
            return
        if ack.ackError:
            self._stats.failed += 1
            group.message_failed(index, _error_of(ack))
        else:
            self._stats.acked += 1
            group.message_acked(index, ack)
        if self._waiters:
            self._wake_waiters()

    def refuse(self, correlation_id: str, kind: type[PublishError], text: str) -> None:
        """Fail one message, which the broker refused without an ack."""
        entry = self._entries.pop(correlation_id, None)
        if entry is None:
            self._stats.unmatched += 1
            return
        group, index, _, _ = entry
        self._stats.failed += 1
        group.message_failed(index, kind(text, stream=group.stream, correlation_id=correlation_id))
        if self._waiters:
            self._wake_waiters()

    def refuse_unheard(self, correlation_id: str) -> None:
        """Fail a message that nobody listened to, and those of its call with the same subject.

        The acks of its other messages may be on their way.
        """
        entry = self._entries.get(correlation_id)
        if entry is None:
            return
        group, _, _, subject = entry
        text = f"nobody listens on the subject {subject}, so the message was not stored. {_UNHEARD}"
        self.refuse(correlation_id, NoStreamError, text)
        beside = [
            key for key, each in self._entries.items() if each[0] is group and each[3] == subject
        ]
        self._fail(beside, f"sent beside a message that nobody listened to. {_UNHEARD}")

    def refuse_subject(self, subject: str, text: str) -> bool:
        """Fail the messages to a subject. None of them is sent again.

        Arguments:
            subject: in small letters.

        Returns:
            whether there were any.
        """
        refused = [key for key, each in self._entries.items() if each[3].lower() == subject]
        for key in refused:
            self.refuse(key, PublishError, text)
        return bool(refused)

    def discard(self, group: AckGroup) -> None:
        """Stop waiting for a group's acks. Those that come later count as unmatched."""
        if group.waiting:
            for correlation_id in [
                key for key, entry in self._entries.items() if entry[0] is group
            ]:
                del self._entries[correlation_id]
            self._wake_waiters()

    def expire(self, now: float) -> None:
        """Fail the messages whose deadline is not after `now` (loop time)."""
        late = [key for key, entry in self._entries.items() if entry[2] <= now]
        self._fail(
            late,
            "no ack before the deadline: the message may be stored or not. Does the broker of the "
            "stream run, and is the stream neither missing, paused nor read-only?"
            + ("" if self._stats.acked or self._stats.unmatched else self.silence),
        )

    def fail_all(self, reason: str) -> None:
        """Fail all messages, because no ack can come any more."""
        self._fail(
            list(self._entries), f"{reason} before the ack came: the message may be stored or not"
        )
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, math.inf

    def _fail(self, correlation_ids: Iterable[str], message: str) -> None:
        for correlation_id in correlation_ids:
            group, index, _, _ = self._entries.pop(correlation_id)
            self._stats.failed += 1
            group.message_failed(
                index, AckTimeoutError(message, stream=group.stream, correlation_id=correlation_id)
            )
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        # Waits until a quarter of the room is free: a full pipeline would switch tasks at each ack.
        if len(self._entries) > self._limit * 3 // 4:
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self.expire(asyncio.get_running_loop().time())
        if self._entries:
            self._set_timer(min(entry[2] for entry in self._entries.values()))

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer, self._timer_at = loop.call_at(deadline, self._on_timer), deadline


_ERRORS: dict[int, tuple[Callable[..., PublishError], str]] = {
    AckError.INCORRECT_OFFSET: (
        IncorrectOffsetError,
        (
            "the stream's next offset is not the expected one: "
            "another writer published to it, or an earlier message was lost"
        ),
    ),
    AckError.TOO_LARGE: (
        MessageTooLargeError,
        "the message is larger than the broker replicates",
    ),
    AckError.ENCRYPTION: (EncryptionError, "the broker failed to encrypt the message"),
}


def _error_of(ack: Ack) -> PublishError:
    kind, message = _ERRORS.get(
        ack.ackError,
        (PublishRefusedError, f"the broker refused the message (error {ack.ackError})"),
    )
    return kind(message, stream=ack.stream, correlation_id=ack.correlationId)
