"""Calls to the brokers of a cluster: channels, deadlines, retries, and which broker to ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from gufo.liftbridge import api_pb2
from gufo.liftbridge.api_pb2_grpc import APIStub

from feedapi_client.liftbridge.liftbridge_errors import (
    BrokerUnavailableError,
    LiftbridgeError,
    StreamError,
)
from feedapi_client.liftbridge.stream_model import (
    ClusterMetadata,
    PartitionMetadata,
    cluster_metadata,
)
from feedapi_client.retry import Backoff, retry

_CHANNEL_OPTIONS = [
    # No limit: what a broker has stored can be read.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
_CALL_TIMEOUT = 10.0
"""Seconds for one call. A broker that does not answer one of them may answer the next."""
_RETRY_BASE_DELAY = 0.1
_RETRY_MAX_DELAY = 1.0
# What a broker answers while it starts, stops, or is not (yet, or any more) the leader.
_RETRIED = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
    }
)
# What it answers for a partition that it does not lead, or that is paused.
_NOT_SERVED = ("partition leader", "has been closed", "was closed")
# What it answers, with the status UNKNOWN, while its high watermark is above its newest message.
_CAN_NOT_READ = "failed to read message"
# What grpc says when it does not trust the broker.
_WRONG_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
# What a broker without a key answers to a new stream with encryption, as INTERNAL.
_NO_KEY = "encryption handler"

T = TypeVar("T")


class AlreadyExistsError(LiftbridgeError):
    """The stream exists. Handled by `LiftbridgeApi.create_stream`."""


class StreamMissingError(StreamError):
    """There is no such stream. Retried when it was there before."""


class NotServedError(BrokerUnavailableError):
    """The broker does not lead the partition, or it is paused."""


class NoMessageError(BrokerUnavailableError):
    """No message came within the caller's `idle_timeout`. Not retried."""


class Brokers:
    """The brokers of a cluster. A call is repeated for `timeout` seconds.

    A stream that was seen once and is missing is looked for again: a broker that starts answers
    before it knows its streams.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        timeout: float,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
    ) -> None:
        self.timeout = timeout
        self.addresses = list(addresses)
        self.call_metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.seen: set[str] = set()

    @property
    def call_timeout(self) -> float:
        return min(self.timeout, _CALL_TIMEOUT)

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            if self._credentials is None:
                self._channels[address] = grpc.aio.insecure_channel(address, _CHANNEL_OPTIONS)
            else:
                self._channels[address] = grpc.aio.secure_channel(
                    address, self._credentials, _CHANNEL_OPTIONS
                )
        return self._channels[address]

    async def call(
        self, stream: str, method: str, request: Any, addresses: Sequence[str] | None = None
    ) -> Any:
        """Call one broker after the other, and return the first response."""
        failure: LiftbridgeError | None = None
        for address in self.addresses if addresses is None else addresses:
            try:
                return await self._call_one(address, method, request)
            except TimeoutError as error:
                failure = BrokerUnavailableError(
                    f"stream {stream}: no answer within {self.call_timeout:g} s"
                )
                failure.__cause__ = error
            except grpc.aio.AioRpcError as error:
                failure = self.translate(stream, error)
                failure.__cause__ = error
                if not isinstance(failure, BrokerUnavailableError):
                    raise failure from error
        raise failure or BrokerUnavailableError("the cluster lists no brokers")

    async def _call_one(self, address: str, method: str, request: Any) -> Any:
        stub = APIStub(self.channel(address))  # type: ignore[no-untyped-call]
        # While a peer of the broker is down, FetchMetadata waits for that peer as long as the
        # broker sees a deadline, and the answer comes when it is too late.
        deadline = None if method == "FetchMetadata" else self.call_timeout
        async with asyncio.timeout(self.call_timeout):
            return await getattr(stub, method)(
                request, timeout=deadline, metadata=self.call_metadata
            )

    async def call_all(self, stream: str, method: str, request: Any) -> Any:
        return await self.retry(lambda: self.call(stream, method, request))

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call while no broker answers, or the leader is not the one of the metadata."""
        backoff = self.backoff(deadline=time.monotonic() + self.timeout)
        return await retry(call, backoff, sleep=asyncio.sleep)

    def backoff(
        self, *, give_up_after: float | None = None, deadline: float | None = None
    ) -> Backoff:
        return Backoff(
            base_delay=_RETRY_BASE_DELAY,
            max_delay=_RETRY_MAX_DELAY,
            give_up_after=give_up_after,
            deadline=deadline,
            retry_if=lambda error: (
                isinstance(error, BrokerUnavailableError | StreamMissingError)
                and not isinstance(error, NoMessageError)
                and not (isinstance(error, StreamMissingError) and error.stream not in self.seen)
            ),
        )

    async def metadata(
        self, streams: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> ClusterMetadata:
        request = api_pb2.FetchMetadataRequest(streams=streams, groups=groups)
        response = await self.call(", ".join(streams), "FetchMetadata", request)
        cluster = cluster_metadata(response)
        for stream in streams:
            if stream not in cluster.streams:
                raise StreamMissingError("there is no such stream: create it first", stream=stream)
            self.seen.add(stream)
        return cluster

    async def find(self, stream: str, partition: int) -> tuple[PartitionMetadata, ClusterMetadata]:
        cluster = await self.metadata([stream])
        found = cluster.streams[stream].partitions.get(partition)
        if found is None:
            raise StreamError(f"there is no partition {partition}", stream=stream)
        return found, cluster

    async def leader(self, stream: str, partition: int) -> str:
        found, cluster = await self.find(stream, partition)
        if found.leader not in cluster.brokers:
            raise BrokerUnavailableError(f"stream {stream}: partition {partition} has no leader")
        return cluster.brokers[found.leader].address

    def translate(self, stream: str, error: grpc.aio.AioRpcError) -> LiftbridgeError:
        code, details = error.code(), error.details() or "no details"
        if code is grpc.StatusCode.ALREADY_EXISTS:
            return AlreadyExistsError(details)
        if code is grpc.StatusCode.NOT_FOUND:
            if "deleted" in details:
                self.seen.discard(stream)
            return StreamMissingError(details, stream=stream)
        if _WRONG_CERTIFICATE in details:
            return LiftbridgeError(f"the certificate of the broker is not trusted ({details})")
        if (code in _RETRIED and _NO_KEY not in details) or _CAN_NOT_READ in details:
            is_served = not any(text in details for text in _NOT_SERVED)
            return (BrokerUnavailableError if is_served else NotServedError)(
                f"stream {stream}: the broker answered {code.name} ({details})"
            )
        return LiftbridgeError(f"stream {stream}: the broker refused with {code.name} ({details})")
