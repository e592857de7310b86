"""An optional fast path through nats-py, for many small messages. It uses undocumented attributes.

What it does: publishes are framed here and leave in one write; acks are taken out of the received
bytes before nats-py's parser sees the rest. nats-py itself spends most of its time for a message on
regular expressions, a queue, and a task switch for each ack. Connections, reconnects, buffers and
back-pressure remain nats-py's.

What it gains: a relay makes 0.77 to 1.03 of the events a second of a bare nats-py loop with acks,
where it makes 0.49 to 0.63 by documented calls (medians of four runs of
``tests.benchmarks.bench_liftbridge``, nats-py 2.16.0, CPython 3.11, 2 cores). The goal is 0.85. One
half alone is not enough: 0.65 with only the acks, 0.51 with only the publishes.

Everything works without it: `install_fast_path` does nothing when this version of nats-py lacks an
attribute that it needs.
"""

from __future__ import annotations

from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from feedapi_client.liftbridge.liftbridge_errors import BrokerUnavailableError
from feedapi_client.liftbridge.nats_connection import MessageWriter, cause

_CRLF = b"\r\n"
_LONGEST_LINE = 4096  # of nats-py, which does not take a longer incomplete one for an error
_NEEDED = ("_flush_queue", "_send_command", "_flush_pending")

OnAcks = Callable[[list[bytes]], None]


def install_fast_path(
    client: Client, acks: Subscription, on_acks: OnAcks
) -> Callable[[Client], MessageWriter] | None:
    """Take over the messages of the subscription `acks`, and return the fast writer.

    Returns None, and changes nothing, when this version of nats-py lacks a needed attribute.
    """
    if (
        type(getattr(client, "_ps", None)) is not Parser
        or not hasattr(acks, "_id")
        or not all(hasattr(client, name) for name in _NEEDED)
    ):
        return None
    client._ps = AckParser(client, acks, on_acks)
    return FramedWriter


class AckParser(Parser):
    """nats-py's parser, except that messages of one subscription go directly to a callback."""

    def __init__(self, client: Client, subscription: Subscription, on_acks: OnAcks) -> None:
        super().__init__(client)
        self.__dict__.update(client._ps.__dict__)
        self._client = client
        self._prefix = b"MSG %s %d " % (subscription.subject.encode(), subscription._id)
        self._on_acks = on_acks
        self._rest = b""

    def reset(self) -> None:
        """Forget an incomplete message: the connection is a new one."""
        self._rest = b""
        super().reset()

    async def parse(self, data: bytes = b"") -> None:
        if self.state == AWAITING_CONTROL_LINE and not self.buf:
            data = self._take_acks(self._rest + data)
            while line := _line_without_payload(data):
                # One PING among acks would else leave them to nats-py, and so would each chunk
                # that ends within an ack. `reset` may forget the rest meanwhile.
                self._rest = data[line:]
                await super().parse(data[:line])
                data = self._take_acks(self._rest)
        if data:
            await super().parse(data)

    def _take_acks(self, data: bytes) -> bytes:
        """Pass on the acks at the start of `data`, and return what nats-py has to parse.

        Bytes that may be the start of another ack, or of a line, are kept for the next call.
        """
        prefix, place, complete = self._prefix, 0, True
        acks: list[bytes] = []
        while data.startswith(prefix, place):
            end = data.find(_CRLF, place)
            size = data[place + len(prefix) : end]
            if end >= 0 and not size.isdigit():
                break
            start = end + 2
            stop = start + int(size) if end >= 0 else 0
            if end < 0 or len(data) < stop + 2:
                complete = False
                break
            acks.append(data[start:stop])
            place = stop + 2
        if acks:
            self._client.stats["in_msgs"] += len(acks)
            self._client.stats["in_bytes"] += place
            self._on_acks(acks)
        rest = data[place:]
        torn = _CRLF not in rest and len(rest) < _LONGEST_LINE
        if rest and (not complete or torn):
            self._rest = rest
            return b""
        self._rest = b""
        return rest


def _line_without_payload(data: bytes) -> int:
    """Return the length of the line at the start, such as a PING; 0 for a message, or none."""
    if data.startswith((b"MSG", b"HMSG")):
        return 0
    return data.find(_CRLF) + len(_CRLF) if _CRLF in data else 0


class FramedWriter(MessageWriter):
    batch_size = 128

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._frames: list[bytes] = []
        self._messages = 0
        self._commands: dict[str, bytes] = {}

    async def add(self, subject: str, data: bytes, reply: str = "") -> None:
        """Keep a message until `flush`. Raises ValueError when the subject is not valid."""
        command = self._commands.get(subject)
        if command is None:
            command = self._commands[subject] = _publish_command(subject)
        if reply:
            command = command[:-1] + f"{reply} ".encode()
        self._frames += (command, b"%d\r\n" % len(data), data, _CRLF)
        self._messages += 1

    async def flush(self) -> None:
        if not self._messages:
            return
        data, messages = b"".join(self._frames), self._messages
        self._frames, self._messages = [], 0
        client = self._client
        if client.is_closed:
            raise BrokerUnavailableError(f"the connection to NATS is closed{cause(client)}")
        client.stats["out_msgs"] += messages
        client.stats["out_bytes"] += len(data)
        await client._send_command(data)
        if client._flush_queue is not None and client._flush_queue.empty():
            await client._flush_pending()


def _publish_command(subject: str) -> bytes:
    # A space or a line break in the subject would start another argument or another command.
    if not subject or any(character.isspace() for character in subject):
        raise ValueError(f"{subject!r} is no NATS subject")
    return f"PUB {subject}  ".encode()
