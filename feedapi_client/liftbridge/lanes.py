"""Fast lanes through nats-py, for many small messages: publishes go out in one write, acks come in without a task switch for each.

nats-py spends most of its time for a message on regular expressions, a queue and a task for each subscription. These lanes frame publishes themselves and
take the acks out of the bytes that arrive, before nats-py's own parser sees the rest. Connections, reconnects, buffers and back-pressure stay nats-py's. They
reach for attributes that nats-py does not document, so `AckLane.open` looks whether they are there; without them everything goes the documented way.
"""

from __future__ import annotations

from collections.abc import Callable

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from feedapi_client.liftbridge.errors import BrokerUnavailableError

_CRLF = b"\r\n"


class AckLane(Parser):
    """nats-py's parser, but messages of one subscription go to `take` at once, several together."""

    def __init__(
        self, client: Client, subscription: Subscription, take: Callable[[list[bytes]], None]
    ) -> None:
        super().__init__(client)
        self.__dict__.update(client._ps.__dict__)
        self._client = client
        self._head = b"MSG %s %d " % (subscription.subject.encode(), subscription._id)
        self._take = take
        self._rest = b""

    @classmethod
    def open(
        cls, client: Client, subscription: Subscription, take: Callable[[list[bytes]], None]
    ) -> bool:
        """Put the lane in; False, and nothing is changed, when this nats-py lacks what the lanes need."""
        wanted = ("_flush_queue", "_send_command", "_flush_pending")
        if (
            type(getattr(client, "_ps", None)) is not Parser
            or not hasattr(subscription, "_id")
            or not all(hasattr(client, name) for name in wanted)
        ):
            return False
        client._ps = cls(client, subscription, take)
        return True

    def reset(self) -> None:
        """Forget what was received in part: the connection is a new one."""
        self._rest = b""
        super().reset()

    async def parse(self, data: bytes = b"") -> None:
        """Take in what arrived."""
        if self.state == AWAITING_CONTROL_LINE and not self.buf:
            data = self._split(self._rest + data)
        if data:
            await super().parse(data)

    def _split(self, data: bytes) -> bytes:
        """Hand on the acks at the start; what follows them is nats-py's, unless it may be the first part of another ack."""
        head, place, whole = self._head, 0, True
        acks: list[bytes] = []
        while data.startswith(head, place):
            end = data.find(_CRLF, place)
            size = data[place + len(head) : end]
            if end >= 0 and not size.isdigit():
                break
            start = end + 2
            stop = start + int(size) if end >= 0 else 0
            if end < 0 or len(data) < stop + 2:
                whole = False
                break
            acks.append(data[start:stop])
            place = stop + 2
        if acks:
            self._client.stats["in_msgs"] += len(acks)
            self._client.stats["in_bytes"] += place
            self._take(acks)
        rest = data[place:]
        if rest and (not whole or head.startswith(rest)):
            self._rest = rest
            return b""
        self._rest = b""
        return rest


async def flush(client: Client) -> None:
    """Wait until the server has taken in all that was sent before.

    nats-py's own flush writes its PING ahead of what it still has buffered, so that only a second one is behind it: without that a message can overtake
    the subscription that it is for. Raises what nats-py raises.
    """
    await client.flush()
    await client.flush()


class Outbox:
    """Where publishes of one call leave for NATS: framed and together where the fast lane is open, one by one otherwise."""

    def __init__(self, client: Client, *, fast: bool) -> None:
        self._client = client
        self._fast = fast
        self._frames: list[bytes] = []
        self._messages = 0
        self._subjects: dict[str, bytes] = {}

    async def add(self, subject: str, data: bytes) -> None:
        """Send, or keep until `flush`."""
        if not self._fast:
            try:
                await self._client.publish(subject, data)
            except nats.errors.Error as error:
                raise unavailable(error) from error
            return
        head = self._subjects.get(subject)
        if head is None:
            head = self._subjects[subject] = _publish_head(subject)
        self._frames += (head, b"%d\r\n" % len(data), data, b"\r\n")
        self._messages += 1

    async def flush(self) -> None:
        """Send what is kept."""
        if self._messages:
            frames, count, self._frames, self._messages = self._frames, self._messages, [], 0
            if self._client.is_closed:
                raise BrokerUnavailableError("the connection to NATS is closed")
            await _write(self._client, frames, count)


async def _write(client: Client, frames: list[bytes], messages: int) -> None:
    """Send publishes that are framed already, so many of them."""
    data = b"".join(frames)
    client.stats["out_msgs"] += messages
    client.stats["out_bytes"] += len(data)
    await client._send_command(data)
    if client._flush_queue is not None and client._flush_queue.empty():
        await client._flush_pending()


def _publish_head(subject: str) -> bytes:
    if not subject or any(character.isspace() for character in subject):
        raise ValueError(f"{subject!r} is no NATS subject")
    return f"PUB {subject}  ".encode()


def unavailable(error: Exception) -> BrokerUnavailableError:
    """An error of nats-py as ours. Never its text: it may quote a server's URL."""
    return BrokerUnavailableError(f"NATS: {type(error).__name__}")
