"""Publishing one message with one call of the gRPC API: to a stream, or to a NATS subject."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
from gufo.liftbridge import api_pb2
from gufo.liftbridge.api_pb2_grpc import APIStub

from feedapi_client.liftbridge.brokers import Brokers
from feedapi_client.liftbridge.envelope import AckPolicy, check_headers
from feedapi_client.liftbridge.liftbridge_errors import (
    TOO_LARGE_TEXTS,
    AckTimeoutError,
    EncryptionError,
    IncorrectOffsetError,
    MessageTooLargeError,
    PublishError,
    PublishRefusedError,
)
from feedapi_client.liftbridge.messages_pb2 import Ack

# What the broker says, and NATS behind it. The status alone does not tell them apart.
_REFUSED: tuple[tuple[str, type[PublishError]], ...] = (
    ("incorrect expected offset", IncorrectOffsetError),
    *((text, MessageTooLargeError) for text in TOO_LARGE_TEXTS),
    ("encryption failed", EncryptionError),
)
_LATE = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def publish(
    brokers: Brokers, request: Any, timeout: float | None, *, to_subject: bool
) -> Ack | None:
    """Make the call and return the ack, or None with `AckPolicy.NONE`.

    Raises:
        PublishError: the message was not stored, or may not have been.
    """
    check_headers(request.headers)
    request.correlationId = request.correlationId or secrets.token_hex(8)
    target = request.subject if to_subject else request.stream
    # Without a deadline the broker does not wait for the ack.
    seconds = timeout or brokers.call_timeout
    try:
        response = await _call(brokers, request, seconds, to_subject=to_subject)
    except grpc.aio.AioRpcError as error:
        raise _refused(error, target, request.correlationId) from error
    except TimeoutError as error:
        raise _late(target, request.correlationId, seconds) from error
    if request.ackPolicy == int(AckPolicy.NONE):
        return None
    if not response.HasField("ack"):
        raise _late(target, request.correlationId, seconds)
    return Ack.FromString(response.ack.SerializeToString())


async def _call(brokers: Brokers, request: Any, seconds: float, *, to_subject: bool) -> Any:
    method = "PublishToSubject" if to_subject else "Publish"
    failure: grpc.aio.AioRpcError | None = None
    for address in brokers.known_addresses:
        stub = APIStub(brokers.channel(address))  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(seconds):
                return await getattr(stub, method)(
                    request, timeout=seconds, metadata=brokers.call_metadata
                )
        except grpc.aio.AioRpcError as error:
            # Only where nothing was sent: a message is not published twice.
            if error.code() is not grpc.StatusCode.UNAVAILABLE or _was_sent(error):
                raise
            failure = error
    assert failure is not None
    raise failure


def _was_sent(error: grpc.aio.AioRpcError) -> bool:
    return "failed to connect" not in (error.details() or "").lower()


def _refused(error: grpc.aio.AioRpcError, target: str, correlation_id: str) -> PublishError:
    details = error.details() or "no details"
    if error.code() in _LATE:
        kind: type[PublishError] = AckTimeoutError
    else:
        kind = next(
            (kind for text, kind in _REFUSED if text in details.lower()), PublishRefusedError
        )
    return kind(
        f"the broker answered {error.code().name} ({details})",
        stream=target,
        correlation_id=correlation_id,
    )


def _late(target: str, correlation_id: str, seconds: float) -> AckTimeoutError:
    return AckTimeoutError(
        f"no ack within {seconds:g} s: the message may be stored or not",
        stream=target,
        correlation_id=correlation_id,
    )


def stream_request(
    stream: str,
    value: bytes,
    *,
    key: bytes | None,
    partition: int,
    headers: Mapping[str, bytes] | None,
    ack_policy: AckPolicy,
    expected_offset: int,
) -> api_pb2.PublishRequest:
    """Return the request of a message to a stream."""
    return api_pb2.PublishRequest(
        stream=stream,
        partition=partition,
        value=value,
        key=key,
        headers=headers,
        ackPolicy=api_pb2.AckPolicy.Name(int(ack_policy)),
        expectedOffset=expected_offset,
    )


def subject_request(
    subject: str,
    value: bytes,
    *,
    key: bytes | None,
    headers: Mapping[str, bytes] | None,
    ack_policy: AckPolicy,
) -> api_pb2.PublishToSubjectRequest:
    """Return the request of a message to a subject."""
    return api_pb2.PublishToSubjectRequest(
        subject=subject,
        value=value,
        key=key,
        headers=headers,
        ackPolicy=api_pb2.AckPolicy.Name(int(ack_policy)),
    )
