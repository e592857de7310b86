"""Messages as envelopes, many of them."""

from __future__ import annotations

from collections.abc import Mapping

from feedapi_client.liftbridge.envelope import crc32c, encode
from feedapi_client.liftbridge.messages_pb2 import Message
from feedapi_client.liftbridge.streams import ANY_OFFSET

_RESERVED_HEADERS = frozenset({"subject", "reply"})


class Encoder:
    """Messages of one call as envelopes.

    What they share is serialized once: protobuf merges concatenated messages, so each message is the shared bytes followed by its own fields.
    """

    def __init__(self, shared: Message, expected_offset: int, *, crc: bool) -> None:
        self._offset = expected_offset
        if expected_offset == ANY_OFFSET:
            shared.offset = ANY_OFFSET
        self._shared = shared.SerializeToString()
        self._own = Message()
        self._crc = crc
        self._head = encode(b"", 0)[:8]

    def __call__(
        self,
        value: bytes,
        key: bytes | None,
        headers: Mapping[str, bytes] | None,
        correlation_id: str,
    ) -> bytes:
        """One message in its envelope. Raises ValueError for header names that the broker overwrites."""
        own = self._own
        own.Clear()
        own.value = value
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
        if not self._crc:
            return encode(payload, 0, crc=False)
        return self._head + crc32c(payload).to_bytes(4, "big") + payload


def check_headers(headers: Mapping[str, bytes] | None) -> None:
    """Raise ValueError for names that the broker overwrites."""
    if headers and not _RESERVED_HEADERS.isdisjoint(headers):
        raise ValueError(
            "the header names 'subject' and 'reply' are overwritten by the broker: choose others"
        )
