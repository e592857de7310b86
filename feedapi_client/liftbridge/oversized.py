"""What becomes of an event that is larger than the broker takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from feedapi_client.consumer import FeedConsumer
from feedapi_client.liftbridge.liftbridge_errors import MessageTooLargeError
from feedapi_client.model import Batch
from feedapi_client.notifications import EventQuarantined
from feedapi_client.protocol.text import printable
from feedapi_client.quarantine.quarantine_store import QuarantineStore, quarantine_beside
from feedapi_client.quarantine.record import quarantined

logger = logging.getLogger(__name__)

OnOversized = Literal["raise", "skip", "quarantine"] | QuarantineStore
"""What a relay does with an event that is too large for a message."""


class OversizedEvents:
    """Carries out a relay's policy.

    Raises:
        ValueError: the policy is unknown.
        StoreError: the cursor store has no quarantine, and no other one is given.
    """

    def __init__(self, policy: OnOversized, consumer: FeedConsumer) -> None:
        if isinstance(policy, str) and policy not in ("raise", "skip", "quarantine"):
            raise ValueError(
                "on_oversized is 'raise', 'skip', 'quarantine' or a QuarantineStore, "
                f"not {policy!r}"
            )
        self._consumer = consumer
        self._skips = policy == "skip"
        self._quarantine: QuarantineStore | None = None
        if policy == "quarantine":
            self._quarantine = quarantine_beside(consumer.store)
        elif not isinstance(policy, str):
            self._quarantine = policy

    async def prepare(self) -> None:
        """Make sure that events can be put aside before one has to be. Raises `StoreError`."""
        if self._quarantine is not None:
            await self._quarantine.prepare()

    async def put_aside(
        self, batch: Batch, indices: Sequence[int], error: MessageTooLargeError
    ) -> None:
        """Skip these events of the batch or put them into quarantine, with a warning for each.

        Raises:
            MessageTooLargeError: the policy is to stop. It names the event's place.
            StoreError: they could not be put into quarantine.
        """
        if self._quarantine is None and not self._skips:
            raise self._stop(batch, indices[0], error)
        if self._quarantine is not None:
            key = self._consumer.key
            await self._quarantine.add(
                [
                    quarantined(key, batch.events[index], batch.cursor, index, error)
                    for index in indices
                ]
            )
        for index in indices:
            logger.warning(
                "feed %s, partition %d: %s %s",
                self._consumer.feed,
                batch.partition,
                _place(batch, index),
                "is quarantined: it is too large for a message"
                if self._quarantine is not None
                else "is skipped: it is too large for a message",
                extra={"feed": self._consumer.feed, "partition": batch.partition},
            )
            if self._quarantine is not None:
                told = EventQuarantined(batch.partition, type(error).__qualname__)
                self._consumer._listeners.tell(told, error)

    def _stop(self, batch: Batch, index: int, error: MessageTooLargeError) -> MessageTooLargeError:
        stopped = MessageTooLargeError(
            f"feed {self._consumer.feed}, partition {batch.partition}: {_place(batch, index)} is "
            "too large for a message. Raise the limits of the broker "
            "(clustering.replication.max.bytes), of NATS (max_payload) and of the publisher "
            "(max_message_bytes=, --max-message-bytes), or let the relay skip or quarantine such "
            "events: on_oversized= (--oversized)",
            stream=error.stream,
            correlation_id=error.correlation_id,
        )
        stopped.index = index
        return stopped


def _place(batch: Batch, index: int) -> str:
    size = len(batch.events[index].raw)
    cursor = printable(batch.cursor, 200)
    return f"event number {index} of those up to cursor '{cursor}' ({size:,} bytes)"
