"""A broker that only acks, in a process of its own, to measure publishers and not the broker.

It implements the part of the NATS protocol that it needs, stores nothing, and decodes each message
as a broker has to.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from feedapi_client.liftbridge import Ack, Message
from tests.benchmarks.serving import serving

_CHUNK = 1 << 20
_ENVELOPE_WITH_CRC = 12
# As the real broker's: without a checksum.
_ACK_HEADER = b"\xb9\x0e\x43\xb4\x00\x08\x00\x01"


@contextmanager
def fast_broker(nats_url: str, stream: str, *, in_thread: bool = False) -> Iterator[None]:
    """Ack all that is published to the subject `stream`. `in_thread` is as of `serving`."""
    with serving(_serve, nats_url, stream, in_thread=in_thread):
        yield


def _serve(ready: Connection, nats_url: str, stream: str) -> None:
    where = urlsplit(nats_url)
    with socket.create_connection((where.hostname or "", where.port or 4222)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(
            b'CONNECT {"verbose":false,"pedantic":false,"echo":false}\r\nSUB %s 1\r\nPING\r\n'
            % stream.encode()
        )
        respond = _Responder(stream)
        rest = b""
        while data := connection.recv(_CHUNK):
            out, rest, pong = respond(rest + data)
            if pong:
                ready.send(None)
            if out:
                connection.sendall(out)


class _Responder:
    """Turns received bytes of the NATS protocol into the bytes to send."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._shared: dict[str, bytes] = {}
        self._offset = itertools.count(1)

    def __call__(self, data: bytes) -> tuple[bytes, bytes, bool]:
        out: list[bytes] = []
        place, pong = 0, False
        while (end := data.find(b"\r\n", place)) >= 0:
            if data.startswith(b"MSG", place):
                size = int(data[data.rindex(b" ", place, end) + 1 : end])
                start = end + 2
                if len(data) < start + size + 2:
                    break
                self._ack(data[start : start + size], out)
                place = start + size + 2
                continue
            if data.startswith(b"PING", place):
                out.append(b"PONG\r\n")
            pong = pong or data.startswith(b"PONG", place)
            place = end + 2
        return b"".join(out), data[place:], pong

    def _ack(self, envelope: bytes, out: list[bytes]) -> None:
        if len(envelope) < _ENVELOPE_WITH_CRC or envelope[:4] != _ACK_HEADER[:4]:
            return
        message = Message.FromString(envelope[_ENVELOPE_WITH_CRC:])
        if not message.ackInbox:
            return
        inbox = message.ackInbox
        if (shared := self._shared.get(inbox)) is None:
            shared = self._shared[inbox] = self._fields_of_all(inbox)
        payload = (
            shared
            + Ack(
                offset=next(self._offset), correlationId=message.correlationId
            ).SerializeToString()
        )
        ack = _ACK_HEADER + payload
        out.append(b"PUB %s %d\r\n%s\r\n" % (inbox.encode(), len(ack), ack))

    def _fields_of_all(self, inbox: str) -> bytes:
        """Return what all acks to an inbox have: as much as those of the real broker."""
        now = time.time_ns()
        return Ack(
            stream=self._stream,
            partitionSubject=self._stream,
            msgSubject=self._stream,
            ackInbox=inbox,
            receptionTimestamp=now,
            commitTimestamp=now,
        ).SerializeToString()
