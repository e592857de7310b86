"""The envelope around every Liftbridge message on NATS: a header of 8 or 12 bytes and a payload.

The header, big-endian: magic ``B9 0E 43 B4``, version 0, offset of the payload, flags (bit 0: a
CRC-32C of the payload follows), type, and the CRC-32C where the flag is set.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import google_crc32c
from google.protobuf.message import DecodeError

from feedapi_client.liftbridge.liftbridge_errors import EnvelopeError
from feedapi_client.liftbridge.messages_pb2 import Ack, Message
from feedapi_client.liftbridge.stream_model import ANY_OFFSET

MAGIC = b"\xb9\x0e\x43\xb4"
VERSION = 0

_HEADER = struct.Struct(">4sBBBB")
_HEADER_WITH_CRC = struct.Struct(">4sBBBBI")
_CRC_FLAG = 0x01
_USUAL_ACK = MAGIC + bytes([VERSION, _HEADER.size, 0, 1])
_to_ack = Ack.FromString
_RESERVED_HEADERS = frozenset({"subject", "reply"})

T = TypeVar("T", Message, Ack)


class MsgType(IntEnum):
    """What an envelope holds. Clients use 0 and 1; the other types travel between brokers."""

    PUBLISH = 0
    ACK = 1
    REPLICATION_REQUEST = 2
    REPLICATION_RESPONSE = 3
    RAFT_JOIN_REQUEST = 4
    RAFT_JOIN_RESPONSE = 5
    LEADER_EPOCH_OFFSET_REQUEST = 6
    LEADER_EPOCH_OFFSET_RESPONSE = 7
    PROPAGATED_REQUEST = 8
    PROPAGATED_RESPONSE = 9
    SERVER_INFO_REQUEST = 10
    SERVER_INFO_RESPONSE = 11
    PARTITION_STATUS_REQUEST = 12
    PARTITION_STATUS_RESPONSE = 13
    PARTITION_NOTIFICATION = 14


_TYPES = tuple(MsgType)


class AckPolicy(IntEnum):
    """When the broker acks a message.

    ``LEADER``: when the partition's leader stored it. The message is lost if the leader fails
    before it replicates. ``ALL``: when all in-sync replicas stored it. ``NONE``: never.
    """

    LEADER = 0
    ALL = 1
    NONE = 2


class AckError(IntEnum):
    """The error code of an ack."""

    OK = 0
    UNKNOWN = 1
    INCORRECT_OFFSET = 2
    TOO_LARGE = 3
    ENCRYPTION = 4


@dataclass(frozen=True, slots=True)
class Envelope:
    """A decoded envelope: its type (a `MsgType` where that is known), its payload, its checksum."""

    type: int
    payload: bytes
    crc: bool = True

    def encode(self) -> bytes:
        """Return the bytes that go on the wire."""
        return encode(self.payload, self.type, crc=self.crc)

    @classmethod
    def decode(cls, data: bytes, expected: int | None = None) -> Envelope:
        """Decode an envelope, as the function `decode` does."""
        return decode(data, expected)

    def message(self) -> Message:
        """Return the payload as a published `Message`. Raises `EnvelopeError`: it is none."""
        _check_type(self.type, MsgType.PUBLISH)
        return _parse(Message, self.payload)

    def ack(self) -> Ack:
        """Return the payload as an `Ack`. Raises `EnvelopeError`: it is none."""
        _check_type(self.type, MsgType.ACK)
        return _parse(Ack, self.payload)


def encode(
    payload: bytes | bytearray | memoryview | Message | Ack,
    type: int | None = None,
    *,
    crc: bool = True,
) -> bytes:
    """Return the payload in an envelope, with a CRC-32C unless `crc` is False.

    Arguments:
        payload: a `Message` or an `Ack`, whose type is known, or bytes.
        type: the type of bytes, 0 to 255; ignored for a `Message` or an `Ack`.

    Raises:
        ValueError: the payload is bytes, and `type` is missing or out of range.
    """
    if isinstance(payload, Message | Ack):
        type = MsgType.PUBLISH if isinstance(payload, Message) else MsgType.ACK
        payload = payload.SerializeToString()
    elif type is None or not 0 <= type <= 0xFF:
        raise ValueError(f"encode: bytes need a MsgType, not {type}")
    else:
        payload = bytes(payload)
    if not crc:
        return _HEADER.pack(MAGIC, VERSION, _HEADER.size, 0, type) + payload
    header = _HEADER_WITH_CRC.pack(
        MAGIC, VERSION, _HEADER_WITH_CRC.size, _CRC_FLAG, type, crc32c(payload)
    )
    return header + payload


def decode(data: bytes, expected: int | None = None) -> Envelope:
    """Return the envelope in `data`.

    Unknown flags are ignored, and so are the additional bytes of a longer header.

    Arguments:
        expected: the only type to accept; None accepts every type.

    Raises:
        EnvelopeError: the data is no such envelope. Its `check` names the check that failed.
    """
    if len(data) < _HEADER.size:
        raise EnvelopeError(
            f"{len(data)} bytes are fewer than a header of {_HEADER.size}", check="length"
        )
    magic, version, header, flags, number = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise EnvelopeError(f"it does not start with {MAGIC.hex()}", check="magic")
    if version != VERSION:
        raise EnvelopeError(f"version {version} is not {VERSION}", check="version")
    if not _HEADER.size <= header <= len(data):
        raise EnvelopeError(
            f"a header length of {header} in {len(data)} bytes", check="header length"
        )
    payload, has_crc = bytes(data[header:]), bool(flags & _CRC_FLAG)
    if has_crc and header != _HEADER_WITH_CRC.size:
        raise EnvelopeError(
            f"with a checksum the header length is {_HEADER_WITH_CRC.size}, not {header}",
            check="checksum header",
        )
    if has_crc and (sent := int.from_bytes(data[8:12], "big")) != (found := crc32c(payload)):
        raise EnvelopeError(f"CRC-32C is {found:08x}, the header says {sent:08x}", check="checksum")
    if expected is not None:
        _check_type(number, expected)
    return Envelope(_TYPES[number] if number < len(_TYPES) else number, payload, has_crc)


def decode_message(data: bytes) -> Message:
    return decode(data, MsgType.PUBLISH).message()


def decode_ack(data: bytes) -> Ack:
    if data[:8] == _USUAL_ACK:
        # Skips the general checks for the header that brokers send, which has no checksum: a
        # publisher decodes a hundred thousand of them a second.
        try:
            return _to_ack(data[8:])
        except DecodeError:
            pass  # the general path below tells of it
    return decode(data, MsgType.ACK).ack()


def _parse(kind: type[T], payload: bytes) -> T:
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        text = f"the payload of {len(payload)} bytes is no valid {kind.DESCRIPTOR.name}"
        raise EnvelopeError(text, check="payload") from error


BytesLike = bytes | bytearray | memoryview
"""What the value of a message may be given as."""


class MessageEncoder:
    """Encodes the messages of one publish call into envelopes.

    The fields that all messages share are serialized once. Protobuf merges concatenated messages,
    so each message is the shared bytes followed by its own fields. An expected offset counts up.
    """

    def __init__(self, shared: Message, expected_offset: int) -> None:
        self._offset = expected_offset
        if expected_offset == ANY_OFFSET:
            shared.offset = ANY_OFFSET
        self._shared = shared.SerializeToString()
        self._own = Message()
        self._header = encode(b"", MsgType.PUBLISH)[: _HEADER.size]

    def __call__(
        self,
        value: BytesLike,
        key: bytes | None,
        headers: Mapping[str, bytes] | None,
        correlation_id: str,
    ) -> bytes:
        own = self._own
        own.Clear()
        own.value = as_bytes(value)
        own.correlationId = correlation_id
        if key is not None:
            own.key = key
        if headers:
            check_headers(headers)
            own.headers.update(headers)
        if self._offset != ANY_OFFSET:
            own.offset = self._offset
            self._offset += 1
        payload = self._shared + own.SerializeToString()
        return self._header + crc32c(payload).to_bytes(4, "big") + payload


def check_headers(headers: Mapping[str, bytes] | None) -> None:
    """Raise ValueError for header names that the broker overwrites."""
    if headers and not _RESERVED_HEADERS.isdisjoint(headers):
        raise ValueError(
            "the header names 'subject' and 'reply' are overwritten by the broker: choose others"
        )


def as_bytes(value: BytesLike) -> bytes:
    """Return the value as bytes. Raises TypeError for what holds none, such as None or text."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise TypeError(
        f"a value is bytes, a bytearray or a memoryview, not of the type {type(value).__name__}"
    )


def crc32c(data: bytes) -> int:
    return google_crc32c.value(data)  # type: ignore[no-any-return]


def _check_type(number: int, expected: int) -> None:
    if number != expected:
        raise EnvelopeError(f"type {number}, not {int(expected)}", check="type")
