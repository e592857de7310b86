"""The broker's gRPC API: create streams, read them back, look at their state, keep cursors.

The definition of the API (messages and stub) comes from gufo-liftbridge. Its client is not used: it
can't create streams with optimistic concurrency control, and it retries without end, where a caller
has to learn that the broker is gone. Here every call has a deadline.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from gufo.liftbridge import api_pb2
from gufo.liftbridge.api_pb2_grpc import APIStub

from feedapi_client.liftbridge.brokers import AlreadyExistsError, Brokers, StreamMissingError
from feedapi_client.liftbridge.envelope import AckPolicy, check_headers
from feedapi_client.liftbridge.groups import (
    GroupConsumer,
    GroupStart,
    fetch_cursor,
    set_cursor,
)
from feedapi_client.liftbridge.liftbridge_errors import (
    AckTimeoutError,
    EncryptionError,
    IncorrectOffsetError,
    LiftbridgeError,
    MessageTooLargeError,
    PublishError,
    PublishRefusedError,
    StreamError,
    require_asyncio,
)
from feedapi_client.liftbridge.messages_pb2 import Ack, Message
from feedapi_client.liftbridge.stream_model import (
    ACTIVITY_STREAM,
    ANY_OFFSET,
    ActivityEvent,
    ClusterMetadata,
    PartitionMetadata,
    Stream,
    StreamMetadata,
    StreamOptions,
    activity_event,
    check_publishable,
)
from feedapi_client.liftbridge.subscription import (
    Start,
    StreamSubscription,
    Subscriber,
    Until,
    partition_metadata,
)

# What the broker says, and NATS behind it. The status alone does not tell them apart.
_REFUSED: tuple[tuple[str, type[PublishError]], ...] = (
    ("incorrect expected offset", IncorrectOffsetError),
    ("max replication size", MessageTooLargeError),
    ("maximum payload", MessageTooLargeError),
    ("encryption failed", EncryptionError),
)
_LATE = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class LiftbridgeApi:
    """A connection to a cluster. Use it in `async with`. It needs asyncio.

    Arguments:
        addresses: ``host:port`` of one or several brokers of the cluster.
        timeout: seconds in which an operation has to succeed, and a subscription to find a broker
            again; an attribute, too. The default outlasts a restart and the election of a leader.
        credentials: makes the channels secure.
        token: is sent with every call as ``authorization: Bearer``, for a proxy that asks for it.

    Raises, from all methods:
        BrokerUnavailableError: no broker answered within `timeout`.
        StreamError: the stream is missing. One that was there before is looked for for `timeout`
            seconds, because a broker that starts does not know its streams at once.
        LiftbridgeError: the broker refused the request.

    Concurrency: methods may be called from several tasks.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = "127.0.0.1:9292",
        *,
        timeout: float = 60.0,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
    ) -> None:
        targets = [addresses] if isinstance(addresses, str) else list(addresses)
        if not targets:
            raise ValueError("LiftbridgeApi needs the address of at least one broker")
        self._brokers = Brokers(targets, timeout, credentials, token)

    async def __aenter__(self) -> LiftbridgeApi:
        require_asyncio()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._brokers.close()

    @property
    def timeout(self) -> float:
        return self._brokers.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._brokers.timeout = seconds

    async def create_stream(
        self,
        stream: Stream | str,
        *,
        concurrency_control: bool = False,
        replication_factor: int = 1,
        min_isr: int | None = None,
        options: StreamOptions | None = None,
    ) -> bool:
        """Create the stream if it is missing, and return whether it was created.

        An existing stream is left as it is, also when its configuration is another one.

        Arguments:
            concurrency_control: whether the broker checks the expected offset of each message, as a
                relay needs that is exactly once. Compaction, pauses and retention by age (7 days by
                default) are then off, and segments fit to a retention by count or bytes.
            min_isr: minimum number of in-sync replicas; by default the broker's.
            options: retention, compaction, encryption and so on; by default the broker's.

        Raises:
            ValueError: with `concurrency_control`, a relay's positions would be removed: by age, by
                compaction, or because less than 40,000 messages or 256 MiB are kept. Or `min_isr`
                is more than the replicas: no message would be acked.
        """
        target = Stream(stream) if isinstance(stream, str) else stream
        if 0 < replication_factor < (min_isr or 0):
            raise ValueError(
                f"min_isr={min_isr} is more than the replicas ({replication_factor}): no message "
                "would be acked"
            )
        request = api_pb2.CreateStreamRequest(
            name=target.name,
            subject=target.subject,
            partitions=target.partitions,
            replicationFactor=replication_factor,
        )
        if concurrency_control:
            request.optimisticConcurrencyControl.value = True
        if min_isr is not None:
            request.minIsr.value = min_isr
        wanted = options or StreamOptions()
        (wanted.for_ledger() if concurrency_control else wanted).write_to(request)
        try:
            await self._brokers.call_all(target.name, "CreateStream", request)
        except AlreadyExistsError:
            created = False
        else:
            created = True
        self._brokers.seen.add(target.name)
        return created

    async def delete_stream(self, stream: str) -> None:
        self._brokers.seen.discard(stream)
        request = api_pb2.DeleteStreamRequest(name=stream)
        await self._brokers.call_all(stream, "DeleteStream", request)

    async def pause_stream(
        self, stream: str, partitions: Sequence[int] = (), *, resume_all: bool = False
    ) -> None:
        """Pause partitions; all when none is named. What wakes one wakes all with `resume_all`.

        Messages to them over NATS are lost without an ack. A message over gRPC, `resume_partition`
        or a subscription with ``resume=True`` wakes a partition.
        """
        request = api_pb2.PauseStreamRequest(
            name=stream, partitions=partitions, resumeAll=resume_all
        )
        await self._brokers.call_all(stream, "PauseStream", request)

    async def resume_partition(self, stream: str, partition: int = 0) -> PartitionMetadata:
        """Wake a partition if it is paused, and return its state."""
        return await self._brokers.retry(
            lambda: partition_metadata(self._brokers, stream, partition, resume=True)
        )

    async def set_readonly(
        self, stream: str, readonly: bool = True, *, partitions: Sequence[int] = ()
    ) -> None:
        """Make partitions read-only, or writable again; all when none is named."""
        request = api_pb2.SetStreamReadonlyRequest(
            name=stream, partitions=partitions, readonly=readonly
        )
        await self._brokers.call_all(stream, "SetStreamReadonly", request)

    async def metadata(self, stream: str) -> StreamMetadata:
        """Return the stream's subject, partitions and leaders."""
        cluster = await self._brokers.retry(lambda: self._brokers.metadata([stream]))
        return cluster.streams[stream]

    async def cluster(self, *, groups: Sequence[str] = ()) -> ClusterMetadata:
        """Return all brokers and streams, and the named consumer groups."""
        return await self._brokers.retry(lambda: self._brokers.metadata(groups=groups))

    async def partition_metadata(self, stream: str, partition: int = 0) -> PartitionMetadata:
        """Return the state of a partition with its offsets, from its leader.

        Raises `StreamPausedError` when it is paused. `metadata` tells its leader all the same.
        """
        return await self._brokers.retry(
            lambda: partition_metadata(self._brokers, stream, partition)
        )

    async def glance(
        self, stream: str, partition: int = 0, *, seconds: float = 2.0
    ) -> PartitionMetadata | None:
        """Return the state of a partition, or None where no broker tells it at once.

        Nothing is repeated, and a paused partition is not woken. Raises `StreamError` for a stream
        that is missing and was never there.
        """
        try:
            async with asyncio.timeout(seconds):
                return await partition_metadata(self._brokers, stream, partition)
        except StreamError as error:
            if isinstance(error, StreamMissingError) and stream not in self._brokers.seen:
                raise
        except (TimeoutError, LiftbridgeError):
            pass
        return None

    def subscribe(
        self,
        stream: str,
        start: Start = "earliest",
        *,
        partition: int = 0,
        until: Until | None = None,
        idle_timeout: float | None = None,
        resume: bool = False,
    ) -> AsyncGenerator[Message, None]:
        """Return the messages of a partition from `start` on, without end.

        When the broker goes away or the leader changes, it continues with the next message. Of two
        messages with one offset, which a broker that was killed can leave, the second one counts.

        Arguments:
            start: an offset; ``"earliest"``; ``"latest"``, the newest message that is stored;
                ``"new"``, the next one to be stored; or a time.
            until: where to end, inclusive: an offset, ``"latest"``, or a time.
            idle_timeout: maximum number of seconds to wait for a message.
            resume: wake the partition when it is paused.

        Raises:
            BrokerUnavailableError: no broker was found for `timeout` seconds, or no message came
                for `idle_timeout` seconds.
            StreamError: the stream or the partition is missing.
            StreamPausedError: the partition is paused, and `resume` is false.
            StreamReadonlyError: all messages of a read-only partition were returned, and the end
                that was asked for is not reached. Where none was asked for, it may be written to
                later: subscribe again behind the last message.
        """
        wanted = StreamSubscription(stream, partition, start, until, idle_timeout, resume)
        return Subscriber(self._brokers, wanted).messages()

    async def activity(self, start: Start = "earliest") -> AsyncGenerator[ActivityEvent, None]:
        """Return what happens to streams and consumer groups, without end.

        Raises `StreamError` where the brokers' setting ``activity.stream.enabled`` is off.
        """
        async with aclosing(self.subscribe(ACTIVITY_STREAM, start, resume=True)) as messages:
            async for message in messages:
                yield activity_event(message)

    async def publish(
        self,
        stream: str,
        value: bytes,
        *,
        key: bytes | None = None,
        partition: int = 0,
        headers: Mapping[str, bytes] | None = None,
        ack_policy: AckPolicy = AckPolicy.LEADER,
        expected_offset: int = ANY_OFFSET,
        timeout: float | None = None,
    ) -> Ack | None:
        """Publish one message with a call of its own, and return its ack; None with ``NONE``.

        For a message now and then: the publishers send many at a time. A paused partition wakes.

        Arguments:
            timeout: seconds for the ack; by default 10, or the API's timeout if that is shorter.

        Raises:
            PublishError: one of its subclasses. The call is not repeated.
        """
        request = api_pb2.PublishRequest(
            stream=stream,
            partition=partition,
            value=value,
            key=key,
            headers=headers,
            ackPolicy=api_pb2.AckPolicy.Name(int(ack_policy)),
            expectedOffset=expected_offset,
        )
        return await self._publish("Publish", request, stream, timeout)

    async def publish_to_subject(
        self,
        subject: str,
        value: bytes,
        *,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        ack_policy: AckPolicy = AckPolicy.LEADER,
        timeout: float | None = None,
    ) -> Ack | None:
        """Publish one message to a NATS subject through a broker, and return the first ack.

        Every stream on the subject stores it. As `publish` otherwise; without a stream no ack
        comes.

        Raises:
            PublishError: one of its subclasses.
            ValueError: nothing can be published to the subject.
        """
        check_publishable(subject)
        request = api_pb2.PublishToSubjectRequest(
            subject=subject,
            value=value,
            key=key,
            headers=headers,
            ackPolicy=api_pb2.AckPolicy.Name(int(ack_policy)),
        )
        return await self._publish("PublishToSubject", request, subject, timeout)

    async def _publish(
        self, method: str, request: Any, target: str, timeout: float | None
    ) -> Ack | None:
        check_headers(request.headers)
        request.correlationId = secrets.token_hex(8)
        ids = {"stream": target, "correlation_id": request.correlationId}
        # Without a deadline the broker does not wait for the ack.
        seconds = timeout or self._brokers.call_timeout
        late = f"no ack within {seconds:g} s: the message may be stored or not"
        try:
            response = await self._publish_once(method, request, seconds)
        except grpc.aio.AioRpcError as error:
            details = error.details() or "no details"
            kind: type[PublishError] = PublishRefusedError
            if error.code() in _LATE:
                kind = AckTimeoutError
            for text, refused in _REFUSED:
                kind = refused if text in details.lower() else kind
            text = f"the broker answered {error.code().name} ({details})"
            raise kind(text, **ids) from error
        except TimeoutError as error:
            raise AckTimeoutError(late, **ids) from error
        if request.ackPolicy == int(AckPolicy.NONE):
            return None
        if not response.HasField("ack"):
            raise AckTimeoutError(late, **ids)
        return Ack.FromString(response.ack.SerializeToString())

    async def _publish_once(self, method: str, request: Any, seconds: float) -> Any:
        failure: grpc.aio.AioRpcError | None = None
        for address in self._brokers.addresses:
            stub = APIStub(self._brokers.channel(address))  # type: ignore[no-untyped-call]
            try:
                async with asyncio.timeout(seconds):
                    return await getattr(stub, method)(
                        request, timeout=seconds, metadata=self._brokers.call_metadata
                    )
            except grpc.aio.AioRpcError as error:
                # Only where nothing was sent: a message is not published twice.
                was_sent = "failed to connect" not in (error.details() or "").lower()
                if error.code() is not grpc.StatusCode.UNAVAILABLE or was_sent:
                    raise
                failure = error
        assert failure is not None
        raise failure

    async def set_cursor(
        self, stream: str, cursor_id: str, offset: int, *, partition: int = 0
    ) -> None:
        """Store an offset under a name in the cluster. The stream need not exist.

        A broker that starts takes the largest offset that was ever stored under the name. Raises
        `LiftbridgeError` where the cluster keeps no cursors, which is a setting of its brokers.
        """
        await set_cursor(self._brokers, stream, cursor_id, offset, partition)

    async def fetch_cursor(self, stream: str, cursor_id: str, *, partition: int = 0) -> int | None:
        """Return the offset stored under a name; None when there is none."""
        return await fetch_cursor(self._brokers, stream, cursor_id, partition)

    def group_consumer(
        self,
        group: str,
        streams: Sequence[str],
        *,
        name: str = "",
        start: GroupStart = "earliest",
        checkpoint_seconds: float | None = 5.0,
    ) -> GroupConsumer:
        """Return a new member of a consumer group, which joins when it is opened.

        Arguments:
            group: the name of the group. Its members divide the partitions of their streams, and go
                on where others of the group stopped.
            name: the beginning of the member's id in the logs of the brokers.
            start: where a partition begins that the group has no checkpoint of.
            checkpoint_seconds: how often a checkpoint is written; None: only when
                `GroupConsumer.checkpoint` is called, at the end, and when a partition goes to
                another member.
        """
        return GroupConsumer(self._brokers, group, streams, name, start, checkpoint_seconds)
