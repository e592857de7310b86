"""The envelope around every Liftbridge message on NATS: 8 or 12 bytes of header, then the payload.

The layout, big-endian: magic ``B9 0E 43 B4``, version 0, offset of the payload, flags (bit 0: a CRC-32C of the payload follows), type, CRC-32C.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import google_crc32c
from google.protobuf.message import DecodeError

from feedapi_client.liftbridge.errors import EnvelopeError
from feedapi_client.liftbridge.messages_pb2 import Ack, Message

MAGIC = b"\xb9\x0e\x43\xb4"
VERSION = 0

_HEADER = struct.Struct(">4sBBBB")
_HEADER_WITH_CRC = struct.Struct(">4sBBBBI")
_CRC_FLAG = 0x01
_USUAL_ACK = MAGIC + bytes([VERSION, _HEADER_WITH_CRC.size, _CRC_FLAG, 1])


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of `data`."""
    return google_crc32c.value(data)  # type: ignore[no-any-return]


class MsgType(IntEnum):
    """What an envelope holds. 0 and 1 are for clients, the others travel between brokers."""

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
    """When the broker acks: stored by the partition's leader (lost when that dies before it replicates), stored by all in-sync replicas, never."""

    LEADER = 0
    ALL = 1
    NONE = 2


class AckError(IntEnum):
    """What an ack says went wrong."""

    OK = 0
    UNKNOWN = 1
    INCORRECT_OFFSET = 2
    TOO_LARGE = 3
    ENCRYPTION = 4


@dataclass(frozen=True, slots=True)
class Envelope:
    """One envelope: its type (a `MsgType` where the number is known), its payload, and whether a checksum came with it."""

    type: int
    payload: bytes
    crc: bool = True

    def encode(self) -> bytes:
        """The bytes that go on the wire."""
        return encode(self.payload, self.type, crc=self.crc)

    @classmethod
    def decode(cls, data: bytes, expected: int | None = None) -> Envelope:
        """As the function `decode`."""
        return decode(data, expected)

    def message(self) -> Message:
        """The payload as a published `Message`. Raises `EnvelopeError` when it is of another type or no valid protobuf."""
        _check_type(self.type, MsgType.PUBLISH)
        return parse_message(self.payload)

    def ack(self) -> Ack:
        """The payload as an `Ack`. Raises `EnvelopeError` when it is of another type or no valid protobuf."""
        _check_type(self.type, MsgType.ACK)
        return parse_ack(self.payload)


def encode(payload: bytes | Message | Ack, type: int | None = None, *, crc: bool = True) -> bytes:
    """The payload in an envelope, with a CRC-32C unless told otherwise. A `Message` or `Ack` brings its type with it; bytes need one (ValueError)."""
    if isinstance(payload, Message | Ack):
        type = MsgType.PUBLISH if isinstance(payload, Message) else MsgType.ACK
        payload = payload.SerializeToString()
    elif type is None or not 0 <= type <= 0xFF:
        raise ValueError(f"encode: bytes need a MsgType, not {type}")
    if not crc:
        return _HEADER.pack(MAGIC, VERSION, _HEADER.size, 0, type) + payload
    return (
        _HEADER_WITH_CRC.pack(
            MAGIC, VERSION, _HEADER_WITH_CRC.size, _CRC_FLAG, type, crc32c(payload)
        )
        + payload
    )


def decode(data: bytes, expected: int | None = None) -> Envelope:
    """The envelope in `data`; when `expected` is given, only of that type. Raises `EnvelopeError`, whose `check` says what is wrong.

    Unknown flags are ignored, and so is what stands in a longer header.
    """
    payload, flags, number = _open(data)
    if expected is not None:
        _check_type(number, expected)
    return Envelope(
        _TYPES[number] if number < len(_TYPES) else number, payload, bool(flags & _CRC_FLAG)
    )


def decode_message(data: bytes) -> Message:
    """The `Message` in an envelope. Raises `EnvelopeError`."""
    payload, _, number = _open(data)
    _check_type(number, MsgType.PUBLISH)
    return parse_message(payload)


def decode_ack(data: bytes) -> Ack:
    """The `Ack` in an envelope. Raises `EnvelopeError`."""
    if data[:8] == _USUAL_ACK:
        # The one case that a publisher meets a hundred thousand times a second; anything unusual takes the long way.
        payload = data[12:]
        if google_crc32c.value(payload) == int.from_bytes(data[8:12], "big"):
            return parse_ack(payload)
    payload, _, number = _open(data)
    _check_type(number, MsgType.ACK)
    return parse_ack(payload)


def parse_message(payload: bytes) -> Message:
    """A `Message` from protobuf. Raises `EnvelopeError`."""
    try:
        return Message.FromString(payload)
    except DecodeError as error:
        raise _invalid("Message", payload) from error


def parse_ack(payload: bytes) -> Ack:
    """An `Ack` from protobuf. Raises `EnvelopeError`."""
    try:
        return Ack.FromString(payload)
    except DecodeError as error:
        raise _invalid("Ack", payload) from error


def _open(data: bytes) -> tuple[bytes, int, int]:
    """Payload, flags and type, after all checks but the one of the type."""
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
    payload = bytes(data[header:])
    if flags & _CRC_FLAG:
        _check_crc(data, header, payload)
    return payload, flags, number


def _check_crc(data: bytes, header: int, payload: bytes) -> None:
    if header != _HEADER_WITH_CRC.size:
        raise EnvelopeError(
            f"with a checksum the header length is {_HEADER_WITH_CRC.size}, not {header}",
            check="checksum header",
        )
    said, found = int.from_bytes(data[_HEADER.size : header], "big"), crc32c(payload)
    if said != found:
        raise EnvelopeError(f"CRC-32C is {found:08x}, the header says {said:08x}", check="checksum")


def _check_type(number: int, expected: int) -> None:
    if number != expected:
        raise EnvelopeError(f"type {number}, not {int(expected)}", check="type")


def _invalid(kind: str, payload: bytes) -> EnvelopeError:
    return EnvelopeError(f"the payload of {len(payload)} bytes is no valid {kind}", check="payload")
