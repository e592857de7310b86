"""The envelope: test vectors, every failing check, round trips, and arbitrary bytes."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.errors import FeedError
from feedapi_client.liftbridge import (
    Ack,
    AckError,
    AckPolicy,
    Envelope,
    EnvelopeError,
    Message,
    MsgType,
    decode,
    encode,
)
from feedapi_client.liftbridge.envelope import crc32c, decode_ack, decode_message

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "vectors" / "liftbridge_envelope.json").read_text()
)["vectors"]
HEADER = bytes.fromhex("b90e43b400080000")

messages = st.builds(
    Message,
    offset=st.integers(-1, 2**63 - 1),
    key=st.binary(max_size=20),
    value=st.binary(max_size=300),
    headers=st.dictionaries(st.text(max_size=10), st.binary(max_size=20), max_size=5),
    ackInbox=st.text(max_size=20),
    correlationId=st.text(max_size=20),
    ackPolicy=st.sampled_from(["LEADER", "ALL", "NONE"]),
)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_the_vectors_decode_as_the_server_decodes_them(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    if vector["expect"] == "error":
        with pytest.raises(EnvelopeError):
            decode(data, vector["type"])
        return
    envelope = decode(data, vector["type"])
    if "payload" in vector:
        assert envelope.payload.hex() == vector["payload"]
    for field, value in vector.get("message", {}).items():
        assert plain(getattr(envelope.message(), field)) == value
    for field, value in vector.get("ack", {}).items():
        assert plain(getattr(envelope.ack(), field)) == value


@pytest.mark.parametrize(
    "vector",
    [v for v in VECTORS if v["expect"] == "ok" and v["hex"][10:12] in ("08", "0c")],
    ids=lambda vector: vector["name"],
)
def test_the_vectors_encode_to_the_same_bytes(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    envelope = decode(data)
    assert envelope.encode() == data
    if vector["type"] == MsgType.PUBLISH and envelope.payload:
        assert encode(envelope.message(), crc=envelope.crc) == data


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if hasattr(value, "items"):
        return {name: item.decode() for name, item in value.items()}
    return value


def test_a_checksum_is_that_of_the_castagnoli_polynomial() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize(
    ("data", "check"),
    [
        (b"", "length"),
        (HEADER[:7], "length"),
        (b"\x00" + HEADER[1:], "magic"),
        (HEADER[:4] + b"\x01\x08\x00\x00", "version"),
        (HEADER[:4] + b"\x00\x07\x00\x00", "header length"),
        (HEADER[:4] + b"\x00\x09\x00\x00", "header length"),
        (HEADER[:4] + b"\x00\x0c\x01\x00", "header length"),
        (HEADER[:4] + b"\x00\x08\x01\x00", "checksum header"),
        (HEADER[:4] + b"\x00\x0d\x01\x00\x00\x00\x00\x00\x00", "checksum header"),
        (HEADER[:4] + b"\x00\x0c\x01\x00\x00\x00\x00\x01", "checksum"),
        (HEADER[:4] + b"\x00\x08\x00\x01", "type"),
    ],
)
def test_an_error_names_the_check_that_failed(data: bytes, check: str) -> None:
    with pytest.raises(EnvelopeError) as caught:
        decode(data, MsgType.PUBLISH)
    assert caught.value.check == check
    assert f"({check})" in str(caught.value)


@pytest.mark.parametrize("kind", [Envelope.message, Envelope.ack])
def test_a_payload_that_is_no_protobuf_is_refused(kind: Any) -> None:
    number = MsgType.PUBLISH if kind is Envelope.message else MsgType.ACK
    with pytest.raises(EnvelopeError) as caught:
        kind(Envelope(number, b"\xff\xff\xff"))
    assert caught.value.check == "payload"


@pytest.mark.parametrize("checksum", [b"", b"\x00", b"\x00\x00\x00"])
def test_an_ack_cut_off_within_its_checksum_is_refused(checksum: bytes) -> None:
    # Zero is the checksum of no bytes: what is there of it must not pass for the whole.
    with pytest.raises(EnvelopeError) as caught:
        decode_ack(bytes.fromhex("b90e43b4000c0101") + checksum)
    assert caught.value.check == "header length"


def test_a_message_is_not_read_as_an_ack_and_an_ack_not_as_a_message() -> None:
    for envelope, parse in (
        (decode(encode(Message())), Envelope.ack),
        (decode(encode(Ack())), Envelope.message),
    ):
        with pytest.raises(EnvelopeError, match="type"):
            parse(envelope)


@pytest.mark.parametrize(
    ("data", "envelope"),
    [
        (HEADER[:6] + b"\xfe\x00abc", Envelope(0, b"abc", False)),  # unknown flags
        (HEADER, Envelope(0, b"", False)),
        (HEADER[:7] + b"\x63", Envelope(99, b"", False)),  # of an unknown type
    ],
)
def test_what_a_decoder_does_not_know_is_no_error(data: bytes, envelope: Envelope) -> None:
    assert decode(data) == envelope


def test_the_enumerations_are_those_of_the_protocol() -> None:
    assert [kind.value for kind in MsgType] == list(range(15))
    assert (MsgType.PARTITION_NOTIFICATION.value, MsgType.REPLICATION_REQUEST.value) == (14, 2)
    assert {each.name: each.value for each in AckPolicy} == {"LEADER": 0, "ALL": 1, "NONE": 2}
    assert {error.name: error.value for error in AckError} == dict(Ack.Error.items())


@pytest.mark.parametrize("number", [None, -1, 256])
def test_bytes_need_a_valid_type(number: int | None) -> None:
    with pytest.raises(ValueError, match="MsgType"):
        encode(b"", number)


def test_an_envelope_error_is_a_feed_error_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(EnvelopeError("why", check="magic")))
    assert issubclass(EnvelopeError, FeedError)
    assert isinstance(error, EnvelopeError)
    assert error.check == "magic"
    assert "why" in str(error)


@given(messages, st.booleans())
def test_a_message_survives_a_round_trip(message: Message, crc: bool) -> None:
    assert decode_message(encode(message, crc=crc)) == message


@given(st.integers(0, 255), st.binary(max_size=200), st.booleans())
def test_an_envelope_survives_a_round_trip(number: int, payload: bytes, crc: bool) -> None:
    envelope = Envelope(number, payload, crc)
    assert decode(envelope.encode(), number) == envelope


@given(
    st.binary(max_size=60)
    | st.binary(max_size=60).map(lambda data: HEADER[:4] + data)
    | st.binary(max_size=60).map(lambda data: HEADER + data)
)
def test_arbitrary_bytes_are_a_value_or_an_envelope_error(data: bytes) -> None:
    for function in (decode, decode_message, decode_ack):
        with contextlib.suppress(EnvelopeError):
            function(data)


@given(messages, st.data())
def test_a_flipped_bit_in_a_payload_with_a_checksum_is_detected(
    message: Message, data: st.DataObject
) -> None:
    encoded = bytearray(encode(message))
    if len(encoded) == 12:
        return
    place = data.draw(st.integers(8, len(encoded) - 1))
    encoded[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(EnvelopeError):
        decode(bytes(encoded))


def test_bytes_of_every_kind_are_encoded() -> None:
    for payload in (b"x", bytearray(b"x"), memoryview(b"x")):
        for crc in (True, False):
            assert encode(payload, MsgType.PUBLISH, crc=crc) == encode(b"x", 0, crc=crc)


def test_an_ack_with_the_header_of_real_brokers_is_decoded() -> None:
    ack = Ack(stream="s", offset=7)
    data = encode(ack, crc=False)
    assert len(data) == 8 + len(ack.SerializeToString())
    assert decode_ack(data) == ack
    with pytest.raises(EnvelopeError, match="payload"):
        decode_ack(data[:8] + b"\xff")
