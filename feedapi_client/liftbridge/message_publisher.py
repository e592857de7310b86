"""Publishing to Liftbridge over NATS: pipelined, and every message is acked or reported."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from feedapi_client.liftbridge.envelope import (
    AckError,
    AckPolicy,
    BytesLike,
    MessageEncoder,
    check_headers,
    decode_ack,
)
from feedapi_client.liftbridge.fast_path import install_fast_path
from feedapi_client.liftbridge.liftbridge_errors import (
    AckTimeoutError,
    EncryptionError,
    EnvelopeError,
    IncorrectOffsetError,
    LiftbridgeError,
    MessageTooLargeError,
    NoStreamError,
    PublishError,
    PublishRefusedError,
    require_asyncio,
)
from feedapi_client.liftbridge.messages_pb2 import Ack, Message
from feedapi_client.liftbridge.messages_pb2 import AckPolicy as WireAckPolicy
from feedapi_client.liftbridge.nats_connection import (
    MessageWriter,
    cause,
    check_inbox,
    connect,
    denial,
    flush,
    unavailable,
    wait_until_connected,
)
from feedapi_client.liftbridge.stream_model import (
    ANY_OFFSET,
    REPLICATION_LIMIT,
    Stream,
    check_publishable,
)
from feedapi_client.retry import Backoff, OnRetry, retry

logger = logging.getLogger(__name__)

_NOBODY = "503"
_ASK_AGAIN = 5.0
"""Seconds after which a message asks again whether anybody listens on its subject."""
_UNHEARD = (
    "Is the stream missing (LiftbridgeApi.create_stream, or feedapi relay --create), attached to "
    "another subject, or has it fewer partitions? Or does its broker not run?"
)
_RETRY_BASE_DELAY = 0.2
_RETRY_MAX_DELAY = 10.0
_RETRIED = (AckTimeoutError, NoStreamError, PublishRefusedError)
_REFUSED: dict[int, tuple[type[PublishError], str]] = {
    AckError.INCORRECT_OFFSET: (
        IncorrectOffsetError,
        (
            "the stream's next offset is not the expected one: another writer published to it, or "
            "an earlier message was lost"
        ),
    ),
    AckError.TOO_LARGE: (MessageTooLargeError, "the message is larger than the broker replicates"),
    AckError.ENCRYPTION: (EncryptionError, "the broker failed to encrypt the message"),
}


@dataclass(slots=True)
class PublisherStats:
    """Counters since the publisher was opened.

    Attributes:
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


class _Call:
    """The messages of one publish call: their acks, and the error of the earliest failed one.

    One future serves all messages, because a future for each costs more than sending it.
    """

    __slots__ = ("acks", "done", "error", "stream", "waiting")

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.acks: list[Ack | None] = []
        self.error: PublishError | None = None
        self.waiting = 0
        self.done: asyncio.Future[None] | None = None

    def fail(self, index: int, error: PublishError) -> None:
        if self.error is None or index < self.error.index:
            self.error, error.index = error, index

    def settle(self, index: int, result: Ack | PublishError) -> None:
        if isinstance(result, PublishError):
            self.fail(index, result)
        else:
            self.acks[index] = result
        self.waiting -= 1
        if not self.waiting and self.done is not None and not self.done.done():
            self.done.set_result(None)

    async def wait(self) -> list[Ack | None]:
        if self.waiting:
            self.done = asyncio.get_running_loop().create_future()
            await self.done
        if self.error is not None:
            self.error.acks = self.acks[: self.error.index]
            raise self.error
        return self.acks


class _InFlight:
    """The messages in flight, by correlation id. One timer at the earliest deadline serves all."""

    def __init__(self, limit: int, stats: PublisherStats, advice: Callable[[], str]) -> None:
        self._limit = limit
        self._stats = stats
        self._advice = advice
        # The call, the message's index in it, its deadline (loop time), and its subject.
        self._entries: dict[str, tuple[_Call, int, float, str]] = {}
        # Is there while somebody waits for room.
        self._has_room: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, correlation_id: object) -> bool:
        return correlation_id in self._entries

    @property
    def room(self) -> int:
        return self._limit - len(self._entries)

    async def wait_for_room(self) -> None:
        while self.room <= 0:
            self._has_room = self._has_room or asyncio.Event()
            await self._has_room.wait()

    def add(self, correlation_id: str, call: _Call, deadline: float, subject: str) -> None:
        acks = call.acks
        self._entries[correlation_id] = (call, len(acks), deadline, subject)
        acks.append(None)
        call.waiting += 1
        if self._timer is None or deadline < self._timer.when():
            self._set_timer(deadline)

    def receive(self, ack: Ack) -> None:
        """Match an ack to its message. Several streams on one subject each send one."""
        correlation_id = ack.correlationId
        entry = self._entries.get(correlation_id)
        if entry is None or entry[0].stream != ack.stream:
            self._stats.unmatched += 1
            return
        if ack.ackError:
            unknown = (PublishRefusedError, f"the broker refused the message ({ack.ackError})")
            kind, text = _REFUSED.get(ack.ackError, unknown)
            self._fail([correlation_id], text, kind)
            return
        del self._entries[correlation_id]
        self._stats.acked += 1
        entry[0].settle(entry[1], ack)
        if self._has_room is not None:
            self._make_room()

    def nobody_listens(self, correlation_id: str) -> None:
        """Fail a message, and those of its call to the same subject; other acks may still come."""
        if (entry := self._entries.get(correlation_id)) is None:
            self._stats.unmatched += 1
            return
        call, _, _, subject = entry
        text = f"nobody listens on the subject {subject}, so the message was not stored. {_UNHEARD}"
        self._fail([correlation_id], text, NoStreamError)
        beside = [
            key for key, each in self._entries.items() if each[0] is call and each[3] == subject
        ]
        self._fail(beside, f"sent beside a message that nobody listened to. {_UNHEARD}")

    def discard(self, call: _Call) -> None:
        for key in [key for key, entry in self._entries.items() if entry[0] is call]:
            del self._entries[key]
        self._make_room()

    def expire(self, now: float) -> None:
        late = [key for key, entry in self._entries.items() if entry[2] <= now]
        self._fail(
            late,
            "no ack before the deadline: the message may be stored or not. Does the broker of the "
            "stream run, and is the stream neither missing, paused nor read-only?"
            + (self._advice() if late else ""),
        )

    def fail_all(self, reason: str) -> None:
        text = f"{reason} before the ack came: the message may be stored or not"
        self._fail(list(self._entries), text)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fail(
        self, ids: Iterable[str], text: str, kind: type[PublishError] = AckTimeoutError
    ) -> None:
        for correlation_id in ids:
            call, index, _, _ = self._entries.pop(correlation_id)
            self._stats.failed += 1
            call.settle(index, kind(text, stream=call.stream, correlation_id=correlation_id))
        self._make_room()

    def _make_room(self) -> None:
        # When a quarter of the room is free: a full pipeline would switch tasks at each ack.
        if self._has_room is not None and len(self._entries) <= self._limit * 3 // 4:
            self._has_room.set()
            self._has_room = None

    def _on_timer(self) -> None:
        self._timer = None
        self.expire(asyncio.get_running_loop().time())
        if self._entries:
            self._set_timer(min(entry[2] for entry in self._entries.values()))

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(deadline, self._on_timer)


class LiftbridgePublisher:
    """Publishes messages in envelopes and waits for their acks. Use it in `async with`.

    Arguments:
        servers: NATS URLs.
        max_in_flight: maximum number of messages that wait for their ack.
        ack_timeout: seconds from sending a message to its deadline.
        ack_policy: when the broker acks.
        max_message_bytes: the largest message that the broker stores; None when it is unknown. A
            larger one, or one over NATS's own limit, is refused before it is sent.
        connect_timeout: seconds for the first connection.
        options: further arguments of ``nats.connect``, such as credentials and TLS.

    Attributes:
        stats: what was sent and acked.

    Concurrency: methods may be called from several tasks. Needs asyncio, because nats-py does.

    NATS reconnects by itself. A message that was sent before and is never acked ends with an
    `AckTimeoutError`; a message that is published meanwhile waits for the connection.
    """

    def __init__(
        self,
        servers: str | Sequence[str] = "nats://127.0.0.1:4222",
        *,
        max_in_flight: int = 8192,
        ack_timeout: float = 10.0,
        ack_policy: AckPolicy = AckPolicy.LEADER,
        max_message_bytes: int | None = REPLICATION_LIMIT,
        connect_timeout: float = 10.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if max_in_flight < 1 or ack_timeout <= 0:
            raise ValueError("max_in_flight and ack_timeout must be positive")
        self.stats = PublisherStats()
        self.ack_timeout = ack_timeout
        self.ack_policy = ack_policy
        self.max_message_bytes = max_message_bytes
        self._acks = _InFlight(max_in_flight, self.stats, self._advice)
        self._ids = itertools.count(1)
        self._servers = servers
        self._connect_timeout = connect_timeout
        self._options = dict(options or {})
        self._nats: Client | None = None
        self._inbox = ""
        self._new_writer: Callable[[Client], MessageWriter] = MessageWriter
        # Until when the answer counts that somebody listens on a subject.
        self._asked: dict[str, float] = {}

    async def __aenter__(self) -> LiftbridgePublisher:
        require_asyncio()
        self._nats = client = await connect(
            self._servers,
            timeout=self._connect_timeout,
            options=self._options,
            on_reconnect=self._on_reconnect,
            on_closed=self._on_closed,
        )
        try:
            self._inbox = client.new_inbox()
            acks = await client.subscribe(self._inbox, cb=self._on_message)
            self._new_writer = install_fast_path(client, acks, self._on_acks) or MessageWriter
            # NATS itself replies where nobody listens on a subject.
            await client.subscribe(f"{self._inbox}.*", cb=self._on_reply)
            await flush(client)
            check_inbox(client, self._inbox)
        except nats.errors.Error as error:
            await self.__aexit__()
            raise unavailable(error, client) from error
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._acks.fail_all("the publisher was closed")
        client, self._nats = self._nats, None
        if client is not None and not client.is_closed:
            try:
                await client.close()
            except (nats.errors.Error, OSError) as error:
                # An error of the application matters more.
                logger.info("NATS: %s while the publisher was closed", type(error).__name__)

    @property
    def in_flight(self) -> int:
        """The number of messages that wait for their ack."""
        return len(self._acks)

    @property
    def message_limit(self) -> int:
        """The bytes of the largest message that can be stored, as far as is known."""
        known = [self.max_message_bytes, None if self._nats is None else self._nats.max_payload]
        return min((limit for limit in known if limit), default=REPLICATION_LIMIT)

    async def publish(
        self,
        stream: Stream | str,
        value: BytesLike,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Mapping[str, bytes] | None = None,
        ack_policy: AckPolicy | None = None,
        expected_offset: int = ANY_OFFSET,
    ) -> Ack | None:
        """Publish one message and return its ack, or None with `AckPolicy.NONE`.

        Arguments:
            partition: by default the one of the key.
            expected_offset: the offset that the message must get, on a stream with optimistic
                concurrency control.

        Raises:
            PublishError: one of its subclasses.
            BrokerUnavailableError: the connection to NATS is closed.
            ValueError: a header is named ``subject`` or ``reply``, which the broker overwrites; or
                the subject or the partition is not valid.
            TypeError: the value is not bytes, a bytearray or a memoryview.

        Cancellation: the message may be stored or not.
        """
        acks = await self.publish_many(
            stream,
            [value],
            keys=[key],
            partition=partition,
            headers=headers,
            ack_policy=ack_policy,
            expected_offset=expected_offset,
        )
        return acks[0]

    async def publish_many(
        self,
        stream: Stream | str,
        values: Sequence[BytesLike],
        *,
        keys: Sequence[bytes | None] | None = None,
        partition: int | None = None,
        headers: Mapping[str, bytes] | None = None,
        headers_each: Sequence[Mapping[str, bytes]] | None = None,
        ack_policy: AckPolicy | None = None,
        expected_offset: int = ANY_OFFSET,
    ) -> list[Ack | None]:
        """Publish messages in order and return their acks in the same order.

        A message does not wait for the ack of the one before. After the first error nothing
        further is sent; the acks of what was sent are awaited before the error is raised.

        Arguments:
            headers, headers_each: headers of all messages, and additional ones of each.
            expected_offset: that of the first message; it counts up.

        Raises:
            PublishError: as `publish`, for the earliest failed message. `index` is its position.
            ValueError, TypeError: as `publish`; or there are not as many of each.
        """
        target = Stream(stream) if isinstance(stream, str) else stream
        check_headers(headers)
        count = len(values)
        if any(len(each) != count for each in (keys, headers_each) if each is not None):
            raise ValueError("publish_many takes as many keys and headers_each as values")
        rows = zip(
            values,
            repeat(None, count) if keys is None else keys,
            repeat(None, count) if headers_each is None else headers_each,
            strict=True,
        )
        call = _Call(target.name)
        policy = self.ack_policy if ack_policy is None else ack_policy
        shared = Message(
            headers=headers,
            ackInbox="" if policy is AckPolicy.NONE else self._inbox,
            ackPolicy=WireAckPolicy.Name(int(policy)),
        )
        encode = MessageEncoder(shared, expected_offset)
        subject_of = _subject_of(target, partition)
        try:
            await self._send(call, rows, encode, subject_of, policy is not AckPolicy.NONE)
            return await call.wait()
        except BaseException:
            if call.waiting:
                self._acks.discard(call)
            raise

    async def _send(
        self,
        call: _Call,
        rows: Iterable[tuple[BytesLike, bytes | None, Mapping[str, bytes] | None]],
        encode: MessageEncoder,
        subject_of: Callable[[bytes | None], str],
        acked: bool,
    ) -> None:
        client, acks, now = self._client(), self._acks, asyncio.get_running_loop().time
        limit = min(self.max_message_bytes or client.max_payload, client.max_payload)
        writer = self._new_writer(client)
        room, deadline = 0, 0.0
        for value, key, own_headers in rows:
            if call.error is not None:
                break
            correlation_id = f"{next(self._ids):x}"
            data = encode(value, key, own_headers, correlation_id)
            if len(data) > limit:
                text = f"a message of {len(data)} bytes is over the limit of {limit}; not sent"
                ids = {"stream": call.stream, "correlation_id": correlation_id}
                call.fail(len(call.acks), MessageTooLargeError(text, **ids))
                break
            if not room:
                await writer.flush()
                await acks.wait_for_room()
                if not client.is_connected and not await wait_until_connected(
                    client, now() + self.ack_timeout
                ):
                    raise AckTimeoutError(
                        f"NATS was not reachable before the deadline{cause(client)}: the message "
                        "was not sent",
                        stream=call.stream,
                        correlation_id=correlation_id,
                    )
                room = min(acks.room, writer.batch_size)
                deadline = now() + self.ack_timeout
            room -= 1
            subject = subject_of(key)
            if acked:
                acks.add(correlation_id, call, deadline, subject)
            else:
                call.acks.append(None)
            if acked and self._asked.get(subject, 0.0) <= deadline:
                self._asked[subject] = deadline + _ASK_AGAIN
                await writer.add(subject, data, f"{self._inbox}.{correlation_id}")
            else:
                await writer.add(subject, data)
            self.stats.published += 1
        await writer.flush()

    def _client(self) -> Client:
        if self._nats is None:
            raise LiftbridgeError("the publisher is not open: use it in `async with`")
        return self._nats

    def _advice(self) -> str:
        """What a missing ack may be due to beside the broker."""
        advice = "" if self._nats is None else denial(self._nats)
        if not advice and not self.stats.acked:
            advice = (
                " None has come so far: is the broker's own user of NATS allowed to publish to "
                f"{self._inbox.rpartition('.')[0]}.>?"
            )
        return advice

    async def _on_message(self, message: Msg) -> None:
        self._on_acks([message.data])

    async def _on_reply(self, message: Msg) -> None:
        # A broker never replies there: it acks.
        if (message.headers or {}).get("Status") == _NOBODY:
            self._acks.nobody_listens(message.subject.rpartition(".")[2])
            self._asked.clear()

    def _on_acks(self, payloads: list[bytes]) -> None:
        receive = self._acks.receive
        for payload in payloads:
            try:
                ack = decode_ack(payload)
            except EnvelopeError as error:
                self.stats.garbage += 1
                logger.warning("ignored a message to the ack inbox: %s", error.message)
            else:
                receive(ack)

    async def _on_reconnect(self) -> None:
        self._asked.clear()
        self.stats.reconnects += 1

    async def _on_closed(self) -> None:
        self._acks.fail_all("the connection to NATS was closed")


def _subject_of(stream: Stream, partition: int | None) -> Callable[[bytes | None], str]:
    check_publishable(stream.subject)
    if partition is None and stream.partitions > 1:
        return lambda key: stream.subject_of(stream.partition_of(key))
    subject = stream.subject_of(partition or 0)
    return lambda _: subject


async def publish_until_acked(
    publisher: LiftbridgePublisher,
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
    after a failure, one message is sent alone, and the others behind its ack. `headers` win over
    those of `headers_each`. An error is final after `give_up_after` seconds, or `attempts`, without
    progress; an error of `before_retry` at once.

    Raises:
        PublishError: `index` and `acks` count from the first of all messages.
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
