"""What acks on a NATS server of a test's own, where a broker would take longer to start."""

from __future__ import annotations

from types import TracebackType

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from feedapi_client.liftbridge import Ack, AckPolicy, Message, encode
from feedapi_client.liftbridge.envelope import decode_message


class Acker:
    """Keeps what is published to subjects, and acks it. Use it in `async with`.

    The stream of a subject is what it begins with, up to a dot. Expected offsets are not checked.
    """

    def __init__(self, url: str, *subjects: str) -> None:
        self._url = url
        self.messages: dict[str, list[Message]] = {subject: [] for subject in subjects}

    async def __aenter__(self) -> Acker:
        self._client: Client = await nats.connect(
            self._url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, error_cb=_ignore
        )
        for subject in self.messages:
            await self._client.subscribe(subject, cb=self._receive)
        await self._client.flush()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.close()

    def values(self, subject: str) -> list[bytes]:
        return [message.value for message in self.messages[subject]]

    async def _receive(self, received: Msg) -> None:
        message, kept = decode_message(received.data), self.messages[received.subject]
        ack = Ack(
            stream=received.subject.partition(".")[0],
            msgSubject=received.subject,
            offset=len(kept),
            ackInbox=message.ackInbox,
            correlationId=message.correlationId,
        )
        kept.append(message)
        if message.ackInbox and int(message.ackPolicy) != AckPolicy.NONE:
            await self._client.publish(message.ackInbox, encode(ack))


async def _ignore(error: Exception) -> None:
    """Do nothing: a lost connection to NATS is part of the tests."""
