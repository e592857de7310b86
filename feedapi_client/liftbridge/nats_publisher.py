"""Publishing to Liftbridge over NATS: pipelined, and every message is acked or reported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from feedapi_client.liftbridge.acks import AckGroup
from feedapi_client.liftbridge.envelope import (
    AckPolicy,
    MessageEncoder,
    decode_ack,
)
from feedapi_client.liftbridge.fast_path import install_fast_path
from feedapi_client.liftbridge.liftbridge_errors import (
    AckTimeoutError,
    BrokerUnavailableError,
    EnvelopeError,
    LiftbridgeError,
    MessageTooLargeError,
    require_asyncio,
)
from feedapi_client.liftbridge.messages_pb2 import AckPolicy as WireAckPolicy
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.liftbridge.nats_connection import (
    MessageWriter,
    cause,
    check_inbox,
    connect,
    denied_subject,
    flush,
    inbox_subjects,
    unavailable,
    wait_until_connected,
)
from feedapi_client.liftbridge.stream_name import REPLICATION_LIMIT, Stream, check_publishable
from feedapi_client.liftbridge.stream_publisher import MessageRow, StreamPublisher

logger = logging.getLogger(__name__)

_NOBODY = "503"
_NOT_REACHED = "NATS was not reachable before the deadline"
_ASK_AGAIN = 5.0
"""Seconds after which a message asks again whether anybody listens on its subject."""


class LiftbridgePublisher(StreamPublisher):
    """Publishes messages in envelopes and waits for their acks. Use it in `async with`.

    Arguments:
        servers: NATS URLs, or a connected nats-py client. Such a client stays open at the end, and
            only documented calls of nats-py are used with it.
        max_in_flight: maximum number of messages that wait for their ack. Further ones wait
            before they are sent.
        ack_timeout: seconds from sending a message to its deadline.
        ack_policy: when the broker acks.
        crc: whether envelopes have a checksum.
        max_message_bytes: the largest message that the broker stores; None when it is unknown. A
            larger one, or one over NATS's own limit, is refused before it is sent.
        connect_timeout: seconds for the first connection.
        options: further arguments of ``nats.connect``, such as credentials and TLS.

    Concurrency: methods may be called from several tasks. Needs asyncio, because nats-py does.

    NATS reconnects by itself. A message that was sent before and is never acked ends with an
    `AckTimeoutError`; a message that is published meanwhile waits for the connection.
    """

    def __init__(
        self,
        servers: str | Sequence[str] | Client = "nats://127.0.0.1:4222",
        *,
        max_in_flight: int = 8192,
        ack_timeout: float = 10.0,
        ack_policy: AckPolicy = AckPolicy.LEADER,
        crc: bool = True,
        max_message_bytes: int | None = REPLICATION_LIMIT,
        connect_timeout: float = 10.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            max_in_flight=max_in_flight,
            ack_timeout=ack_timeout,
            ack_policy=ack_policy,
            max_message_bytes=max_message_bytes,
        )
        self._servers = servers
        self._crc = crc
        self._connect_timeout = connect_timeout
        self._options = dict(options or {})
        self._nats: Client | None = None
        self._subscriptions: list[Subscription] = []
        self._known_error: Exception | None = None
        self._told: set[str] = set()
        self._inbox = ""
        self._new_writer: Callable[[Client], MessageWriter] = MessageWriter
        # Until when the answer counts that somebody listens on a subject.
        self._asked: dict[str, float] = {}

    async def __aenter__(self) -> LiftbridgePublisher:
        require_asyncio()
        if isinstance(self._servers, Client):
            client = self._servers
        else:
            client = await connect(
                self._servers,
                timeout=self._connect_timeout,
                options=self._options,
                on_error=self._on_error,
                on_reconnect=self._on_reconnect,
                on_closed=self._on_closed,
            )
        self._nats, self._known_error = client, client.last_error
        try:
            await self._subscribe(client)
        except BaseException:
            await self._leave()
            raise
        return self

    async def _subscribe(self, client: Client) -> None:
        """Subscribe to the inbox of acks, and make sure that the server takes that.

        Raises:
            BrokerUnavailableError: the connection is closed, or ends.
            LiftbridgeError: the user may not subscribe.
        """
        try:
            self._inbox = client.new_inbox()
            self._acks.silence = (
                " None has come so far: is the broker's own user of NATS allowed to publish to "
                f"{inbox_subjects(self._inbox)}?"
            )
            self._subscriptions.append(await client.subscribe(self._inbox, cb=self._on_message))
            if client is not self._servers:
                self._new_writer = (
                    install_fast_path(client, self._subscriptions[0], self._on_acks)
                    or MessageWriter
                )
            # NATS itself replies where nobody listens on a subject.
            self._subscriptions.append(
                await client.subscribe(f"{self._inbox}.*", cb=self._on_reply)
            )
        except nats.errors.Error as error:
            raise unavailable(error, client) from error
        await self._flush()
        check_inbox(client, self._inbox)

    async def __aexit__(self, *exc: object) -> None:
        self._acks.fail_all("the publisher was closed")
        await self._leave()

    async def _leave(self) -> None:
        """Close the connection; give a client back as it was, whatever state that is in now."""
        client, self._nats = self._nats, None
        subscriptions, self._subscriptions = self._subscriptions, []
        if client is None or client.is_closed:
            return
        try:
            if client is not self._servers:
                await client.close()
                return
            for each in subscriptions:
                await each.unsubscribe()
        except (nats.errors.Error, OSError) as error:
            # The client drains, or was closed meanwhile. An error of the application matters more.
            logger.info("NATS: %s while the publisher was closed", type(error).__name__)

    @property
    def message_limit(self) -> int:
        """The bytes of the largest message that can be stored, as far as is known."""
        known = [self.max_message_bytes, None if self._nats is None else self._nats.max_payload]
        return min((limit for limit in known if limit), default=REPLICATION_LIMIT)

    async def publish_plain(self, subject: str, payload: bytes) -> None:
        """Publish bytes without an envelope, and without an ack.

        A stream on that subject stores them as an opaque value.
        """
        check_publishable(subject)
        client = self._client()
        if not await wait_until_connected(client, _now() + self.ack_timeout):
            raise BrokerUnavailableError(f"{_NOT_REACHED}{cause(client)}")
        self._known_error = client.last_error
        try:
            await client.publish(subject, payload)
        except nats.errors.MaxPayloadError as error:
            raise LiftbridgeError(
                f"{len(payload)} bytes for subject {subject} are more than NATS carries "
                f"({client.max_payload})"
            ) from error
        except nats.errors.Error as error:
            raise unavailable(error, client) from error
        await self._flush()
        self._check_denied(client, lambda denied: denied == subject.lower())

    async def _publish_rows(
        self,
        group: AckGroup,
        rows: Iterable[MessageRow],
        stream: Stream,
        partition: int | None,
        *,
        headers: Mapping[str, bytes] | None,
        ack_policy: AckPolicy,
        expected_offset: int,
        timeout: float,
    ) -> None:
        acked = ack_policy is not AckPolicy.NONE
        encode = self._encoder(ack_policy, headers, expected_offset)
        subject_of = _subject_of(stream, partition)
        client, acks = self._client(), self._acks
        check_inbox(client, self._inbox)
        self._check_denied(client, group.publishes_to)
        limit = min(self.max_message_bytes or client.max_payload, client.max_payload)
        writer = self._new_writer(client)
        room, deadline = 0, 0.0
        for value, key, own_headers in rows:
            if group.error is not None:
                break
            correlation_id = f"{next(self._ids):x}"
            data = encode(value, key, own_headers, correlation_id)
            if len(data) > limit:
                group.refuse_next(_too_large(group.stream, correlation_id, len(data), limit))
                break
            if not room:
                await writer.flush()
                await acks.wait_for_room()
                if not client.is_connected and not await wait_until_connected(
                    client, _now() + timeout
                ):
                    raise _not_sent(group.stream, correlation_id, cause(client))
                room, deadline = min(acks.room, writer.batch_size), _now() + timeout
            room -= 1
            subject = subject_of(key)
            if acked:
                acks.add(correlation_id, group, deadline, subject)
            else:
                group.add_without_ack()
            if acked and self._asked.get(subject, 0.0) <= deadline:
                self._asked[subject] = deadline + _ASK_AGAIN
                await writer.add(subject, data, f"{self._inbox}.{correlation_id}")
            else:
                await writer.add(subject, data)
            self.stats.published += 1
        await writer.flush()

    def _check_denied(self, client: Client, publishes_to: Callable[[str], bool]) -> None:
        """Raise `LiftbridgeError`, once, when the server lately refused messages for a subject.

        A connection of the caller tells nobody else. Without that, a message would seem to be one
        whose ack is late, and be sent again and again.
        """
        error = client.last_error
        if error is not self._known_error and publishes_to(denied_subject(error, "publish")):
            self._known_error = error
            raise LiftbridgeError(_may_not(denied_subject(error, "publish")))

    def _on_error(self, error: Exception) -> None:
        denied = denied_subject(error, "publish")
        if denied and self._acks.refuse_subject(denied, _may_not(denied)):
            self._told.add(denied)
        if denied in self._told:  # also the rest of a call's messages
            self._known_error = error

    def _encoder(
        self, policy: AckPolicy, headers: Mapping[str, bytes] | None, expected_offset: int
    ) -> MessageEncoder:
        shared = Message(
            headers=headers,
            ackInbox="" if policy is AckPolicy.NONE else self._inbox,
            ackPolicy=WireAckPolicy.Name(int(policy)),
        )
        return MessageEncoder(shared, expected_offset, crc=self._crc)

    def _client(self) -> Client:
        if self._nats is None:
            raise LiftbridgeError("the publisher is not open: use it in `async with`")
        return self._nats

    async def _flush(self) -> None:
        client = self._client()
        try:
            await flush(client)
        except nats.errors.Error as error:
            raise unavailable(error, client) from error

    async def _on_message(self, message: Msg) -> None:
        self._on_acks([message.data])

    async def _on_reply(self, message: Msg) -> None:
        """Fail a message that nobody listened to, which NATS says where it knows a reply subject.

        A broker never replies there: it acks.
        """
        if (message.headers or {}).get("Status") == _NOBODY:
            self._acks.refuse_unheard(message.subject.rpartition(".")[2])
            self._asked.clear()

    def _on_acks(self, payloads: list[bytes]) -> None:
        receive = self._acks.receive
        for payload in payloads:
            try:
                ack = decode_ack(payload)
            except EnvelopeError as error:
                self.stats.garbage += 1
                logger.warning(
                    "ignored a message to the ack inbox: %s",
                    error.message,
                    extra={"check": error.check},
                )
            else:
                receive(ack)

    async def _on_reconnect(self) -> None:
        self._asked.clear()
        self.stats.reconnects += 1

    async def _on_closed(self) -> None:
        self._acks.fail_all("the connection to NATS was closed")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _subject_of(stream: Stream, partition: int | None) -> Callable[[bytes | None], str]:
    """Return the function from a message's key to its subject."""
    check_publishable(stream.subject)
    if partition is None and stream.partitions > 1:
        return lambda key: stream.subject_of(stream.partition_of(key))
    subject = stream.subject_of(partition or 0)
    return lambda _: subject


def _too_large(stream: str, correlation_id: str, size: int, limit: int) -> MessageTooLargeError:
    return MessageTooLargeError(
        f"a message of {size} bytes is over the limit of {limit}; it was not sent",
        stream=stream,
        correlation_id=correlation_id,
    )


def _may_not(subject: str) -> str:
    return (
        f"the user may not publish to {subject}: give it the permission to publish to that "
        "subject, and to those of the stream's other partitions"
    )


def _not_sent(stream: str, correlation_id: str, why: str) -> AckTimeoutError:
    return AckTimeoutError(
        f"{_NOT_REACHED}{why}: the message was not sent",
        stream=stream,
        correlation_id=correlation_id,
    )
