"""Publishing to Liftbridge over NATS: pipelined, and every message acked or accounted for."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from feedapi_client.liftbridge.encoder import Encoder, check_headers
from feedapi_client.liftbridge.envelope import AckPolicy, decode_ack
from feedapi_client.liftbridge.errors import (
    AckTimeoutError,
    BrokerUnavailableError,
    EnvelopeError,
    LiftbridgeError,
    MessageTooLargeError,
)
from feedapi_client.liftbridge.lanes import AckLane, Outbox, flush, unavailable
from feedapi_client.liftbridge.messages_pb2 import Ack, Message
from feedapi_client.liftbridge.messages_pb2 import AckPolicy as WirePolicy
from feedapi_client.liftbridge.pending import Group, Pending, PublisherStats
from feedapi_client.liftbridge.streams import ANY_OFFSET, REPLICATION_LIMIT, Stream, require_asyncio
from feedapi_client.model import public_url

logger = logging.getLogger(__name__)

_RECONNECT_POLL = 0.02
_CHUNK = 128


class LiftbridgePublisher:
    """Publishes messages in envelopes and waits for their acks.

    `servers` are NATS URLs, or a connected nats-py client that stays the caller's. At most `max_in_flight` messages wait for their ack at a time; a
    publish beyond that waits. Each has `ack_timeout` seconds from being sent. Messages over `max_message_bytes` (None: unknown) or over NATS's own
    limit are refused before they are sent. `options` go to ``nats.connect`` (credentials, TLS ...).

    Methods may be called from several tasks. NATS reconnects by itself: what was sent before and never acked ends in its `AckTimeoutError`, what is
    published meanwhile waits. It needs asyncio, since nats-py does.
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
        if max_in_flight < 1 or ack_timeout <= 0:
            raise ValueError("max_in_flight and ack_timeout must be positive")
        self.stats = PublisherStats()
        self.ack_timeout = ack_timeout
        self._servers = servers
        self.ack_policy = ack_policy
        self._crc = crc
        self.max_message_bytes = max_message_bytes
        self._connect_timeout = connect_timeout
        self._options = dict(options or {})
        self._nats: Client | None = None
        self._inbox = ""
        self._fast = False
        self._ids = itertools.count(1)
        self._pending = Pending(max_in_flight, self.stats)

    async def __aenter__(self) -> LiftbridgePublisher:
        require_asyncio()
        client = (
            self._servers
            if isinstance(self._servers, Client)
            else await self._connect(self._servers)
        )
        self._inbox = client.new_inbox()
        self._subscription = await client.subscribe(self._inbox, cb=self._on_ack)
        if client is not self._servers:
            self._fast = AckLane.open(client, self._subscription, self._on_acks)
        self._nats = client
        await self._flush()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pending.fail_all(
            "the publisher was closed before the ack came: the message may be stored or not"
        )
        client, self._nats = self._nats, None
        if client is None or client.is_closed:
            return
        if client is not self._servers:
            await client.close()
        else:
            await self._subscription.unsubscribe()

    @property
    def in_flight(self) -> int:
        """Messages that wait for their ack."""
        return len(self._pending)

    async def publish(
        self,
        stream: Stream | str,
        value: bytes,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Mapping[str, bytes] | None = None,
        ack_policy: AckPolicy | None = None,
        expected_offset: int = ANY_OFFSET,
        timeout: float | None = None,
    ) -> Ack | None:
        """Publish one message and wait for its ack; with `AckPolicy.NONE` hand it to NATS and return None.

        `partition` is the key's unless given. `expected_offset` is what the message's offset has to be, on a stream with optimistic concurrency
        control. Raises the `PublishError` that fits, `BrokerUnavailableError` when NATS is gone for good, ValueError for the header names ``subject``
        and ``reply``, which the broker overwrites. When cancelled, the message may be stored or not.
        """
        acks = await self.publish_many(
            stream,
            [value],
            keys=[key],
            partition=partition,
            headers=headers,
            ack_policy=ack_policy,
            expected_offset=expected_offset,
            timeout=timeout,
        )
        return acks[0]

    async def publish_many(
        self,
        stream: Stream | str,
        values: Iterable[bytes],
        *,
        keys: Iterable[bytes | None] | None = None,
        partition: int | None = None,
        headers: Mapping[str, bytes] | None = None,
        headers_each: Iterable[Mapping[str, bytes]] | None = None,
        ack_policy: AckPolicy | None = None,
        expected_offset: int = ANY_OFFSET,
        timeout: float | None = None,
    ) -> list[Ack | None]:
        """Publish messages in order, without waiting for one ack before the next message; return their acks in the same order.

        `headers` are those of every message, `headers_each` come on top. `expected_offset` is that of the first message and counts up. At the first
        error nothing further is sent; the acks of what was sent are waited for, and then the error of the earliest failed message is raised, as by
        `publish`, with its position as ``index``.
        """
        target = Stream(stream) if isinstance(stream, str) else stream
        policy = self.ack_policy if ack_policy is None else ack_policy
        group = Group(target.name)
        try:
            encoder = self._encoder(policy, headers, expected_offset)
            await self._send(
                group,
                target,
                encoder,
                _rows(values, keys, headers_each),
                partition,
                policy,
                timeout or self.ack_timeout,
            )
            return await group.result()
        except BaseException:
            self._pending.forget(group)
            raise

    async def publish_plain(self, subject: str, payload: bytes) -> None:
        """Publish without an envelope: a stream on that subject stores the bytes as an opaque value, and nobody acks."""
        client = self._client()
        await self._connected(client, asyncio.get_running_loop().time() + self.ack_timeout)
        try:
            await client.publish(subject, payload)
            await self._flush()
        except nats.errors.MaxPayloadError as error:
            raise LiftbridgeError(
                f"{len(payload)} bytes for subject {subject} are more than NATS carries ({client.max_payload})"
            ) from error
        except nats.errors.Error as error:
            raise unavailable(error) from error

    async def _send(
        self,
        group: Group,
        target: Stream,
        encoder: Encoder,
        rows: Iterable[tuple[bytes, bytes | None, Mapping[str, bytes] | None]],
        partition: int | None,
        policy: AckPolicy,
        timeout: float,
    ) -> None:
        client, pending, now = self._client(), self._pending, asyncio.get_running_loop().time
        limit = min(self.max_message_bytes or client.max_payload, client.max_payload)
        outbox = Outbox(client, fast=self._fast)
        fixed = (
            target.subject_of(partition)
            if partition is not None
            else target.subject
            if target.partitions == 1
            else None
        )
        room, acked, deadline = 0, policy is not AckPolicy.NONE, now() + timeout
        for value, key, own_headers in rows:
            if group.error is not None:
                break
            correlation_id = f"{next(self._ids):x}"
            data = encoder(value, key, own_headers, correlation_id)
            if len(data) > limit:
                group.refuse(_too_large(target.name, correlation_id, len(data), limit))
                break
            if not room:
                await outbox.flush()
                await pending.wait_for_room()
                if not client.is_connected:
                    await self._connected(client, now() + timeout, target.name, correlation_id)
                room, deadline = min(pending.room, _CHUNK if self._fast else 1), now() + timeout
            room -= 1
            if acked:
                pending.add(correlation_id, group, deadline)
            else:
                group.acks.append(None)
            await outbox.add(fixed or target.subject_of(target.partition_of(key)), data)
            self.stats.published += 1
        await outbox.flush()

    def _encoder(
        self, policy: AckPolicy, headers: Mapping[str, bytes] | None, expected_offset: int
    ) -> Encoder:
        check_headers(headers)
        inbox = "" if policy is AckPolicy.NONE else self._inbox
        return Encoder(
            Message(headers=headers, ackInbox=inbox, ackPolicy=WirePolicy.Name(int(policy))),
            expected_offset,
            crc=self._crc,
        )

    async def _connect(self, servers: str | Sequence[str]) -> Client:
        options: dict[str, Any] = {
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": 0.1,
            "name": "feedapi-client",
            **self._options,
        }
        names = ", ".join(
            public_url(server) for server in ([servers] if isinstance(servers, str) else servers)
        )
        try:
            async with asyncio.timeout(self._connect_timeout):
                return await nats.connect(
                    servers if isinstance(servers, str) else list(servers),
                    error_cb=_log_error,
                    reconnected_cb=self._on_reconnect,
                    closed_cb=self._on_closed,
                    **options,
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            raise BrokerUnavailableError(
                f"no connection to NATS at {names} within {self._connect_timeout:g} s: {type(error).__name__}"
            ) from error

    def _client(self) -> Client:
        if self._nats is None:
            raise LiftbridgeError("the publisher is not open: use it in `async with`")
        return self._nats

    async def _connected(
        self, client: Client, deadline: float, stream: str = "", correlation_id: str = ""
    ) -> None:
        # What nats-py buffers while it reconnects has no deadline and a small limit, so messages wait here instead.
        while not client.is_connected:
            if client.is_closed:
                raise BrokerUnavailableError("the connection to NATS is closed")
            if asyncio.get_running_loop().time() >= deadline:
                if stream:
                    raise AckTimeoutError(
                        "NATS was not reachable before the deadline: the message was not sent",
                        stream=stream,
                        correlation_id=correlation_id,
                    )
                raise BrokerUnavailableError("NATS was not reachable before the deadline")
            await asyncio.sleep(_RECONNECT_POLL)

    async def _flush(self) -> None:
        try:
            await flush(self._client())
        except nats.errors.Error as error:
            raise unavailable(error) from error

    async def _on_ack(self, message: Msg) -> None:
        self._on_acks([message.data])

    def _on_acks(self, messages: list[bytes]) -> None:
        settle = self._pending.settle
        for data in messages:
            try:
                ack = decode_ack(data)
            except EnvelopeError as error:
                self._on_garbage(error)
            else:
                settle(ack)

    def _on_garbage(self, error: EnvelopeError) -> None:
        self.stats.garbage += 1
        logger.warning("ignored what came to the ack inbox: %s", error.message)

    async def _on_reconnect(self) -> None:
        self.stats.reconnects += 1

    async def _on_closed(self) -> None:
        self._pending.fail_all(
            "the connection to NATS was closed before the ack came: the message may be stored or not"
        )


def _too_large(stream: str, correlation_id: str, size: int, limit: int) -> MessageTooLargeError:
    return MessageTooLargeError(
        f"a message of {size} bytes is over the limit of {limit}; it was not sent",
        stream=stream,
        correlation_id=correlation_id,
    )


def _rows(
    values: Iterable[bytes],
    keys: Iterable[bytes | None] | None,
    headers: Iterable[Mapping[str, bytes]] | None,
) -> Iterable[tuple[bytes, bytes | None, Mapping[str, bytes] | None]]:
    return zip(
        values,
        itertools.repeat(None) if keys is None else keys,
        itertools.repeat(None) if headers is None else headers,
        strict=False,
    )


async def _log_error(error: Exception) -> None:
    # Never the text: it may quote a server's URL.
    logger.info("NATS reported %s", type(error).__name__)
